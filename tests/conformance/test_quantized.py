"""Packed keys and values through the engine, for one model of each mechanism, against mlx-lm's own loop.

The reference is mlx-lm's loop over its own caches, with keys and values that were packed and unpacked before they went
in. Alone and in a changing batch the engine must give its logits as closely as it does without packing. One thing
can differ: a number that lies between two codes may fall to either side when a batch rounds it differently, and the
two sides are a step of the code apart. Such rows are rare and stay within FLIPPED.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlxinfer import upstream
from mlxinfer.engine.quantized import WINDOW_BITS, rotated
from tests.conformance.configs import CONFIGS, WEIGHTS
from tests.conformance.configs.base import VOCAB
from tests.conformance.driver import Engine
from tests.conformance.examine import CHUNK, STEPS, TOLERANCE, module_of, prompts
from tests.conformance.reference import Trace, difference, reference
from tests.conformance.weights import build

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = 32
# GQA, norms on heads, a sliding window, sinks, experts, recurrent layers (two kinds), keys shared between layers.
CASES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_next", "lfm2", "gemma3n")
FLIPPED = 3e-2
LOOSE = 0.4


def wide(case: str) -> dict[str, object]:
    """The case's config with heads that a group of 32 divides."""

    def widened(part: Any) -> dict[str, object]:
        # lfm2's heads are a share of its hidden size.
        return {**part, **({"hidden_size": 4 * HEAD, "block_dim": 4 * HEAD} if case == "lfm2" else {"head_dim": HEAD})}

    config = CONFIGS[case]
    return {**config, "text_config": widened(config["text_config"])} if "text_config" in config else widened(config)


@contextlib.contextmanager
def packed_on_the_way(bits: int) -> Iterator[None]:
    """mlx-lm's caches get keys and values that have been packed and unpacked."""

    def there_and_back(array: mx.array, cache: Any) -> mx.array:
        held = WINDOW_BITS if isinstance(cache, upstream.RotatingKVCache) else bits
        return mx.dequantize(*mx.quantize(array, group_size=HEAD, bits=held), group_size=HEAD, bits=held)

    with contextlib.ExitStack() as stack:
        for kind in (upstream.KVCache, upstream.RotatingKVCache):

            def update(self: Any, keys: mx.array, values: mx.array, original: Any = kind.update_and_fetch) -> Any:
                return original(self, rotated(there_and_back(rotated(keys), self)), there_and_back(values, self))

            stack.enter_context(unittest.mock.patch.object(kind, "update_and_fetch", update))
        yield


def apart(ours: list[Trace], theirs: list[Trace]) -> list[float]:
    """Row by row, the smallest difference first."""
    return sorted(difference(a.logits, b.logits) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", CASES)
def test_packed_keys_give_mlx_lms_logits_over_the_same_numbers_alone_and_in_a_batch(case: str, bits: int) -> None:
    model = build(module_of(case), wide(case), **WEIGHTS.get(case, {}))
    given = prompts()
    engine = Engine(model, VOCAB, kv_bits=bits)
    solo = [engine.solo(p, STEPS, chunk=CHUNK) for p in given]
    batch = engine.batch(given, STEPS, chunk=2 * CHUNK, stagger=2, skip=4)
    with packed_on_the_way(bits):
        expected = [reference(model, p, STEPS, chunk=CHUNK) for p in given]
    for rows in (apart(solo, expected), apart(batch, expected), apart(batch, solo)):
        assert rows[len(rows) // 2] <= TOLERANCE
        assert rows[-1] <= FLIPPED
    # Of the first token: afterwards the tokens themselves may part.
    unpacked = [reference(model, p, 1, chunk=CHUNK) for p in given]
    off = apart([Trace(t.tokens[:1], t.logits[:1]) for t in solo], unpacked)
    assert off[0] > 10 * TOLERANCE, "nothing was packed"
    assert bits == 4 or off[len(off) // 2] <= LOOSE
