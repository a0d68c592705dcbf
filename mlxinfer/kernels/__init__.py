"""CPU kernels behind mlx's calls, for Linux machines and Macs without Metal. Never required.

`enable` finds or builds the extension out of `cpp/`, tries each of its functions against mlx's own and puts the good
ones in their place. Whatever goes wrong on the way is a line of `status`, and mlx's own functions stay.
"""

from mlxinfer.kernels.calls import kernel
from mlxinfer.kernels.enabling import Status, enable, expected, status

__all__ = ["Status", "enable", "expected", "kernel", "status"]
