"""A cluster's file out of what its machines say: nodes, and the links that their networks make."""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed import interfaces, machine, shell
from mlxinfer.distributed.cluster_file import DEFAULT_PORT, Link, Node
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlxinfer.distributed.cluster_file import Kind

BEST_FIRST: tuple[Kind, ...] = ("thunderbolt5", "thunderbolt4", "ethernet", "loopback", "wifi")
GUESSED: dict[Kind, tuple[float, float]] = {
    "thunderbolt5": (300.0, 6.0),
    "thunderbolt4": (300.0, 2.0),
    "ethernet": (100.0, 1.1),
    "wifi": (8000.0, 0.1),
    "loopback": (20.0, 2.0),
}
"""One way latency in us and GB/s over TCP, until `cluster check` measures it."""


def discovered(targets: Sequence[str], command: str) -> tuple[tuple[Node, ...], tuple[Link, ...]]:
    """This machine first, then those that ssh calls `targets`. Raises AgentError, or InvalidRequestError where
    nothing joins them."""
    said = [machine.measured()]
    for target in targets:
        said.append(_of_json(shell.ask(target, [command, "cluster", "facts", "--json"]), target))
    names = _names([str(one["name"]) for one in said])
    links = tuple(links_of(dict(zip(names, said, strict=True))))
    hosts = _hosts(names, links)
    if missing := [name for name in names if name not in hosts]:
        own = said[names.index(missing[0])]
        raise InvalidRequestError(
            f"no one network joins {names[0]} with all others: {_addresses(said[0])}; {_addresses(own)}"
        )
    nodes = [
        _node(name, hosts[name], own, target, command if target else "")
        for name, own, target in zip(names, said, ["", *targets], strict=True)
    ]
    return tuple(nodes), links


def links_of(said: Mapping[str, Mapping[str, Any]]) -> Iterator[Link]:
    """One of each kind between two machines that have addresses in one network.

    Where the two ends are of different kinds the worse one counts: a cable to a router that the other machine reaches
    by Wi-Fi is Wi-Fi. Addresses that machines give themselves (169.254…) only count on Thunderbolt.
    """
    found = {name: interfaces.of_json(own.get("interfaces")) for name, own in said.items()}
    for one, other in itertools.combinations(found, 2):
        seen: set[str] = set()
        for mine, theirs in itertools.product(found[one], found[other]):
            kind: Kind = BEST_FIRST[max(BEST_FIRST.index(mine.kind), BEST_FIRST.index(theirs.kind))]
            ends = _joined(mine.networks, theirs.networks, own=kind.startswith("thunderbolt"))
            if ends is not None and kind not in seen:
                seen.add(kind)
                yield Link((one, other), kind, *GUESSED[kind], ends, (mine.name, theirs.name))


def _joined(mine: Sequence[str], theirs: Sequence[str], *, own: bool) -> tuple[str, str] | None:
    for one, other in itertools.product(map(ipaddress.ip_interface, mine), map(ipaddress.ip_interface, theirs)):
        if one.network == other.network and one.ip != other.ip and (own or not one.is_link_local):
            return str(one.ip), str(other.ip)
    return None


def _hosts(names: Sequence[str], links: Sequence[Link]) -> dict[str, str]:
    """Where agents listen, and the first machine for its ranks: on one address of the first that all others reach.

    By Ethernet where that can be: addresses on Thunderbolt come and go.
    """
    order = ("ethernet", "thunderbolt5", "thunderbolt4", "loopback", "wifi")
    first = names[0]
    found: dict[str, dict[str, Link]] = {}
    for link in links:
        if first in link.between:
            at = link.between.index(first)
            found.setdefault(link.addresses[at], {})[link.between[1 - at]] = link
    whole = {address: joined for address, joined in found.items() if len(joined) == len(names) - 1}
    reach = whole or found
    if not reach:
        return {first: ""}
    best = min(reach, key=lambda address: max(order.index(link.kind) for link in reach[address].values()))
    others = {name: link.addresses[link.between.index(name)] for name, link in reach[best].items()}
    return {first: best, **others}


def _node(name: str, host: str, own: Mapping[str, Any], target: str, command: str) -> Node:
    command = "" if command == "mlxinfer" else command
    chip = str(own.get("chip", ""))[:80]
    rate, memory = float(own["bandwidth_gb_s"]), float(own["memory_gb"])
    return Node(name, host, memory, rate, DEFAULT_PORT, target, chip, command=command)


def _of_json(text: str, target: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError(text)
        return {**found, "bandwidth_gb_s": float(found["bandwidth_gb_s"]), "memory_gb": float(found["memory_gb"])}
    except (json.JSONDecodeError, TypeError, KeyError, ValueError) as error:
        raise InvalidRequestError(
            f"{target}: mlxinfer cluster facts says {text!r:.120}; is it the same version?"
        ) from error


def _names(given: Sequence[str]) -> list[str]:
    """As a cluster's file takes them, each once."""
    found: list[str] = []
    for text in given:
        plain = re.sub(r"[^A-Za-z0-9-]+", "-", text.partition(".")[0]).strip("-").lower()[:50] or "node"
        again = next(n for n in itertools.count(1) if (plain if n == 1 else f"{plain}-{n}") not in found)
        found.append(plain if again == 1 else f"{plain}-{again}")
    return found


def _addresses(own: Mapping[str, Any]) -> str:
    held = interfaces.of_json(own.get("interfaces"))
    return f"{own.get('name')} has {', '.join(network for one in held for network in one.networks) or 'no address'}"


def stated(nodes: Sequence[Node], kind: Kind) -> tuple[Link, ...]:
    """Links of one kind between all of them."""
    pairs = itertools.combinations(nodes, 2)
    return tuple(Link((a.name, b.name), kind, *GUESSED[kind], (a.host, b.host)) for a, b in pairs)
