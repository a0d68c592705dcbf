"""cluster.toml: written and read again, and every way it can be wrong."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import TYPE_CHECKING

import pytest

from mlxinfer.distributed import cluster_file
from mlxinfer.distributed.cluster_file import Cluster, Link, Node
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "0123456789abcdef"
WHOLE = Cluster(
    (
        Node("one", "192.168.1.2", 64, 400, ssh="me@one.local", chip="Apple M2 Max", tflops=13.6),
        Node("two", "two.local", 192, 800, port=9000),
    ),
    (
        Link(("one", "two"), "thunderbolt5", 30, 6.1, ("10.0.0.1", "10.0.0.2"), ("en5", "en6"), measured=True),
        Link(("two", "one"), "wifi", 5000, 9.9, ("192.168.1.3", "192.168.1.2")),
    ),
    SECRET,
)
TOML = f"""
secret = "{SECRET}"
[[nodes]]
name = "one"
host = "h1"
memory_gb = 8
bandwidth_gb_s = 100
[[nodes]]
name = "two"
host = "h2"
memory_gb = 8
bandwidth_gb_s = 100
[[links]]
between = ["one", "two"]
kind = "ethernet"
latency_us = 100
bandwidth_gb_s = 1.1
addresses = ["h1", "h2"]
"""


def put(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    cluster_file.write(tmp_path / "cluster.toml", WHOLE)
    assert cluster_file.read(tmp_path / "cluster.toml") == WHOLE


def test_the_file_is_for_the_owner_alone_also_over_one_that_was_not(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("")
    path.chmod(0o644)
    cluster_file.write(path, WHOLE)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_file_that_others_may_read_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    cluster_file.write(tmp_path / "cluster.toml", WHOLE)
    (tmp_path / "cluster.toml").chmod(0o640)
    with pytest.raises(InvalidRequestError, match=r"chmod 600 .*cluster\.toml"):
        cluster_file.read(tmp_path / "cluster.toml")


def test_the_secret_shows_in_no_repr() -> None:
    assert SECRET not in repr(WHOLE)


def test_wifi_comes_last_whatever_it_claims() -> None:
    assert [link.kind for link in WHOLE.links_between("one", "two")] == ["thunderbolt5", "wifi"]


def test_an_unknown_node_is_told_with_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="one, two"):
        WHOLE.node("three")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "two"', 'name = "one"', "two of name one"),
        ('host = "h2"', 'host = "h1"', "two of host and port"),
        ('host = "h1"', 'host = "-oProxyCommand=x"', r"nodes\[0\]\.host"),
        ('host = "h1"', 'host = "a b"', r"nodes\[0\]\.host"),
        ('host = "h1"', 'host = "h1"\nssh = "-x"', r"nodes\[0\]\.ssh"),
        ('host = "h1"', "", r"nodes\[0\]\.host is None"),
        ('name = "one"', 'name = "../one"', r"nodes\[0\]\.name"),
        ("memory_gb = 8", "memory_gb = 0", r"memory_gb is 0"),
        ("memory_gb = 8", "memory_gb = true", r"memory_gb is True"),
        ("memory_gb = 8", "memory_gb = nan", r"memory_gb is nan"),
        ("memory_gb = 8", "memory_gb = 8\nport = 0", r"port is 0"),
        ("memory_gb = 8", "memory_gb = 8\ncolour = 1", r"nodes\[0\]\.colour is not known"),
        ('between = ["one", "two"]', 'between = ["one", "three"]', "'three', which is no node"),
        ('between = ["one", "two"]', 'between = ["one", "one"]', "to itself"),
        ('between = ["one", "two"]', 'between = ["one"]', "two texts"),
        ('kind = "ethernet"', 'kind = "string"', "known are thunderbolt5"),
        (f'secret = "{SECRET}"', 'secret = "short"', "at least 16"),
        (f'secret = "{SECRET}"', "", "secret is ''|secret has 0 bytes"),
        ("[[nodes]]", "[[node]]", "node is not known"),
        ("kind =", "kind", "is no TOML"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_field(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = put(tmp_path / "c.toml", TOML.replace(old, new))
    with pytest.raises(InvalidRequestError, match=says) as caught:
        cluster_file.read(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"gone\.toml cannot be read"):
        cluster_file.read(tmp_path / "gone.toml")


def test_rdma_devices_are_those_of_the_interfaces_and_thunderbolt_4_has_none() -> None:
    nodes = tuple(Node(name, name, 8, 100) for name in ("a", "b", "c"))
    joined = [("a", "b", "en2", "en5"), ("c", "a", "en3", "en4"), ("b", "c", "en6", "en7")]
    links = tuple(Link((a, b), "thunderbolt5", 10, 6, ("1", "2"), (x, y)) for a, b, x, y in joined)
    cluster = Cluster(nodes, links)
    assert [cluster.devices(name, ("a", "b", "c")) for name in "abc"] == [
        (None, "rdma_en2", "rdma_en4"),
        ("rdma_en5", None, "rdma_en6"),
        ("rdma_en3", "rdma_en7", None),
    ]
    four = dataclasses.replace(links[0], kind="thunderbolt4")
    for other in (four, dataclasses.replace(links[0], interfaces=("en2", ""))):
        with pytest.raises(InvalidRequestError, match="Thunderbolt 5 between a and b"):
            Cluster(nodes, (other, *links[1:])).devices("a", ("a", "b", "c"))


def test_the_best_link_gives_the_address_and_wifi_only_when_it_is_taken() -> None:
    wifi = Link(("a", "b"), "wifi", 8000, 99, ("10.0.0.1", "10.0.0.2"))
    cable = Link(("b", "a"), "ethernet", 100, 1, ("10.1.0.2", "10.1.0.1"))
    both = Cluster((), (wifi, cable))
    assert (both.end("a", "b", wifi=True), both.end("b", "a", wifi=True)) == ("10.1.0.1", "10.1.0.2")
    alone = Cluster((), (wifi,))
    assert (alone.end("a", "b", wifi=True), alone.end("a", "b", wifi=False)) == ("10.0.0.1", "")
