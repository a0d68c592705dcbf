"""cluster.toml: the machines, what joins them, and the secret that their agents share."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from mlxinfer.distributed.frames import MIN_SECRET
from mlxinfer.errors import InvalidRequestError
from mlxinfer.formats.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Kind = Literal["thunderbolt5", "thunderbolt4", "ethernet", "wifi", "loopback"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_PORT = 7446
MAX_NODES = 64
MAX_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    name: str
    host: str
    """Where the others reach its agent: a name or an address."""
    memory_gb: float
    """What models may take: Metal's recommended working set, or most of RAM."""
    bandwidth_gb_s: float
    """Of memory: what decoding is bound by."""
    port: int = DEFAULT_PORT
    """Of its agent."""
    ssh: str = ""
    """As ssh takes it, for example "me@studio.local"; empty: its agent is started by hand."""
    chip: str = ""
    tflops: float = 0.0
    """In half precision: what prefill is bound by; 0: not known."""
    command: str = ""
    """mlxinfer's program there, where ssh doesn't find it by its name."""


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two machines, measured or stated."""

    between: tuple[str, str]
    kind: Kind
    latency_us: float
    """One way, of a small message."""
    bandwidth_gb_s: float
    addresses: tuple[str, str]
    """Of either end, in the order of `between`."""
    interfaces: tuple[str, str] = ("", "")
    measured: bool = False
    """By `cluster check`, through real collectives; else stated or guessed from the kind."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A whole file. The first node coordinates."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    secret: str = dataclasses.field(default="", repr=False)

    def node(self, name: str) -> Node:
        """Raises InvalidRequestError."""
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            there = ", ".join(node.name for node in self.nodes)
            raise InvalidRequestError(f"the cluster has no node {name!r:.80}; it has {there}", param="node")
        return found

    def links_between(self, one: str, other: str) -> tuple[Link, ...]:
        """The fastest first; Wi-Fi last, whatever it claims."""
        found = (link for link in self.links if set(link.between) == {one, other})
        return tuple(sorted(found, key=lambda link: (link.kind == "wifi", -link.bandwidth_gb_s)))

    def end(self, name: str, other: str, *, wifi: bool) -> str:
        """The address of `name` on its best link to `other`; "" where there is none."""
        links = [link for link in self.links_between(name, other) if wifi or link.kind != "wifi"]
        return links[0].addresses[links[0].between.index(name)] if links else ""

    def devices(self, name: str, others: Sequence[str]) -> tuple[str | None, ...]:
        """RDMA devices of `name` towards each of `others`, None for itself. Raises InvalidRequestError where a pair
        isn't joined by Thunderbolt 5 whose interfaces are known."""
        found: list[str | None] = []
        for other in others:
            links = self.links_between(name, other)
            known = [link for link in links if link.kind == "thunderbolt5" and all(link.interfaces)]
            if name != other and not known:
                raise InvalidRequestError(
                    f"JACCL needs Thunderbolt 5 between {name} and {other}, with its interfaces in the cluster's file",
                    param="backend",
                )
            # As macOS calls them: rdma_en5 belongs to en5.
            found.append(None if name == other else f"rdma_{known[0].interfaces[known[0].between.index(name)]}")
        return tuple(found)


def read(path: Path) -> Cluster:
    """Raises InvalidRequestError that names file, table and field, for a file that others may read, too."""
    try:
        with path.open("rb") as file:
            shared = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", param="cluster") from error
    if len(data) > MAX_BYTES:
        raise InvalidRequestError(f"{path} is larger than {MAX_BYTES:,} bytes; it is no cluster.toml", param="cluster")
    found = parse(data, str(path))
    if shared:
        raise InvalidRequestError(
            f"{path} holds the cluster's secret and others may read it: chmod 600 {path}", param="cluster"
        )
    return found


def parse(data: bytes, name: str) -> Cluster:
    """A file's content. Raises InvalidRequestError that names the file, the table and the field."""
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name} is no TOML: {error}", param="cluster") from error
    return _Reader(name).cluster(table)


def write(path: Path, cluster: Cluster) -> None:
    """Atomic, for the owner's eyes only. Raises InvalidRequestError where the disk says no."""
    try:
        replace_file(path, dumps(cluster).encode(), mode=0o600)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}", param="cluster") from error


