"""A HAProxy configuration for replicas: servers with the whole model each, behind one address.

A replica remembers the prefixes it has computed, so a conversation's turns belong together: they go to the replica that
a consistent hash of what stays the same in each turn names. HAProxy 2.6 or later reads it; nothing of it is Lua.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.distributed.cluster_file import NAME
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MAX_REPLICAS = 64
MAX_SOCKET_BYTES = 90
"""Of the runtime socket's path: HAProxy adds its process id, and the system allows some 104."""
INSPECTED_BYTES = 256 << 10
"""Of a body: where the conversation's first message is looked for."""
MAX_ID = 1_000_000
"""Of a replica on the ring: HAProxy hashes 4096 times this in 32 bits."""
FIRST_MESSAGES = 3
"""System messages and the user's first, at most."""
FIRST_PARTS = 3
"""Of a message whose content is a list."""
SESSION_HEADERS = ("x-session-id", "session-id", "session_id", "x-claude-code-session-id")
"""What clients name a conversation with: the general name, Codex's two, Claude Code's."""

RETRIES = 3
"""A request that ends a replica's process ends at most one more than these."""

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SOCKET = re.compile(r"/[A-Za-z0-9 ._/@+-]+")


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that has the whole model. Raises InvalidRequestError."""

    name: str
    host: str
    """A name or an address."""
    port: int = 8080

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise _wrong("replica", f"name {self.name!a:.80}; letters, digits, dots, - and _ make one")
        _check_host(self.host, "replica")
        _check_number("replica", self.port, 1, 65535)

    @property
    def address(self) -> str:
        return _address(self.host, self.port)


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """What HAProxy does in front of the replicas. Raises InvalidRequestError."""

    socket: Path
    """Of HAProxy's runtime API, an absolute path; its owner alone may use it."""
    host: str = "127.0.0.1"
    port: int = 8080
    max_body_kb: int = 1024
    """Larger bodies pass too, but can't be sent again to another replica. HAProxy's memory grows with it."""
    max_requests: int = 288
    """At a time for each replica, those that wait there included: its max_num_seqs + max_queue. More wait in the proxy,
    so that a replica never says that it is full."""
    timeout_s: int = 3600
    """Without a byte from a replica; an answer that isn't streamed has none until its end."""
    session_headers: Sequence[str] = SESSION_HEADERS

    def __post_init__(self) -> None:
        _check_host(self.host, "host")
        for name, least, most in (
            ("port", 1, 65535),
            ("max_body_kb", 64, 64 << 10),
            ("max_requests", 1, 100_000),
            ("timeout_s", 10, 86_400),
        ):
            _check_number(name, getattr(self, name), least, most)
        for header in self.session_headers:
            if not _HEADER.fullmatch(header):
                raise _wrong("session_header", f"header {header!a:.80}; letters, digits, - and _ make one")
        path = str(self.socket)
        if not _SOCKET.fullmatch(path):
            raise _wrong(
                "socket", f"socket {path!a:.120}; an absolute path of letters, digits, blanks and ._/@+- is needed"
            )
        if len(path) > MAX_SOCKET_BYTES:
            raise _wrong("socket", f"socket {path!a:.120} has more than {MAX_SOCKET_BYTES} bytes; put it in /tmp")


def configuration(replicas: Sequence[Replica], options: ProxyOptions) -> str:
    """The file's text. Raises InvalidRequestError for replicas that are none, too many or not distinct."""
    if not 1 <= len(replicas) <= MAX_REPLICAS:
        raise _wrong("replica", f"number of replicas {len(replicas)}; 1 to {MAX_REPLICAS} are possible")
    for what, values in (
        ("name", [one.name for one in replicas]),
        ("address", [one.address for one in replicas]),
    ):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise _wrong("replica", f"replica: two have the {what} {twice}")
    sections = (_process(replicas, options), _shared(options), _front(options), _back(replicas, options))
    return "\n".join(["# mlxinfer cluster proxy", *("\n".join(section) + "\n" for section in sections)])


