"""CPU kernels behind mlx's calls, for Linux machines and Macs without Metal. Never required.

`build` makes the extension out of `cpp/`, `calls` puts its functions in the place of mlx's own.
"""