def dumps(cluster: Cluster) -> str:
    """The file's content; the secret is in it."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("mlxinfer cluster: `mlxinfer cluster check` measures the links."))
    document["secret"] = cluster.secret
    for name, rows in (("nodes", cluster.nodes), ("links", cluster.links)):
        tables = tomlkit.aot()
        for row in rows:
            table = tomlkit.table()
            for field in dataclasses.fields(row):
                value = getattr(row, field.name)
                if value != field.default:
                    table[field.name] = list(value) if isinstance(value, tuple) else value
            tables.append(table)
        if rows:
            document[name] = tables
    return tomlkit.dumps(document)


class _Reader:
    """Values out of a table, each with the name that an error needs."""

    def __init__(self, file: str) -> None:
        self._file = file

    def cluster(self, table: dict[str, Any]) -> Cluster:
        self._known(table, ("secret", "nodes", "links"), "")
        secret = self._text(table, "secret", "", "")
        if len(secret.encode()) < MIN_SECRET:
            self._refuse("secret", f"has {len(secret.encode())} bytes; at least {MIN_SECRET} are needed")
        nodes = tuple(self._node(row, f"nodes[{at}]") for at, row in enumerate(self._rows(table, "nodes")))
        if not 1 <= len(nodes) <= MAX_NODES:
            self._refuse("nodes", f"has {len(nodes)} tables; 1 to {MAX_NODES} are needed")
        self._unique([node.name for node in nodes], "nodes", "name")
        self._unique([f"{node.host}:{node.port}" for node in nodes], "nodes", "host and port")
        names = {node.name for node in nodes}
        links = tuple(self._link(row, f"links[{at}]", names) for at, row in enumerate(self._rows(table, "links")))
        return Cluster(nodes, links, secret)

    def _node(self, row: dict[str, Any], where: str) -> Node:
        self._known(row, tuple(field.name for field in dataclasses.fields(Node)), where)
        name = self._text(row, "name", where)
        if not NAME.fullmatch(name):
            self._refuse(f"{where}.name", f"is {name!r:.80}; letters, digits, dots, - and _ make a name")
        ssh = self._text(row, "ssh", where, "")
        host = self._text(row, "host", where)
        command = self._text(row, "command", where, "")
        for field, value in (("host", host), ("ssh", ssh), ("command", command)):
            if value.startswith("-") or any(c.isspace() or not c.isprintable() for c in value):
                what = "program" if field == "command" else "machine"
                self._refuse(f"{where}.{field}", f"is {value!r:.80}, which is no name of a {what}")
        return Node(
            name,
            host,
            self._number(row, "memory_gb", where),
            self._number(row, "bandwidth_gb_s", where),
            self._port(row, where),
            ssh,
            self._text(row, "chip", where, ""),
            self._number(row, "tflops", where, 0.0),
            command,
        )

    def _link(self, row: dict[str, Any], where: str, names: set[str]) -> Link:
        self._known(row, tuple(field.name for field in dataclasses.fields(Link)), where)
        between = self._two(row, "between", where)
        if unknown := [name for name in between if name not in names]:
            self._refuse(f"{where}.between", f"names {unknown[0]!r:.80}, which is no node")
        if between[0] == between[1]:
            self._refuse(f"{where}.between", f"joins {between[0]} to itself")
        kind: Kind | None = next((known for known in KINDS if known == row.get("kind")), None)
        if kind is None:
            self._refuse(f"{where}.kind", f"is {row.get('kind')!r:.80}; known are {', '.join(KINDS)}")
        measured = row.get("measured", False)
        if not isinstance(measured, bool):
            self._refuse(f"{where}.measured", f"is {measured!r:.80}; true or false is expected")
        return Link(
            between,
            kind,
            self._number(row, "latency_us", where),
            self._number(row, "bandwidth_gb_s", where),
            self._two(row, "addresses", where),
            self._two(row, "interfaces", where, ("", "")),
            measured,
        )

    def _rows(self, table: dict[str, Any], name: str) -> Sequence[dict[str, Any]]:
        rows = table.get(name, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            self._refuse(name, f"is no list of tables: write [[{name}]]")
        return rows

    def _text(self, row: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
        value = row.get(name, default)
        if not isinstance(value, str) or (default is None and not value):
            self._refuse(f"{where}.{name}".lstrip("."), f"is {value!r:.80}; text is expected")
        return value

    def _number(self, row: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
        value = row.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            self._refuse(f"{where}.{name}", f"is {value!r:.80}; a number above 0 is expected")
        if default is None and value == 0:
            self._refuse(f"{where}.{name}", "is 0; a number above 0 is expected")
        return float(value)

    def _port(self, row: dict[str, Any], where: str) -> int:
        value = row.get("port", DEFAULT_PORT)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
            self._refuse(f"{where}.port", f"is {value!r:.80}; 1 to 65535 is expected")
        return value

    def _two(
        self, row: dict[str, Any], name: str, where: str, default: tuple[str, str] | None = None
    ) -> tuple[str, str]:
        value = row.get(name, default)
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(one, str) for one in value):
            self._refuse(f"{where}.{name}", f"is {value!r:.80}; two texts are expected")
        return value[0], value[1]

    def _known(self, row: dict[str, Any], names: tuple[str, ...], where: str) -> None:
        if unknown := sorted(row.keys() - set(names)):
            self._refuse(f"{where}.{unknown[0]}".lstrip("."), f"is not known; known are {', '.join(names)}")

    def _unique(self, values: list[str], table: str, what: str) -> None:
        if twice := next((value for value in values if values.count(value) > 1), None):
            self._refuse(table, f"has two of {what} {twice}")

    def _refuse(self, field: str, what: str) -> NoReturn:
        raise InvalidRequestError(f"{self._file}: {field} {what}", param=field)
