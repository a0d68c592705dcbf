"""The prefix cache of a model over ranks: the same replies, less computed, and all ranks holding the same things."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.engine.events import Event, Request
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.sampling import RowSampling
from tests import tiny
from tests.cluster.architectures import VOCAB, write
from tests.clusters import Lent, answers, engine_here, engine_over, parts_of, replies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.engine.engine import Engine

ROOM = 64 << 20
WAYS = {
    "llama": ("tensor", 2, ()),
    "qwen3_moe": ("pipeline", 2, (3, 1)),
    "gpt_oss": ("tensor", 2, ()),  # sliding windows
    "qwen3_5": ("tensor", 2, ()),  # recurrent states
    "qwen3_next": ("pipeline", 2, (2, 2)),
    "deepseek_v3": ("pipeline", 3, (1, 2, 1)),  # padded views
}

MORE = {"qwen3_moe", "deepseek_v3"}
"""Beyond CI's slice."""


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def check_in_step(engine: Engine) -> dict[str, Any]:
    """That every rank holds what the scheduler's process believes; returns that."""
    runner: Any = engine.runner
    until = time.monotonic() + 20
    while engine.thread.call(lambda: len(runner._known)) and time.monotonic() < until:
        time.sleep(0.02)
    wanted, held = engine.thread.call(runner.digests)
    assert wanted["rows"] == {}
    assert held == [wanted] * len(held)
    if runner.prefixes is not None:
        engine.thread.call(runner.prefixes.tree.check)
    return wanted


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in MORE else []) for c in WAYS])
def test_a_conversation_goes_on_from_what_the_ranks_hold(case: str, lent: dict[int, Lent], tmp_path: Path) -> None:
    source = tmp_path / "m"
    with engine_here_for(case, source) as alone:
        parts = alone.thread.call(lambda: parts_of(source, tmp_path / "parts", *WAYS[case]))
        system, first = text(1, 40), text(2, 12)
        with lent[len(parts)].engine(parts, prefix_bytes=ROOM) as engine:
            prompt, held = system + first, 0
            for turn in range(3):
                ((reply, cached),) = answers(engine, [prompt], 7, boundaries=(40, len(prompt) - 4))
                assert reply == replies(alone, [prompt], 7)[0]
                assert cached == held
                check_in_step(engine)
                held = len(prompt) + 6
                prompt = prompt + reply + text(10 + turn, 8)
            # Others with the same beginning, four at once; then four with a new one, which is computed once.
            for seed, shared in ((20, system), (30, text(4, 60))):
                asked = [shared + text(seed + i, 5 + i) for i in range(4)]
                got = answers(engine, asked, 6, boundaries=(len(shared),))
                assert [reply for reply, _ in got] == replies(alone, asked, 6)
                assert sum(cached for _, cached in got) >= 3 * len(shared)
                check_in_step(engine)


def engine_here_for(case: str, source: Path) -> Any:
    from mlxinfer.engine.worker import mlx_thread

    mlx_thread().call(lambda: write(case, source))
    return engine_here(source)


def test_what_finds_no_room_is_let_go_of_on_every_rank(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "m")
    with engine_over(parts_of(source, tmp_path / "parts", "tensor", 2), prefix_bytes=ROOM) as engine:
        runner: Any = engine.runner
        answers(engine, [text(0, 100)], 4)
        one = runner.prefixes.nbytes
        assert one > 0
        engine.prefix_bytes = 3 * one
        for i in range(12):
            answers(engine, [text(i % 5, 60 + i) + text(i, 40)], 4)
            held = check_in_step(engine)
            assert runner.prefixes.nbytes <= 3 * one
            assert 0 < sum(held["prefixes"]["spans"].values()) < 400
        assert runner.prefixes.tree.counters.evicted > 5


def test_ranks_that_are_lost_take_their_prefixes_with_them_and_no_token(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "m")
    prompts = [text(1, 80) + text(i, 4 + i) for i in range(6)]
    with engine_here(source) as alone:
        wanted = replies(alone, prompts, 50)
    with engine_over(parts_of(source, tmp_path / "parts", "tensor", 2), prefix_bytes=ROOM) as engine:
        runner: Any = engine.runner
        assert [reply for reply, _ in answers(engine, prompts, 50)] == wanted
        assert runner.prefixes.nbytes > 0
        before = runner.ranks.pids
        assert replies(engine, prompts, 50, lambda: os.kill(before[1], signal.SIGKILL)) == wanted
        assert runner.ranks.pids != before
        check_in_step(engine)
        # What came after is found again.
        ((reply, cached),) = answers(engine, [prompts[0]], 50)
        assert reply == wanted[0]
        assert cached == len(prompts[0]) - 1
        check_in_step(engine)


def leave(engine: Engine, count: int, seed: int) -> None:
    """So many requests whose clients go away: at once, while they wait, in the prompt, or after a few tokens."""
    rng = random.Random(seed)
    systems = [text(i, 50) for i in range(3)]
    places = threading.Semaphore(12)
    for i in range(count):
        assert places.acquire(timeout=60), "a request has never ended"
        prompt = rng.choice(systems)[: rng.choice([1, 30, 50])] + text(i, rng.choice([1, 5, 40, 150]))
        sampling = RowSampling(temperature=rng.choice([0.0, 0.8]))
        spec = RowSpec(f"gone-{seed}-{i}", tuple(prompt), sampling, rng.randrange(1 << 30))
        left = itertools.count(rng.choice([1, 2, 3, 9]), -1)

        def sink(event: Event, name: str = spec.request_id, left: Iterator[int] = left) -> None:
            if event.token is not None and next(left) == 1:
                engine.cancel(name)
            if event.finished is not None:
                places.release()

        engine.submit(Request(spec, rng.choice([2, 400]), frozenset(), boundaries=(50,)), sink)
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0, 0.001, 0.01, 0.05]))
            engine.cancel(spec.request_id)
    for _ in range(12):
        assert places.acquire(timeout=60), "a request has never ended"


@pytest.mark.parametrize(
    ("case", "count"),
    [
        pytest.param("llama", 100, id="100"),
        pytest.param("llama", 1000, id="1000", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param("qwen3_next", 1000, id="1000-pipeline", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_clients_that_leave_at_random_leave_all_ranks_alike(case: str, count: int, tmp_path: Path) -> None:
    source = tmp_path / "m"
    with engine_here_for(case, source) as alone:
        parts = alone.thread.call(lambda: parts_of(source, tmp_path / "parts", *WAYS[case]))
        asked = [text(i, 50) + text(90 + i, 3) for i in range(3)]
        wanted = replies(alone, asked, 12)
        with engine_over(parts, prefix_bytes=1 << 18) as engine:
            runner: Any = engine.runner
            before = runner.ranks.pids
            held: dict[str, Any] = {}
            for start in range(0, count, 100):
                leave(engine, 100, seed=start)
                assert replies(engine, asked, 12) == wanted
                held = check_in_step(engine)
            assert runner.ranks.pids == before, "no rank was lost"
            assert engine.failed_steps == 0
            assert held["prefixes"]["spans"]
            counters = runner.prefixes.tree.counters
            assert min(counters.hits, counters.evicted, counters.inserted) > count // 20
