"""With the prefix cache a reply is the same as without, for every way a model can remember."""

from __future__ import annotations

import queue
import time
import unittest.mock
from typing import TYPE_CHECKING

import pytest

from mlxinfer.engine.disk import DiskTier
from mlxinfer.engine.engine import Engine, Event, Request
from mlxinfer.engine.governor import Governor
from mlxinfer.engine.prefix_disk import PrefixDisk
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.upstream import make_cache
from tests.conformance.configs.base import VOCAB
from tests.conformance.examine import tiny_model
from tests.conformance.reference import reference

if TYPE_CHECKING:
    from pathlib import Path

CASES = {
    "llama": "plain keys and values",
    "qwen3_moe": "experts",
    "gemma3_text": "sliding windows",
    "gpt_oss": "sinks and sliding windows",
    "gemma3n": "layers that share keys",
    "qwen3_next": "a hybrid",
    "mamba2": "recurrent only",
    "lfm2": "short convolutions",
    "deepseek_v3": "latent attention",
    "deepseek_v32": "latent attention with an index",
    "gemma2": "soft capped attention",
    "llama4": "chunked attention",
}


def vocabulary(case: str) -> int:
    from tests.conformance.examine import _vocab

    return _vocab(case)


def engine_of(model, case: str, *, prefix_bytes: int | None = None, folder: Path | None = None) -> Engine:
    thread = mlx_thread()
    disk = None
    if folder is not None:
        tier = DiskTier(folder, "model1", 1 << 30)
        tier.load_index()
        disk = PrefixDisk(tier)

    def make() -> Engine:
        runner = Runner(model, vocabulary(case))
        engine = Engine(
            thread,
            runner,
            max_num_seqs=4,
            max_queue=32,
            prefill_chunk=16,
            prefix_bytes=prefix_bytes,
            memory=Governor(1 << 32),
            disk=disk,
        )
        thread.attach(engine)
        return engine

    return thread.call(make)


def submit(engine: Engine, name: str, prompt: list[int], *, tokens: int, starts: tuple[int, ...] = ()):
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    spec = RowSpec(name, tuple(prompt), RowSampling(temperature=0.0), 1)
    engine.submit(Request(spec, tokens, frozenset(), boundaries=starts), events.put)
    return events


def collect(events) -> tuple[list[int], int]:
    """The tokens of a reply, and how many of its prompt were cached."""
    tokens: list[int] = []
    while True:
        event = events.get(timeout=60)
        assert event.error is None, event.error
        if event.token is not None:
            tokens.append(event.token)
        if event.finished is not None:
            return tokens, event.usage.cached_tokens


def text(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % (VOCAB - 10) + 3 for i in range(length)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case}: {why}" for case, why in CASES.items()])
def test_replies_are_the_same_with_the_cache_as_without(case):
    thread = mlx_thread()
    model = thread.call(lambda: tiny_model(case))
    engine = engine_of(model, case)
    system, first, other = text(1, 40), text(2, 12), text(3, 9)
    try:

        def expected(prompt: list[int], n: int) -> list[int]:
            return thread.call(lambda: reference(model, prompt, n).tokens)

        # A conversation of three turns, each going on after the reply of the one before.
        prompt, held = system + first, 0
        for turn in range(3):
            starts = (40, len(prompt) - 4)
            reply, cached = collect(submit(engine, f"t{turn}", prompt, tokens=7, starts=starts))
            assert reply == expected(prompt, 7)
            # The last reply token was never fed; everything before it is there.
            assert cached == held
            held = len(prompt) + 6
            prompt = prompt + reply + text(10 + turn, 8)
        # Another conversation with the same system prompt; and the first one once more, from its last message on.
        reply, cached = collect(submit(engine, "other", system + other, tokens=7, starts=(40,)))
        assert reply == expected(system + other, 7)
        assert cached == 40
        again = system + first
        reply, cached = collect(submit(engine, "again", again, tokens=7, starts=(40, len(again) - 4)))
        assert reply == expected(again, 7)
        assert cached >= 40
        # Four at once with one new system prompt: it is computed once.
        before = engine.cached_tokens
        prompts = [text(20, 60) + text(30 + i, 5 + i) for i in range(4)]
        streams = [submit(engine, f"s{i}", p, tokens=5, starts=(60,)) for i, p in enumerate(prompts)]
        for p, events in zip(prompts, streams, strict=True):
            assert collect(events)[0] == expected(p, 5)
        assert engine.cached_tokens - before >= 3 * 60
        # And three more of them at once, each from the same idle prefix: none writes into another's.
        prompts = [text(20, 60) + text(40 + i, 5 + i) for i in range(3)]
        streams = [submit(engine, f"u{i}", p, tokens=9) for i, p in enumerate(prompts)]
        for p, events in zip(prompts, streams, strict=True):
            reply, cached = collect(events)
            assert reply == expected(p, 9)
            assert cached == 60
        thread.call(engine.runner.prefixes.tree.check)
    finally:
        thread.call(engine.close)


