"""Network interfaces of this machine, and what each of them is: Thunderbolt, Ethernet, Wi-Fi.

macOS tells through `networksetup`, `system_profiler` and `rdma_ctl`; the parsers are functions of their output.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil

from mlxinfer import runtime
from mlxinfer.distributed.cluster_file import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlxinfer.distributed.cluster_file import Kind

ASK_S = 20.0
"""For a program of macOS; system_profiler takes seconds."""
FIVE_GBIT = 80
"""Thunderbolt 5 has it each way, Thunderbolt 4 has half."""
_GBIT = re.compile(r"(\d+(?:\.\d+)?) ?Gb/s")


@dataclass(frozen=True, slots=True)
class Interface:
    """One that is up and has addresses."""

    name: str
    kind: Kind
    networks: tuple[str, ...]
    """Address and prefix, for example "10.0.0.1/24"."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(network.partition("/")[0] for network in self.networks)


def interfaces() -> tuple[Interface, ...]:
    """Of this machine."""
    ports, five = {}, False
    if sys.platform == "darwin":
        ports = hardware_ports(_output("/usr/sbin/networksetup", "-listallhardwareports"))
        five = thunderbolt_gbit(_output("/usr/sbin/system_profiler", "SPThunderboltDataType", "-json")) >= FIVE_GBIT
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        networks = tuple(sorted(_networks(addresses)))
        if networks and name in stats and stats[name].isup:
            found.append(Interface(name, kind_of(name, networks, ports, five=five), networks))
    return tuple(found)


def as_json(found: Iterable[Interface]) -> list[dict[str, Any]]:
    """As `of_json` reads it."""
    return [asdict(one) for one in found]


def of_json(rows: Any) -> tuple[Interface, ...]:
    """What another machine says; rows of another shape are left out."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        try:
            networks = tuple(str(ipaddress.ip_interface(one)) for one in row["networks"])
            found.append(Interface(str(row["name"])[:64], KINDS[KINDS.index(row["kind"])], networks))
        except (TypeError, KeyError, ValueError):
            continue
    return tuple(found)


def kind_of(name: str, networks: Iterable[str], ports: Mapping[str, str], *, five: bool) -> Kind:
    """What an interface is. `ports` are macOS's, by device; `five`: this machine has Thunderbolt 5."""
    if all(ipaddress.ip_interface(network).ip.is_loopback for network in networks):
        return "loopback"
    port = ports.get(name, "").lower()
    if "thunderbolt" in port:
        return "thunderbolt5" if five else "thunderbolt4"
    if "wi-fi" in port or "airport" in port or runtime.is_wireless(name):
        return "wifi"
    return "ethernet"


def hardware_ports(text: str) -> dict[str, str]:
    """Port by device, of `networksetup -listallhardwareports`."""
    found: dict[str, str] = {}
    port = ""
    for line in text.splitlines():
        label, _, value = line.partition(": ")
        if label == "Hardware Port":
            port = value.strip()
        elif label == "Device" and port:
            found[value.strip()] = port
            port = ""
    return found


def thunderbolt_gbit(text: str) -> float:
    """The fastest that a Thunderbolt port says it can do, of `system_profiler SPThunderboltDataType -json`; 0: none."""
    try:
        buses = json.loads(text)["SPThunderboltDataType"]
    except (json.JSONDecodeError, TypeError, KeyError):
        return 0.0
    speeds = [0.0]
    for bus in buses if isinstance(buses, list) else []:
        for key, port in bus.items() if isinstance(bus, dict) else []:
            said = port.get("current_speed_key") if key.startswith("receptacle") and isinstance(port, dict) else None
            speeds += [float(one) for one in _GBIT.findall(said)] if isinstance(said, str) else []
    return max(speeds)


def rdma() -> str:
    """ "enabled" or "disabled", as macOS says of RDMA over Thunderbolt; "" where there is none."""
    if sys.platform != "darwin":
        return ""
    return rdma_state(_output("/usr/bin/rdma_ctl", "status"))


def rdma_state(text: str) -> str:
    """Of the output of `rdma_ctl status`."""
    words = text.strip().lower()
    return next((state for state in ("enabled", "disabled") if state in words), "")


def build() -> str:
    """Of macOS, for example "25C56"; "" elsewhere."""
    return _output("/usr/bin/sw_vers", "-buildVersion").strip() if sys.platform == "darwin" else ""


def _networks(addresses: Iterable[Any]) -> Iterable[str]:
    for address in addresses:
        if address.family not in (socket.AF_INET, socket.AF_INET6) or not address.netmask:
            continue
        try:
            # fe80::1%en0 names its interface; a mask may be 64 bits of f.
            plain = ipaddress.ip_address(address.address.partition("%")[0])
            ones = bin(int(ipaddress.ip_address(address.netmask))).count("1")
        except ValueError:
            continue
        if plain.version == 4 or not plain.is_link_local:
            yield f"{plain}/{ones}"


def _output(*command: str) -> str:
    """What a program of macOS prints; "" where it can't be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
