"""`cluster check`: whether the machines and links of a cluster are what its file says, and what mends what isn't."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer.distributed import interfaces, machine
from mlxinfer.distributed.ranks import Here, RankSet, RanksLostError, Seat
from mlxinfer.distributed.shell import reached
from mlxinfer.distributed.there import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mlxinfer.distributed.cluster_file import Cluster, Link, Node
    from mlxinfer.distributed.ranks import Place
    from mlxinfer.distributed.there import There

SKEW_S = 5.0
"""Of clocks: certificates and logs want it less; the protocol doesn't care."""
MEMORY_SHARE = 1.02
"""Of a machine's memory that a file may claim: figures are rounded."""
Level = Literal["wrong", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is not as it should be. A note doesn't keep the cluster from working."""

    level: Level
    where: str
    """A node, or two."""
    what: str
    mend: str
    """What to do, a command where there is one."""


@dataclass(frozen=True, slots=True)
class Checked:
    """All of it."""

    machines: dict[str, dict[str, Any]]
    """What each node that answers says of itself."""
    links: tuple[Link, ...]
    """As the file has them, with measured figures where they could be measured."""
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        return not any(finding.level == "wrong" for finding in self.findings)


def check(cluster: Cluster, say: Callable[[str], None]) -> Checked:
    """Ask every machine, and measure every link with the collectives a model uses. Some seconds for each link."""
    places: dict[str, There] = {}
    said: dict[str, dict[str, Any]] = {}
    findings: list[Finding] = []
    try:
        for node in cluster.nodes:
            say(f"Asking {node.name}")
            findings += _asked(node, cluster, places, said, say)
        findings += list(of_machines(cluster, said))
        findings += list(of_links(cluster, said))
        measured: list[Link] = []
        for link in cluster.links:
            if not set(link.between) <= said.keys():
                measured.append(link)
                continue
            say(f"Measuring {' - '.join(link.between)}: {link.kind}")
            found, failed = _measured(link, cluster, places)
            measured.append(found)
            findings += failed
        return Checked(said, tuple(measured), tuple(findings))
    finally:
        for place in places.values():
            place.close()


def _asked(
    node: Node,
    cluster: Cluster,
    places: dict[str, There],
    said: dict[str, dict[str, Any]],
    say: Callable[[str], None],
) -> Iterator[Finding]:
    if node is cluster.nodes[0]:
        said[node.name] = machine.about()
        return
    try:
        places[node.name] = reached(node, cluster, say)
        # The first answer waits for programs of macOS; only the second says what the clock is.
        said[node.name] = places[node.name].ask("hello")
        start = time.time()
        there = float(places[node.name].ask("clock"))
        said[node.name]["skew_s"] = round(there - (start + time.time()) / 2, 3)
    except AgentError as error:
        said.pop(node.name, None)
        yield Finding("wrong", node.name, str(error), f"there: mlxinfer cluster agent --node {node.name}")


def of_machines(cluster: Cluster, said: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Of each machine by itself, and beside the first."""
    first = said[cluster.nodes[0].name]
    for node in cluster.nodes:
        if (own := said.get(node.name)) is None:
            continue
        for name, package in (("version", "mlxinfer"), ("mlx", "mlx"), ("mlx-lm", "mlx-lm")):
            if own.get(name) != first.get(name):
                what = f"has {package} {own.get(name)}; {cluster.nodes[0].name} has {first.get(name)}"
                yield Finding("wrong", node.name, what, f"there: pip install {package}=={first.get(name)}")
        if node.memory_gb > float(own.get("memory_gb", 0)) * MEMORY_SHARE:
            what = f"cluster.toml says {node.memory_gb:g} GB for models; the machine says {own.get('memory_gb'):g}"
            yield Finding("wrong", node.name, what, f"memory_gb = {own.get('memory_gb'):g}")
        if abs(float(own.get("skew_s", 0))) > SKEW_S:
            what = f"its clock is {own['skew_s']:+.0f} s off"
            yield Finding("note", node.name, what, "set the time from the network: System Settings > Date & Time")
        held = interfaces.of_json(own.get("interfaces"))
        if any(node.host in one.addresses and one.kind == "wifi" for one in held):
            what = f"its host {node.host} is on Wi-Fi, and every step is told over it"
            yield Finding("note", node.name, what, "host = an address on a cable")
        for name, label in (("build", "macOS build"), ("python", "Python")):
            if own.get(name) != first.get(name):
                what = f"{label} {own.get(name) or 'none'}; {cluster.nodes[0].name} has {first.get(name) or 'none'}"
                yield Finding("note", node.name, what, "update both to the same")


def of_links(cluster: Cluster, said: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether a link's ends are what they are said to be, and whether there is one wherever it is needed."""
    for one, other in itertools.combinations(cluster.nodes, 2):
        links = cluster.links_between(one.name, other.name)
        where = f"{one.name} - {other.name}"
        if not links:
            yield Finding("note", where, "nothing joins them", "a [[links]] table, or mlxinfer cluster init")
        elif all(link.kind == "wifi" for link in links):
            yield Finding("note", where, "Wi-Fi only; no plan takes it unasked", "a cable, or --wifi")
    for link in cluster.links:
        where = " - ".join(link.between)
        if link.kind == "thunderbolt4":
            yield Finding("note", where, "Thunderbolt 4 carries TCP only, not RDMA", "Thunderbolt 5 on both ends")
        for name, address in zip(link.between, link.addresses, strict=True):
            yield from _end(link, name, address, said.get(name))


def _end(link: Link, name: str, address: str, own: Mapping[str, Any] | None) -> Iterator[Finding]:
    if own is None:
        return
    where = " - ".join(link.between)
    there = interfaces.of_json(own.get("interfaces"))
    held = next((one for one in there if address in one.addresses), None)
    if held is None:
        known = ", ".join(f"{address} ({one.kind})" for one in there for address in one.addresses)
        # A whole network may belong to a machine, as 127.0.0.0/8 does; what can be listened on is tried, too.
        if not address.startswith("127."):
            yield Finding("wrong", where, f"{name} has no address {address}; it has {known}", "addresses = …")
    elif held.kind != link.kind and not held.kind == "ethernet" == link.kind.replace("thunderbolt5", "ethernet"):
        what = f"cluster.toml says {link.kind}, but {address} of {name} is on {held.name}, which is {held.kind}"
        level: Level = "wrong" if held.kind == "wifi" else "note"
        yield Finding(level, where, what, f'kind = "{held.kind}", or the address of the cable')
    if link.kind == "thunderbolt5" and own.get("rdma") == "disabled":
        yield Finding(
            "note",
            where,
            f"RDMA is disabled on {name}",
            "in its recovery mode, once: rdma_ctl enable; TCP is used until then",
        )


def _measured(link: Link, cluster: Cluster, places: Mapping[str, There]) -> tuple[Link, list[Finding]]:
    seats = [
        Seat(_place(name, cluster, places), "", host) for name, host in zip(link.between, link.addresses, strict=True)
    ]
    try:
        with contextlib.closing(RankSet(seats, cluster.secret, listen=cluster.nodes[0].host, begin="probe")) as ranks:
            found = ranks.facts
    except (RanksLostError, AgentError) as error:
        where = " - ".join(link.between)
        mend = f"do the two reach each other at {link.addresses[0]} and {link.addresses[1]}? ping, and the firewall"
        return link, [Finding("wrong", where, f"{link.kind}: {error}", mend)]
    return (
        dataclasses.replace(
            link,
            latency_us=round(float(found["latency_s"]) * 1e6, 1),
            bandwidth_gb_s=float(f"{float(found['bytes_per_s']) / 1e9:.3g}"),
            measured=True,
        ),
        [],
    )


def _place(name: str, cluster: Cluster, places: Mapping[str, There]) -> Place:
    return places[name] if name in places else Here(cluster.nodes[0].host)


def report(checked: Checked, cluster: Cluster) -> dict[str, Any]:
    """For a file that can be shown to others: everything, and no secret."""
    return {
        "ready": checked.ready,
        "nodes": [dataclasses.asdict(node) for node in cluster.nodes],
        "machines": checked.machines,
        "links": [dataclasses.asdict(link) for link in checked.links],
        "findings": [dataclasses.asdict(finding) for finding in checked.findings],
    }
