"""What packed keys and values cost: distributions against unpacked ones, bytes per token, and the speed of a step.

The text is Python's own language reference, which every Python has; it is fed as it is, so that both see the same
tokens (teacher forcing).
"""

from __future__ import annotations

import math
import pydoc_data.topics
import statistics
import time
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxinfer import zoo
from mlxinfer.config import load_settings
from mlxinfer.engine.kv import Sequence, kv_cost
from mlxinfer.engine.loading import load_model
from mlxinfer.engine.quantized import Packing
from mlxinfer.engine.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable

TOPICS = ("exceptions", "naming", "context-managers", "compound", "typesseq")
CONTEXTS = (64, 256, 512, 1024, 1536)
SCORED = 128
"""Tokens scored after each context."""
CHUNK = 256


def kv_quality(name: str, bits: tuple[int, ...] = (8, 4), steps: int = 40) -> dict[str, object]:
    """One result: per number of bits the quality over all contexts, bytes per token and time per step at 1000."""
    settings = load_settings()
    files = zoo.resolve(name, settings)
    loaded = load_model(files.kind, files.path, dtype=settings.dtype)
    runner = Runner(loaded.model, loaded.vocab_size)
    text = "\n\n".join(pydoc_data.topics.topics[topic] for topic in TOPICS)
    ids = loaded.tokenizer.encode(text)[: max(CONTEXTS) + SCORED + 1]
    assert len(ids) == max(CONTEXTS) + SCORED + 1, "a longer text is needed"
    plain = runner.new_sequence()
    mx.eval(runner.forward([plain], [[0]]))
    packings = {b: Packing.of(plain, b) for b in bits}
    makers: dict[int | None, Callable[[], Sequence]] = {None: runner.new_sequence}
    for b, packing in packings.items():
        makers[b] = lambda packing=packing: packing.empty(runner.new_sequence())
    quality = _quality(runner, makers, ids)
    speed = _step_times(runner, makers, ids[:1000], steps)
    full = kv_cost(plain).per_token
    rows: list[dict[str, object]] = []
    for b, packing in packings.items():
        sequence = makers[b]()
        mx.eval(runner.forward([sequence], [[0]]))
        size = kv_cost(sequence).per_token
        rows.append(
            {
                "bits": b,
                "packing": str(packing),
                **quality[b],
                "bytes_per_token": size,
                "of_plain": round(size / full, 3),
                "step_ratio_at_1000": round(
                    statistics.median(p / q for p, q in zip(speed[b], speed[None], strict=True)), 2
                ),
            }
        )
    return {
        "bench": "kv-quality",
        "model": name,
        "dtype": loaded.dtype,
        "device": str(mx.default_device()),
        "tokens_scored": SCORED * len(CONTEXTS),
        "contexts": CONTEXTS,
        "plain_bytes_per_token": full,
        "plain_ms_per_step_at_1000": round(statistics.median(speed[None]) * 1e3, 1),
        "rows": rows,
    }


def _quality(
    runner: Runner, makers: dict[int | None, Callable[[], Sequence]], ids: list[int]
) -> dict[int | None, dict[str, object]]:
    kl, same, loss = ({b: [] for b in makers} for _ in range(3))
    mean_by_context: dict[int | None, dict[int, float]] = {b: {} for b in makers}
    for context in CONTEXTS:
        targets = mx.array(ids[context + 1 : context + SCORED + 1])[:, None]
        expected = mx.zeros(0)
        for b, make in makers.items():
            found = _log_probabilities(runner, make(), ids[: context + SCORED], context)
            if b is None:
                expected = found
            divergence = mx.sum(mx.exp(expected) * (expected - found), axis=-1)
            agreed = mx.argmax(found, axis=-1) == mx.argmax(expected, axis=-1)
            losses = -mx.take_along_axis(found, targets, axis=-1)[:, 0]
            for kept, new in ((kl, divergence), (same, agreed), (loss, losses)):
                kept[b] += np.array(new).tolist()
            mean_by_context[b][context] = round(float(mx.mean(divergence)), 6)
    base = statistics.fmean(loss[None])
    return {
        b: {
            "kl_mean": round(statistics.fmean(kl[b]), 6),
            "kl_max": round(max(kl[b]), 5),
            "kl_mean_by_context": mean_by_context[b],
            "top1_agreement": round(statistics.fmean(same[b]), 4),
            "perplexity": round(math.e ** statistics.fmean(loss[b]), 3),
            "perplexity_ratio": round(math.e ** (statistics.fmean(loss[b]) - base), 4),
        }
        for b in makers
    }


def _log_probabilities(runner: Runner, sequence: Sequence, ids: list[int], context: int) -> mx.array:
    """[len(ids) - context, vocab] in float32, after `context` tokens."""
    for start in range(0, context, CHUNK):
        runner.forward([sequence], [ids[start : min(start + CHUNK, context)]])
        mx.eval(sequence.arrays())
    logits = runner.forward([sequence], [ids[context:]])[0].astype(mx.float32)
    out = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(out)
    return out


def _step_times(
    runner: Runner, makers: dict[int | None, Callable[[], Sequence]], ids: list[int], steps: int
) -> dict[int | None, list[float]]:
    """Seconds of one-token steps after `ids`, each kind in turn."""
    sequences = {b: make() for b, make in makers.items()}
    for sequence in sequences.values():
        for start in range(0, len(ids), CHUNK):
            runner.forward([sequence], [ids[start : start + CHUNK]])
            mx.eval(sequence.arrays())
    times: dict[int | None, list[float]] = {b: [] for b in makers}
    for step in range(steps + 2):
        for b, sequence in sequences.items():
            start = time.perf_counter()
            mx.eval(runner.forward([sequence], [[ids[step]]]))
            if step >= 2:
                times[b].append(time.perf_counter() - start)
    return times
