"""What a machine of a cluster says of itself."""

from __future__ import annotations

import platform
import socket
import sys
from typing import Any

from mlxinfer import __version__, runtime, upstream
from mlxinfer.distributed import interfaces


def about() -> dict[str, Any]:
    """Versions, memory, clock and what `cluster check` compares; fast, and without measuring."""
    memory = runtime.memory()
    return {
        "version": __version__,
        **upstream.versions(),
        "python": platform.python_version(),
        "program": sys.executable,
        "os": runtime.os_name(),
        "build": interfaces.build(),
        "chip": runtime.chip_name() or platform.machine(),
        "memory_gb": round(memory.budget / 1e9, 2),
        "name": socket.gethostname(),
        "rdma": interfaces.rdma(),
        "interfaces": interfaces.as_json(interfaces.interfaces()),
    }


def measured() -> dict[str, Any]:
    """The same, and the memory's bandwidth: Apple's figure for the chip, else measured in some seconds."""
    from mlxinfer.zoo.fitting import measured_bandwidth

    rate, source = measured_bandwidth()
    return {**about(), "bandwidth_gb_s": round(rate, 1), "bandwidth_source": source}
