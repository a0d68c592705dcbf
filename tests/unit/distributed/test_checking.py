"""What `cluster check` finds in what machines say; measuring is tried in tests/e2e/test_cluster_check.py."""

from __future__ import annotations

from typing import Any

import pytest

from mlxinfer.distributed import checking, interfaces
from mlxinfer.distributed.cluster_file import Cluster, Link, Node
from mlxinfer.distributed.interfaces import Interface

ONE, TWO = Node("one", "10.0.0.1", 100, 400), Node("two", "10.0.0.2", 50, 200)


def link(kind: Any = "ethernet", addresses: tuple[str, str] = ("10.0.0.1", "10.0.0.2")) -> Link:
    return Link(("one", "two"), kind, 100, 1, addresses)


def said(kind: Any = "ethernet", address: str = "10.0.0.1", **changes: Any) -> dict[str, Any]:
    rows = interfaces.as_json([Interface("en0", kind, (f"{address}/24",))])
    told = {"version": "1", "mlx": "2", "mlx-lm": "3", "python": "3.12", "build": "", "memory_gb": 100.0}
    return {**told, "interfaces": rows, **changes}


def found(cluster: Cluster, one: dict[str, Any], two: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    everyone = {"one": one} | ({} if two is None else {"two": two})
    both = [*checking.of_machines(cluster, everyone), *checking.of_links(cluster, everyone)]
    assert all(finding.mend for finding in both)
    return [(finding.level, finding.where, finding.what) for finding in both]


def test_two_machines_alike_on_a_cable_have_nothing_to_mend() -> None:
    assert found(Cluster((ONE, TWO), (link(),)), said(), said(address="10.0.0.2")) == []


@pytest.mark.parametrize(
    ("change", "level", "what"),
    [
        ({"mlx": "1.9"}, "wrong", "has mlx 1.9; one has 2"),
        ({"version": "0"}, "wrong", "has mlxinfer 0"),
        ({"mlx-lm": "0"}, "wrong", "has mlx-lm 0"),
        ({"memory_gb": 40.0}, "wrong", "says 50 GB for models; the machine says 40"),
        ({"skew_s": -9.0}, "note", "its clock is -9 s off"),
        ({"build": "25A1"}, "note", "macOS build 25A1; one has none"),
        ({"python": "3.11"}, "note", "Python 3.11"),
    ],
)
def test_what_differs_is_told_with_both_values(change: dict[str, Any], level: str, what: str) -> None:
    [only] = found(Cluster((ONE, TWO), (link(),)), said(), said(address="10.0.0.2", **change))
    assert only[:2] == (level, "two")
    assert what in only[2]


def test_wifi_that_is_called_a_cable_is_wrong_and_wifi_alone_is_noted() -> None:
    disguised = found(Cluster((ONE, TWO), (link(),)), said(), said("wifi", "10.0.0.2"))
    assert [one for one in disguised if one[0] == "wrong"] == [
        ("wrong", "one - two", "cluster.toml says ethernet, but 10.0.0.2 of two is on en0, which is wifi")
    ]
    honest = found(Cluster((ONE, TWO), (link("wifi"),)), said("wifi"), said("wifi", "10.0.0.2"))
    assert {level for level, _, _ in honest} == {"note"}
    assert any("Wi-Fi only" in what for _, _, what in honest)
    assert any("every step is told over it" in what for _, _, what in honest)


def test_an_address_that_a_machine_has_not_is_wrong_and_those_it_has_are_told() -> None:
    cluster = Cluster((ONE, TWO), (link(addresses=("10.0.0.1", "10.0.0.9")),))
    assert found(cluster, said(), said(address="10.0.0.2")) == [
        ("wrong", "one - two", "two has no address 10.0.0.9; it has 10.0.0.2 (ethernet)")
    ]


def test_thunderbolt_4_and_rdma_that_is_off_are_noted() -> None:
    four = found(Cluster((ONE, TWO), (link("thunderbolt4"),)), said("thunderbolt4"), said("thunderbolt4", "10.0.0.2"))
    assert four == [("note", "one - two", "Thunderbolt 4 carries TCP only, not RDMA")]
    five = Cluster((ONE, TWO), (link("thunderbolt5"),))
    off = found(five, said("thunderbolt5", rdma="enabled"), said("thunderbolt5", "10.0.0.2", rdma="disabled"))
    assert off == [("note", "one - two", "RDMA is disabled on two")]


def test_machines_that_nothing_joins_are_noted() -> None:
    assert found(Cluster((ONE, TWO)), said(), said(address="10.0.0.2")) == [("note", "one - two", "nothing joins them")]


def test_the_report_has_no_secret() -> None:
    cluster = Cluster((ONE, TWO), (link(),), "a secret nobody may see")
    assert "nobody may see" not in str(checking.report(checking.Checked({}, (link(),), ()), cluster))
