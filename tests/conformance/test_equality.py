"""Greedy replies are the same alone, in a batch, with the prefix cache and from disk: many random prompts, float32.

CI runs a slice; `make test-slow` the 300 prompts of each model.
"""

from __future__ import annotations

import random
import unittest.mock
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.engine.sampling import BatchSampler
from mlxinfer.engine.worker import mlx_thread
from tests.conformance.configs.base import VOCAB
from tests.conformance.examine import TOLERANCE, tiny_model
from tests.conformance.reference import reference
from tests.conformance.test_prefix_cache import collect, engine_of, submit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.engine.engine import Engine

MODELS = {"llama": "plain", "gemma3_text": "sliding", "qwen3_moe": "experts", "qwen3_next": "hybrid"}
TOKENS = 6


class Watch:
    """The logits that each request's tokens were chosen from."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.logits: dict[str, list[np.ndarray]] = defaultdict(list)

    def patched(self):
        original = BatchSampler.__call__

        def call(sampler: BatchSampler, logits: mx.array, uniforms: list[float], *more: Any) -> mx.array:
            names = {id(row.state): name for name, row in self.engine.runner._rows.items()}
            found = np.array(logits.astype(mx.float32))
            for row, one in zip(sampler.rows, found, strict=True):
                self.logits[names[id(row)]].append(one)
            return original(sampler, logits, uniforms, *more)

        return unittest.mock.patch.object(BatchSampler, "__call__", call)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Random prompts of 1 to 120 tokens; a third of them share one of three beginnings."""
    heads = [[rng.randrange(3, VOCAB) for _ in range(60)] for _ in range(3)]
    made: list[list[int]] = []
    for _ in range(count):
        tail = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 2, 7, 30, 59, 120]))]
        made.append(rng.choice(heads) + tail if rng.random() < 0.34 else tail)
    return made


def groups(rng: random.Random, count: int) -> Iterator[list[int]]:
    """Indices in batches of 1 to 16."""
    start = 0
    while start < count:
        size = rng.choice([1, 2, 3, 5, 8, 16])
        yield list(range(start, min(count, start + size)))
        start += size


def check(case: str, count: int, folder: Path) -> list[str]:
    """Run all prompts in batches: without a cache, with a cold one, a warm one and from disk; returns near ties."""
    thread = mlx_thread()
    model = thread.call(lambda: tiny_model(case))
    rng = random.Random(11)
    given = prompts(rng, count)
    batches = list(groups(rng, count))
    expected = [thread.call(lambda p=p: reference(model, p, TOKENS)) for p in given]
    ties: list[str] = []
    modes = [("no cache", {"prefix_bytes": 0}), ("cold and warm", {"folder": folder}), ("disk", {"folder": folder})]
    for mode, options in modes:
        engine = engine_of(model, case, **options)
        watch = Watch(engine)
        try:
            with watch.patched():
                for again in range(2 if mode == "cold and warm" else 1):
                    for batch in batches:
                        names = {i: f"{mode}-{again}-{i}" for i in batch}
                        streams = {
                            i: submit(
                                engine, names[i], given[i], tokens=TOKENS, starts=(60,) if len(given[i]) > 70 else ()
                            )
                            for i in batch
                        }
                        for i, events in streams.items():
                            tokens, _ = collect(events)
                            ties += compare(names[i], tokens, watch.logits.pop(names[i]), expected[i])
        finally:
            thread.call(engine.close)
    return ties


def compare(name: str, tokens: list[int], logits: list[np.ndarray], expected) -> list[str]:
    """Assert that a reply is the reference's; one may differ where the reference's two best are nearly the same."""
    for at, (token, wanted) in enumerate(zip(tokens, expected.tokens, strict=True)):
        theirs = expected.logits[at]
        scale = np.abs(theirs).max()
        assert np.abs(logits[at] - theirs).max() <= TOLERANCE * scale, f"{name}: logits of token {at}"
        if token != wanted:
            best = np.sort(theirs)[-2:]
            assert best[1] - best[0] <= TOLERANCE * scale, f"{name}: token {at} is {token}, not {wanted}"
            return [f"{name} token {at}: {token} for {wanted}"]
    return []


@pytest.mark.parametrize("case", MODELS)
def test_a_slice_of_random_prompts_gives_the_same_replies_in_every_mode(case, tmp_path):
    assert check(case, 24, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.timeout(1800)
def test_three_hundred_random_prompts_give_the_same_replies_in_every_mode(case, tmp_path):
    ties = check(case, 300, tmp_path)
    print(f"{case}: near ties {ties}")
    assert len(ties) <= 3
