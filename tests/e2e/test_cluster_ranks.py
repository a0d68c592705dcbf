"""A model over real ranks on this machine says what it says in one process."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.distributed.ranks import RanksLostError
from mlxinfer.engine.engine import Request
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.sampling import RowSampling
from tests import tiny
from tests.clusters import MOE, engine_here, engine_over, parts_of, replies

if TYPE_CHECKING:
    from pathlib import Path

FOUR: dict[str, Any] = {"num_key_value_heads": 4}
PROMPTS = [[5 + i, *range(20, 20 + 9 * i), 7] for i in range(8)]


@pytest.mark.parametrize(
    ("config", "kind", "size", "split"),
    [
        ({}, "tensor", 2, ()),
        (FOUR, "tensor", 4, ()),
        (MOE, "tensor", 2, ()),
        (MOE, "pipeline", 2, (3, 2)),
        (MOE, "pipeline", 3, (1, 3, 1)),
    ],
)
def test_tokens_over_ranks_are_those_of_one_process_alone_and_in_a_batch(
    tmp_path: Path, config: dict[str, Any], kind: str, size: int, split: tuple[int, ...]
) -> None:
    source = tiny.write_folder(tmp_path / "m", **config)
    with engine_here(source) as engine:
        wanted = [*replies(engine, PROMPTS[:1]), *replies(engine, PROMPTS[1:5])]
        drawn = replies(engine, PROMPTS[:3], temperature=0.9, top_p=0.9)
    with engine_over(parts_of(source, tmp_path / "parts", kind, size, split)) as engine:
        assert [*replies(engine, PROMPTS[:1]), *replies(engine, PROMPTS[1:5])] == wanted
        assert replies(engine, PROMPTS[:3], temperature=0.9, top_p=0.9) == drawn
    assert len({tuple(one) for one in wanted}) > 3


def test_a_rank_that_is_killed_under_eight_streams_costs_no_token(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "m")
    with engine_here(source) as engine:
        wanted = replies(engine, PROMPTS, 120)
    with engine_over(parts_of(source, tmp_path / "parts", "tensor", 2)) as engine:
        runner: Any = engine.runner
        for rank, number in ((1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)):
            before = runner.ranks.pids
            got = replies(
                engine, PROMPTS, 120, lambda rank=rank, number=number, pids=before: os.kill(pids[rank], number)
            )
            assert got == wanted
            assert runner.ranks.pids != before


def test_what_finds_the_ranks_gone_is_not_lost_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_folder(tmp_path / "m")
    with engine_here(source) as engine:
        wanted = replies(engine, PROMPTS[:4])
    with engine_over(parts_of(source, tmp_path / "parts", "tensor", 2)) as engine:
        runner: Any = engine.runner
        send, start, failures = runner.ranks.send, runner._start, ["no plan of theirs starts"]

        def send_to_the_dead(rank: int, message: Any) -> None:
            if "admit" in message:
                os.kill(runner.ranks.pids[1], signal.SIGKILL)
                runner.ranks._lose("a request found it out")
            send(rank, message)

        def start_at_last(why: str) -> Any:
            if failures:
                raise RanksLostError(failures.pop())
            return start(why)

        monkeypatch.setattr(runner.ranks, "send", send_to_the_dead)
        monkeypatch.setattr(runner, "_start", start_at_last)
        assert replies(engine, PROMPTS[:4]) == wanted
        assert not failures


def test_clients_that_leave_leave_nothing_on_the_ranks(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "m")
    with engine_over(parts_of(source, tmp_path / "parts", "tensor", 2)) as engine:
        for i in range(40):
            spec = RowSpec(f"gone{i}", tuple(PROMPTS[i % 8]), RowSampling(temperature=0.7), i)
            engine.submit(Request(spec, 500, frozenset()), lambda _: None)
            if i % 3 == 0:
                time.sleep(0.01)
            engine.cancel(f"gone{i}")
        assert len(replies(engine, PROMPTS[:2])[0]) == 16
        assert engine.thread.call(lambda: len(engine.state.requests)) == 0
