"""What a server allows: names it answers to, keys, body sizes and times."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from mlxinfer.errors import InvalidRequestError

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and access rules; the defaults are for one person on one machine."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs an `api_key`."""
    api_key: str | None = None
    """When set, every request but /health and /ready needs `Authorization: Bearer …`."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names in the Host header that are answered, besides loopback and `host`."""
    allowed_origins: frozenset[str] = frozenset()
    """Web pages that may call, for example "http://localhost:3000", besides the server's own."""
    max_body_bytes: int = 10 << 20
    body_timeout_s: float = 60.0
    """How long a client may take to send a request's headers, and then its body."""
    grace_s: float = 10.0
    """How long requests may go on after SIGTERM."""
    keepalive_s: float = 15.0
    """A stream that is silent this long sends a comment, so that proxies do not cut it."""

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.api_key:
            raise InvalidRequestError(
                f"host {self.host!r} can be reached from other machines: set MLXINFER_API_KEY (clients send it as a "
                "bearer token), or bind 127.0.0.1",
                param="host",
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequestError("the API key must be printable ASCII", param="api_key")

        for name in ("allowed_hosts", "allowed_origins"):
            object.__setattr__(self, name, frozenset(value.lower() for value in getattr(self, name)))

    def answers_to(self, name: str) -> bool:
        """Whether a Host header's name (without port, lower case) is this server's. A browser that was lured by a
        domain whose address was changed to ours sends that domain."""
        if name in LOOPBACK_NAMES or name == self.host.lower() or name in self.allowed_hosts:
            return True
        return not is_loopback(self.host) and _is_ip(name)


def is_loopback(host: str) -> bool:
    """True for localhost and the loopback addresses."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