@pytest.mark.parametrize("case", CASES, ids=[f"{case}: {why}" for case, why in CASES.items()])
def test_after_a_restart_a_conversation_goes_on_from_disk(case, tmp_path):
    thread = mlx_thread()
    model = thread.call(lambda: tiny_model(case))
    system, question = text(1, 150), text(2, 20)
    prompt, starts = system + question, (150,)
    first = engine_of(model, case, folder=tmp_path)
    reply, _ = collect(submit(first, "a", prompt, tokens=7, starts=starts))
    thread.call(first.close)
    assert first.wait_written()
    assert list(tmp_path.rglob("*")), "it is on disk when the engine has ended"
    second = engine_of(model, case, folder=tmp_path)
    try:
        went_on = prompt + reply + text(3, 9)
        expected = thread.call(lambda: reference(model, went_on, 7).tokens)
        assert collect(submit(second, "b", went_on, tokens=7)) == (expected, len(prompt) + 6)
        other = system + text(4, 30)
        expected = thread.call(lambda: reference(model, other, 7).tokens)
        assert collect(submit(second, "c", other, tokens=7)) == (expected, 150)
    finally:
        thread.call(second.close)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_is_not_served_and_costs_nothing(damage, tmp_path):
    thread = mlx_thread()
    model = thread.call(lambda: tiny_model("llama"))
    prompt = text(1, 200)
    first = engine_of(model, "llama", folder=tmp_path)
    reply, _ = collect(submit(first, "a", prompt, tokens=7))
    thread.call(first.close)
    assert first.wait_written()
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    second = engine_of(model, "llama", folder=tmp_path)
    # After the index was read, so that the head is sound and the body is not.
    file.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    try:
        assert collect(submit(second, "b", prompt, tokens=7)) == (reply, 0)
    finally:
        thread.call(second.close)


def test_a_cache_class_that_cannot_be_restored_goes_without_the_prefix_cache():
    class Opaque:
        """A cache of a model's own, without a way to set its state."""

        def __init__(self, cache) -> None:
            self._cache = cache

        def __getattr__(self, name):
            return getattr(self._cache, name)

        @property
        def state(self):
            return self._cache.state

    thread = mlx_thread()
    model = thread.call(lambda: tiny_model("gpt_bigcode"))
    with unittest.mock.patch("mlxinfer.engine.forwards.make_cache", lambda m: [Opaque(c) for c in make_cache(m)]):
        engine = engine_of(model, "gpt_bigcode")
        try:
            assert engine.runner.prefixes is None
            prompt = text(1, 30)
            assert collect(submit(engine, "a", prompt, tokens=4)) == (
                thread.call(lambda: reference(model, prompt, 4).tokens),
                0,
            )
        finally:
            thread.call(engine.close)


def test_with_the_cache_off_nothing_is_held():
    thread = mlx_thread()
    model = thread.call(lambda: tiny_model("llama"))
    engine = engine_of(model, "llama", prefix_bytes=0)
    try:
        for name in ("a", "b"):
            assert collect(submit(engine, name, text(1, 40), tokens=3))[1] == 0
        assert engine.stats()["prefix_bytes"] == 0
    finally:
        thread.call(engine.close)


def test_an_idle_engine_writes_once_and_then_sleeps(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxinfer.engine.idle.WRITE_AFTER_S", 0.1)
    thread = mlx_thread()
    model = thread.call(lambda: tiny_model("llama"))
    engine = engine_of(model, "llama", folder=tmp_path)
    woken: list[float] = []
    original = engine.step
    try:
        collect(submit(engine, "a", text(1, 200), tokens=4))
        deadline = time.monotonic() + 20
        while not list(tmp_path.rglob("*.kv")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.rglob("*.kv"))
        time.sleep(0.3)
        engine.step = lambda: (woken.append(time.monotonic()), original())[1]  # type: ignore[method-assign]
        time.sleep(0.6)
        assert woken == [], "nothing wakes it"
    finally:
        del engine.step
        thread.call(engine.close)
