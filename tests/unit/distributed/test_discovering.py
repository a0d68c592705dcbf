"""Links out of what machines say of their interfaces."""

from __future__ import annotations

from typing import Any

import pytest

from mlxinfer.distributed import discovering, interfaces
from mlxinfer.distributed.interfaces import Interface
from mlxinfer.errors import InvalidRequestError


def said(name: str, *found: tuple[str, str, str]) -> dict[str, Any]:
    rows = interfaces.as_json(Interface(one, kind, (network,)) for one, kind, network in found)  # pyright: ignore[reportArgumentType]
    return {"name": name, "chip": "Apple M3", "memory_gb": 100.0, "bandwidth_gb_s": 400.0, "interfaces": rows}


STUDIO = said("Studio.local", ("bridge0", "thunderbolt5", "169.254.1.1/16"), ("en0", "ethernet", "10.0.0.1/24"))
MINI = said("Mini", ("bridge0", "thunderbolt5", "169.254.1.2/16"), ("en1", "wifi", "10.0.0.2/24"))
AIR = said("Air", ("en0", "wifi", "10.0.0.3/24"), ("en7", "ethernet", "169.254.1.3/16"))


def test_networks_that_two_share_are_links_and_the_worse_end_counts() -> None:
    links = list(discovering.links_of({"studio": STUDIO, "mini": MINI, "air": AIR}))
    assert [(link.between, link.kind, link.addresses, link.interfaces) for link in links] == [
        (("studio", "mini"), "thunderbolt5", ("169.254.1.1", "169.254.1.2"), ("bridge0", "bridge0")),
        (("studio", "mini"), "wifi", ("10.0.0.1", "10.0.0.2"), ("en0", "en1")),
        (("studio", "air"), "wifi", ("10.0.0.1", "10.0.0.3"), ("en0", "en0")),
        (("mini", "air"), "wifi", ("10.0.0.2", "10.0.0.3"), ("en1", "en0")),
    ]
    assert not any(link.measured for link in links)


def test_machines_that_ssh_reaches_become_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    answers = {"me@mini": json.dumps(MINI), "me@air": json.dumps({**AIR, "name": "studio"})}
    asked: list[list[str]] = []

    def ask(target: str, command: list[str]) -> str:
        asked.append(command)
        return answers[target]

    monkeypatch.setattr(discovering.machine, "measured", lambda: STUDIO)
    monkeypatch.setattr(discovering.shell, "ask", ask)
    nodes, links = discovering.discovered(["me@mini", "me@air"], "/opt/mlxinfer")
    assert asked == [["/opt/mlxinfer", "cluster", "facts", "--json"]] * 2
    assert [(node.name, node.ssh, node.command) for node in nodes] == [
        ("studio", "", ""),
        ("mini", "me@mini", "/opt/mlxinfer"),
        ("studio-2", "me@air", "/opt/mlxinfer"),
    ]
    # Thunderbolt joins two of the three only.
    assert [node.host for node in nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert {link.kind for link in links} == {"thunderbolt5", "wifi"}


@pytest.mark.parametrize("answer", ["", "[]", "{}", '{"memory_gb": "x", "bandwidth_gb_s": 1}'])
def test_an_answer_that_is_none_names_the_machine(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovering.machine, "measured", lambda: STUDIO)
    monkeypatch.setattr(discovering.shell, "ask", lambda target, command: answer)
    with pytest.raises(InvalidRequestError, match="me@mini"):
        discovering.discovered(["me@mini"], "mlxinfer")


def test_machines_without_a_network_in_common_are_refused_with_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    far = json.dumps(said("far", ("en0", "ethernet", "172.16.0.1/24")))
    monkeypatch.setattr(discovering.machine, "measured", lambda: STUDIO)
    monkeypatch.setattr(discovering.shell, "ask", lambda target, command: far)
    with pytest.raises(InvalidRequestError, match=r"no one network joins studio with all.*172\.16\.0\.1/24"):
        discovering.discovered(["far"], "mlxinfer")
