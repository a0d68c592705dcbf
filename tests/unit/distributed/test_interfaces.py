"""What programs of macOS print, read. Written after manuals and reports of others, not recorded on a Mac of ours."""

from __future__ import annotations

import json

import pytest

from mlxinfer.distributed import interfaces
from mlxinfer.distributed.interfaces import Interface, hardware_ports, kind_of, rdma_state, thunderbolt_gbit

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:11:22:33:44:55

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:11:22:33:44:00

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:11:22:33:44:66

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 36:11:22:33:44:00

VLAN Configurations
===================
"""


def profile(*speeds: str) -> str:
    buses = [
        {
            "_name": f"thunderboltusb4_bus_{at}",
            "device_name_key": "Mac Studio",
            "domain_uuid_key": "0000",
            f"receptacle_{at + 1}_tag": {"current_speed_key": speed, "receptacle_status_key": "receptacle_connected"},
        }
        for at, speed in enumerate(speeds)
    ]
    return json.dumps({"SPThunderboltDataType": buses})


def test_ports_are_known_by_their_devices() -> None:
    assert hardware_ports(PORTS) == {
        "en0": "Ethernet",
        "bridge0": "Thunderbolt Bridge",
        "en1": "Wi-Fi",
        "en2": "Thunderbolt 1",
    }
    assert hardware_ports("") == hardware_ports("Device: en9\nHardware Port: \n") == {}


def test_the_fastest_port_says_which_thunderbolt_it_is() -> None:
    assert thunderbolt_gbit(profile("Up to 40 Gb/s", "Up to 80 Gb/s")) == 80
    assert thunderbolt_gbit(profile("Up to 40 Gb/s x1")) == 40
    for junk in (
        "",
        "[]",
        "{}",
        '{"SPThunderboltDataType": 3}',
        '{"SPThunderboltDataType": [{"receptacle_1_tag": 3}]}',
    ):
        assert thunderbolt_gbit(junk) == 0


@pytest.mark.parametrize(
    ("name", "networks", "five", "kind"),
    [
        ("lo0", ["127.0.0.1/8", "::1/128"], True, "loopback"),
        ("en0", ["10.0.0.2/24"], True, "ethernet"),
        ("en1", ["10.0.0.3/24"], True, "wifi"),
        ("bridge0", ["169.254.7.7/16"], True, "thunderbolt5"),
        ("en2", ["192.168.0.1/30"], False, "thunderbolt4"),
        ("eth0", ["10.0.0.2/24"], False, "ethernet"),
    ],
)
def test_an_interface_is_what_its_port_is(name: str, networks: list[str], five: bool, kind: str) -> None:
    assert kind_of(name, networks, hardware_ports(PORTS), five=five) == kind


def test_rdma_is_on_off_or_unheard_of() -> None:
    assert rdma_state("RDMA is enabled\n") == "enabled"
    assert rdma_state("disabled") == "disabled"
    assert rdma_state("rdma_ctl: command not found") == ""


def test_this_machine_has_a_loopback_and_says_so_in_json() -> None:
    here = interfaces.interfaces()
    assert any(one.kind == "loopback" and "127.0.0.1" in one.addresses for one in here)
    assert interfaces.of_json(json.loads(json.dumps(interfaces.as_json(here)))) == here


def test_rows_that_are_none_are_left_out() -> None:
    good = {"name": "en0", "kind": "ethernet", "networks": ["10.0.0.1/24"]}
    rows = [good, 3, {}, {**good, "networks": ["10.0.0/24 or so"]}, {**good, "networks": 3}, {**good, "kind": "magic"}]
    assert interfaces.of_json(rows) == (Interface("en0", "ethernet", ("10.0.0.1/24",)),)
    assert interfaces.of_json("x") == ()