def _process(replicas: Sequence[Replica], options: ProxyOptions) -> Iterator[str]:
    most = min(max(1000, len(replicas) * options.max_requests + 500), 4000)
    yield "global"
    yield "    log stderr format raw local0 info"
    yield f"    stats socket '{options.socket}' mode 600 level admin expose-fd listeners"
    yield "    stats timeout 1m"
    yield f"    maxconn {most}"
    yield "    # A body that fits is looked into, and can be sent to another replica."
    yield f"    tune.bufsize {(options.max_body_kb << 10) + 16384}"
    yield "    hard-stop-after 1h"


def _shared(options: ProxyOptions) -> Iterator[str]:
    yield "defaults"
    yield "    mode http"
    yield "    log global"
    yield "    option httplog"
    yield "    option dontlognull"
    yield "    timeout connect 3s"
    yield "    timeout check 5s"
    yield "    timeout http-request 60s"
    yield "    timeout http-keep-alive 60s"
    for name in ("client", "server", "queue"):
        yield f"    timeout {name} {options.timeout_s}s"
    yield "    option http-no-delay"
    yield "    # A client that leaves frees its place."
    yield "    option abortonclose"
    for status, code, message in (
        (400, "invalid_http", "the request is no HTTP"),
        (408, "body_timeout", "the request did not arrive in time"),
        (502, "replica_lost", "the replica was lost before it answered"),
        (503, "no_replica", "no replica can take the request now"),
        (504, "replica_timeout", "the replica did not answer in time"),
    ):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = f'{{"error":{{"message":"{message}","type":"{kind}","param":null,"code":"{code}"}}}}'
        yield f"    http-error status {status} content-type application/json string '{body}'"


def _front(options: ProxyOptions) -> Iterator[str]:
    yield "frontend api"
    yield f"    bind {_address(options.host, options.port)}"
    yield "    default_backend replicas"
    yield "    option http-buffer-request"
    yield "    acl chats path /v1/chat/completions /v1/messages /v1/responses /api/chat"
    yield "    acl prompts path /v1/completions /api/generate"
    yield "    acl responses path /v1/responses"
    yield "    acl known var(txn.key) -m found"
    yield "    # A turn goes by the header that names its conversation, else"
    for header in options.session_headers:
        yield f"    http-request set-var(txn.key) req.fhdr({header}) if !known {{ req.fhdr({header}) -m len ge 1 }}"
    yield "    # by the system's messages and the user's first. Without escapes: json_query fails at most of them."
    text = rf"""req.body,bytes(0,{INSPECTED_BYTES}),regsub("\\\\.","_","g")"""
    yield f"    http-request set-var(txn.text) {_quoted(text)} if chats or prompts"
    renamed = r"""var(txn.text),regsub("\"input\"","\"messages\"","g")"""
    yield f"    http-request set-var(txn.text) {_quoted(renamed)} if responses"
    yield from _first_messages()
    yield "    # A prompt without messages goes by its beginning,"
    yield f"    http-request set-var(txn.key) {_query('$.prompt')},bytes(0,512) if prompts !known"
    yield "    # a chat that could not be read by who sends it; all else round robin."
    caller = "%[src]/%[req.fhdr(authorization),xxh64]/%[req.fhdr(x-api-key),xxh64]"
    yield f'    http-request set-var-fmt(txn.key) "{caller}" if chats !known'
    yield "    # A stored response is known to one replica."
    yield f"    http-request set-var(txn.response) {_query('$.previous_response_id')} if responses"
    yield "    http-request set-var(txn.response) path,field(4,/) if { path_beg /v1/responses/ }"
    yield "    http-request unset-var(txn.text)"
    yield "    http-response set-header x-mlxinfer-replica %s"


