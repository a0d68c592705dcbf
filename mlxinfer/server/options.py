"""What a server allows: names it answers to, keys, body sizes and times."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.keys import digest_of

if TYPE_CHECKING:
    from mlxinfer.server.keys import ApiKey

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_HOST_NAME = re.compile(r"[a-z0-9._-]{1,253}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and access rules; the defaults are for one person on one machine."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs a key."""
    api_key: str | None = None
    """A key without limits, named "default". With any key, every request but /health and /ready needs one."""
    keys: tuple[ApiKey, ...] = ()
    """More keys, each with its limits."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names in the Host header that are answered, besides loopback and `host`."""
    allowed_origins: frozenset[str] = frozenset()
    """Web pages that may call, for example "http://localhost:3000", besides the server's own."""
    metrics_open: bool = False
    """/metrics needs no key."""
    access_log: str | None = None
    """"stderr" or a file that gets a line of JSON for each request; None: none. `run.serve` writes it."""
    max_requests: int | None = None
    """Requests that may be at work or wait at a time; beyond, a POST is refused before its body is read. None: the
    engines' own queues decide, once a request was read, rendered and tokenized."""
    max_body_bytes: int = 10 << 20
    body_timeout_s: float = 60.0
    """How long a client may take to send a request's headers, and then its body."""
    grace_s: float = 30.0
    """How long requests may go on after SIGTERM."""
    keepalive_s: float = 15.0
    """A stream that is silent this long sends a comment, so that proxies do not cut it."""
    page: str | None = None
    """Path of a web page with a door of its own: below it no API key counts, and files may be uploaded."""

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.api_key and not self.keys:
            raise InvalidRequestError(
                f"host {self.host!r} can be reached from other machines: set MLXINFER_API_KEY, or name a file of keys "
                "with --keys (clients send theirs as a bearer token), or bind 127.0.0.1",
                param="host",
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequestError("the API key must be printable ASCII", param="api_key")
        if self.api_key is not None and any(key.name == "default" for key in self.keys):
            raise InvalidRequestError(
                'a key of the file is called "default", as the one of MLXINFER_API_KEY is; rename it', param="keys_file"
            )
        if self.api_key is not None and any(key.digest == digest_of(self.api_key) for key in self.keys):
            raise InvalidRequestError(
                "MLXINFER_API_KEY, which has no limits, is also a key of the file; change one of them",
                param="keys_file",
            )
        for name in ("allowed_hosts", "allowed_origins"):
            object.__setattr__(self, name, frozenset(value.lower() for value in getattr(self, name)))
        for host in self.allowed_hosts:
            if not (_HOST_NAME.fullmatch(host) or _is_ip(host)):
                raise InvalidRequestError(
                    f"allowed host {host!r:.80}: it must be a name without scheme and port", param="allow_hosts"
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InvalidRequestError(
                    f"allowed origin {origin!r:.80}: it must be one page's scheme://host:port, without a path; "
                    "neither * nor null can be allowed",
                    param="allow_origins",
                )

    def in_page(self, path: str) -> bool:
        """Whether a request's path is the page's or below it."""
        return self.page is not None and (path == self.page or path.startswith(f"{self.page}/"))

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
