"""An agent over its channel: parts that arrive whole, names that lead nowhere else, one coordinator at a time."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.distributed import agent as agents
from mlxinfer.distributed.agent import Agent
from mlxinfer.distributed.cluster_file import Node
from mlxinfer.distributed.frames import Channel
from mlxinfer.distributed.ranks import RanksLostError
from mlxinfer.distributed.there import AgentError, There
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "a secret of sixteen and more"
PART = "model/tensor-heads-rank-0-of-2"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent("127.0.0.1", 0, SECRET, tmp_path / "parts")
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.close()
    thread.join(5)


def node(agent: Agent) -> Node:
    return Node("two", "127.0.0.1", 8, 100, agent.port)


@pytest.fixture
def there(agent: Agent) -> Iterator[There]:
    made = There(node(agent), SECRET)
    yield made
    made.close()


def part_of(folder: Path, *, size: int = 10_000_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "model-00000.safetensors").write_bytes(bytes(range(256)) * (size // 256))
    (folder / "config.json").write_text("{}")
    (folder / "shard.json").write_text('{"files": {}}')
    return folder


def test_it_says_what_machine_this_is(there: There) -> None:
    told = there.ask("hello")
    assert {"version", "mlx", "mlx-lm", "os", "chip", "memory_gb"} <= told.keys()
    assert 1024 <= there.free_port() < 65536


def test_a_part_arrives_whole_and_once_only(there: There, tmp_path: Path) -> None:
    source = part_of(tmp_path / "part")
    seen: list[tuple[int, int]] = []
    folder = there.bring(PART, source, lambda done, total: seen.append((done, total)))
    assert folder == str(tmp_path / "parts" / PART)
    for file in source.iterdir():
        assert (tmp_path / "parts" / PART / file.name).read_bytes() == file.read_bytes()
    assert seen[-1][0] == seen[-1][1] == sum(file.stat().st_size for file in source.iterdir())
    again: list[tuple[int, int]] = []
    there.bring(PART, source, lambda done, total: again.append((done, total)))
    assert again == []


def test_a_transfer_that_broke_off_goes_on_where_it_stopped(agent: Agent, tmp_path: Path) -> None:
    source = part_of(tmp_path / "part")
    first = There(node(agent), SECRET)

    def stop(done: int, total: int) -> None:
        if done > agents.CHUNK:
            first.close()

    with pytest.raises(AgentError):
        first.bring(PART, source, stop)
    (coming,) = (tmp_path / "parts" / PART).glob("*.part")
    kept = coming.stat().st_size
    assert 0 < kept < 10_000_000
    sent: list[int] = []
    second = _again(agent)
    second.bring(PART, source, lambda done, total: sent.append(done))
    assert sent[0] > kept
    assert (tmp_path / "parts" / PART / "model-00000.safetensors").stat().st_size == 9_999_872
    second.close()


def _again(agent: Agent) -> There:
    """A new coordinator, once the agent has let go of the last one."""
    until = time.monotonic() + 10
    while True:
        made = There(node(agent), SECRET)
        try:
            made.ask("port")
            return made
        except AgentError:
            made.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def test_bytes_that_arrive_damaged_are_not_kept(there: There, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="arrived damaged"):
        there.ask("put", data=b"x" * 100, part=PART, file="config.json", offset=0, sum=hashlib.sha256(b"y").hexdigest())
    assert list((tmp_path / "parts" / PART).iterdir()) == []


@pytest.mark.parametrize(
    ("do", "body"),
    [
        ("folder", {"part": "../etc"}),
        ("folder", {"part": "/etc/passwd"}),
        ("folder", {"part": "a/../../b-rank-0-of-1"}),
        ("folder", {"part": 5}),
        ("have", {"part": "..%2f"}),
        ("put", {"part": PART, "file": "../x.json", "offset": 0}),
        ("put", {"part": PART, "file": "x.py", "offset": 0}),
        ("put", {"part": PART, "file": "a/b.json", "offset": 0}),
        ("spawn", {"connect": "host:1; rm -rf /", "rank": 0, "files": {}}),
        ("spawn", {"connect": "-c:1 x", "rank": 0, "files": {}}),
        ("spawn", {"connect": "h:1", "rank": -1, "files": {}}),
        ("spawn", {"connect": "h:1", "rank": 0, "files": {"LD_PRELOAD": "x"}}),
        ("spawn", {"connect": "h:1", "rank": 0, "files": {}, "coordinator": "h:1; id"}),
        ("spawn", {}),
        ("eval", {"code": "1"}),
    ],
)
def test_what_leads_elsewhere_or_is_unknown_is_refused_and_the_next_question_is_answered(
    there: There, tmp_path: Path, do: str, body: dict[str, Any]
) -> None:
    with pytest.raises(AgentError, match="two: "):
        there.ask(do, data=b"x" if do == "put" else None, **body)
    assert there.ask("port") > 0
    assert not list(tmp_path.glob("parts/**/*.json"))


def test_a_second_coordinator_may_look_and_is_told_that_there_is_one(agent: Agent, there: There) -> None:
    def put(by: There) -> None:
        by.ask("put", data=b"{}", part=PART, file="config.json", offset=0, sum="")

    other = There(node(agent), SECRET)
    put(there)
    assert other.ask("ranks") == []
    assert other.ask("port") > 0
    with pytest.raises(AgentError, match="another coordinator"):
        put(other)
    assert other.ask("ranks") == []
    there.close()
    until = time.monotonic() + 5
    while True:
        try:
            put(other)
            break
        except AgentError:
            assert time.monotonic() < until, "it still waits for the one that has gone"
    other.close()


def test_an_address_of_another_machine_is_none_to_listen_on(there: There) -> None:
    assert there.free_port("127.0.0.1") > 0
    for host in ("203.0.113.1", "-x", "a b", "$(id)"):
        with pytest.raises(RanksLostError):
            there.free_port(host)


def test_another_secret_and_a_missing_agent_are_told_with_what_to_do(agent: Agent) -> None:
    with pytest.raises(AgentError, match="cannot be reached"):
        There(node(agent), "another secret of sixteen")
    gone = Node("two", "127.0.0.1", 8, 100, 1)
    with pytest.raises(AgentError, match="mlxinfer cluster agent --node two"):
        There(gone, SECRET)


def test_a_port_that_is_taken_is_told(agent: Agent, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot listen"):
        Agent("127.0.0.1", agent.port, SECRET, tmp_path)


def test_ranks_end_with_their_coordinator(agent: Agent) -> None:
    """The rank waits for someone who accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = _again(agent)
        number = there.ask(
            "spawn", connect=f"127.0.0.1:{server.getsockname()[1]}", rank=0, files={"MLX_HOSTFILE": "[]"}
        )
        connection, _ = server.accept()
        channel = Channel(connection, SECRET.encode(), serving=True)
        pid = channel.receive(20)["pid"]
        assert there.ask("ended", id=number) == ""
        there.close()
        until = time.monotonic() + 10
        while _alive(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not _alive(pid)
        channel.close()


def _alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