def _first_messages() -> Iterator[str]:
    """Set txn.key from the messages up to the user's first."""
    found: list[str] = []
    condition = "chats !known"
    for message in range(FIRST_MESSAGES):
        path = f"$.messages[{message}]"
        yield f"    http-request set-var(txn.role{message}) {_query(f'{path}.role')} if {condition}"
        for part in range(FIRST_PARTS):
            name = f"txn.part{message}{part}"
            yield f"    http-request set-var({name}) {_query(f'{path}.content[{part}].text')},xxh64 if {condition}"
            found.append(name)
        # Newer versions of HAProxy give a list as text, with marks of caches that move from turn to turn.
        text = f"{condition} !{{ var(txn.part{message}0) -m found }}"
        yield f"    http-request set-var(txn.text{message}) {_query(f'{path}.content')},xxh64 if {text}"
        found.append(f"txn.text{message}")
        yield f"    acl system{message} var(txn.role{message}) -m str system developer"
        condition += f" system{message}"
    plain = "chats !known !{ var(txn.role0) -m found }"
    yield f"    http-request set-var(txn.text0) {_query('$.messages')},xxh64 if {plain}"
    for name in found:
        yield f"    acl first var({name}) -m found"
    key = "/".join(f"%[var({name})]" for name in found)
    yield f'    http-request set-var-fmt(txn.key) "{key}" if chats !known first'


def _back(replicas: Sequence[Replica], options: ProxyOptions) -> Iterator[str]:
    yield "backend replicas"
    yield "    balance hash var(txn.key)"
    yield "    hash-type consistent sdbm avalanche"
    yield "    # In percent of the mean: with more, a turn goes to the next replica of the ring."
    yield f"    hash-balance-factor {min(75 * len(replicas), 250) if len(replicas) > 1 else 0}"
    yield "    stick-table type string len 64 size 100k expire 24h"
    yield "    stick match var(txn.response)"
    yield "    stick store-response res.hdr(x-mlxinfer-response-id)"
    yield "    # Before the first byte of an answer only."
    yield "    option redispatch 1"
    yield f"    retries {RETRIES}"
    yield "    retry-on conn-failure empty-response 503"
    yield "    option httpchk"
    yield "    http-check send meth GET uri /ready ver HTTP/1.1 hdr host localhost"
    yield "    http-check expect status 200"
    yield "    # A machine without power says nothing: its requests without an answer are sent again after 20 s."
    yield "    option srvtcpka"
    server = "check inter 2s fastinter 500ms downinter 1s fall 2 rise 1 weight 100 init-addr libc,none"
    server += f" maxconn {options.max_requests}"
    yield ".if feature(EPOLL)"
    yield "    srvtcpka-idle 10s"
    yield "    srvtcpka-intvl 2s"
    yield "    srvtcpka-cnt 5"
    yield f"    default-server {server} tcp-ut 20s"
    yield ".else"
    yield f"    default-server {server}"
    yield ".endif"
    for one, number in zip(replicas, _ids(replicas), strict=True):
        yield f"    server {one.name} {one.address} id {number}"


def _ids(replicas: Sequence[Replica]) -> list[int]:
    """Where each stands on the ring: the address says it, so that one more replica, or one less, moves nobody else's
    conversations. HAProxy itself counts lines."""
    found: list[int] = []
    for one in replicas:
        number = zlib.crc32(one.address.encode()) % MAX_ID + 1
        while number in found:
            number = number % MAX_ID + 1
        found.append(number)
    return found


def _query(path: str) -> str:
    return f"var(txn.text),json_query('{path}')"


def _quoted(word: str) -> str:
    """One word of a line: nothing in single quotes means anything to HAProxy."""
    assert "'" not in word
    return f"'{word}'"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_host(host: str, param: str) -> None:
    try:
        is_address = "%" not in host and bool(ipaddress.ip_address(host))
    except ValueError:
        is_address = False
    if not is_address and not _HOST.fullmatch(host):
        raise _wrong(param, f"host {host!a:.80}; an address, or a name of letters, digits, dots and -, is needed")


def _check_number(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, f"{name} {value!r:.40}; {least} to {most} is possible")


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"proxy: {what}", param=param)
