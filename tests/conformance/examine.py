"""One architecture under the test: everything that is measured about it, in one result."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.conformance.configs import CONFIGS, REFERENCE_CHUNK, WEIGHTS
from tests.conformance.configs.base import VOCAB
from tests.conformance.driver import Engine
from tests.conformance.faults import FAULTS, PADDED_FAULTS, stale_states
from tests.conformance.reference import Trace, difference, reference
from tests.conformance.weights import build

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlxinfer.engine.kv import Sequence
    from tests.conformance.faults import Fault

TOLERANCE = 1e-4  # relative, float32
STEPS = 8
# Longer than the window (8) and the chunk; 70 spans three of phi3small's blocks of 32; one token has no state yet.
LENGTHS = (41, 23, 5, 70, 1, 2)
CHUNK = 7
CHANGED = 18  # tokens before the end of a prompt of 23: two windows and more


@dataclass
class Result:
    """What came out for one case. Differences are relative, against mlx-lm's own loop."""

    tier: str
    reason: str
    solo: float
    batched: float
    same_tokens: bool
    distinct_tokens: int
    changed: float
    """Of the logits, when one early token of the prompt is another."""
    dropped: float
    """Of the logits, when one early token of the prompt is left out."""
    tokens_moved: int
    """How many greedy tokens those two changes moved."""
    upstream_chunked: float
    """mlx-lm chunked against mlx-lm whole: not zero where its own model isn't chunk-invariant."""
    faults: dict[str, float] = field(default_factory=dict)
    """For each fault that applies, how far the logits went off."""


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def module_of(case: str) -> str:
    return case.split("/", maxsplit=1)[0]


def tiny_model(case: str) -> nn.Module:
    return build(module_of(case), CONFIGS[case], **WEIGHTS.get(case, {}))


def _vocab(case: str) -> int:
    config = CONFIGS[case]
    return int(config.get("text_config", config)["vocab_size"])  # pyright: ignore


@functools.cache
def examine(case: str) -> Result:
    """Build, run against the reference, plant the faults. The same prompts and weights each time."""
    model = tiny_model(case)
    given = prompts()
    expected = [reference(model, p, STEPS, chunk=REFERENCE_CHUNK.get(case)) for p in given]
    engine = Engine(model, _vocab(case))
    solo = [engine.solo(p, STEPS, chunk=CHUNK) for p in given]
    # Rows join and leave at different steps: another batch, and other positions, in nearly every step.
    wide = CHUNK if case in REFERENCE_CHUNK else 2 * CHUNK
    batch = engine.batch(given, STEPS, chunk=wide, stagger=2, skip=4)
    changed, dropped, moved = _sensitivity(model, given[1], expected[1])
    result = Result(
        tier=engine.tier,
        reason=engine.reason,
        solo=_worst(solo, expected),
        batched=_worst(batch, expected),
        same_tokens=all(t.tokens == e.tokens for t, e in zip(solo + batch, expected * 2, strict=True)),
        distinct_tokens=len({t for e in expected for t in e.tokens}),
        changed=changed,
        dropped=dropped,
        tokens_moved=moved,
        upstream_chunked=max(
            difference(
                reference(model, p, 1, chunk=CHUNK).logits,
                e.logits[:1] if case not in REFERENCE_CHUNK else reference(model, p, 1).logits,
            )
            for p, e in zip(given, expected, strict=True)
        ),
    )
    result.faults = _plant(engine, given[:2], expected[:2], wide)
    return result


def _worst(ours: list[Trace], expected: list[Trace]) -> float:
    return max(difference(o.logits, e.logits) for o, e in zip(ours, expected, strict=True))


def _sensitivity(model: nn.Module, prompt: list[int], expected: Trace) -> tuple[float, float, int]:
    at = len(prompt) - CHANGED
    changed = [*prompt[:at], (prompt[at] + 11) % (VOCAB - 3) + 3, *prompt[at + 1 :]]
    dropped = [*prompt[:at], *prompt[at + 1 :]]
    traces = [reference(model, p, STEPS) for p in (changed, dropped)]
    moved = sum(a != b for t in traces for a, b in zip(t.tokens, expected.tokens, strict=True))
    return (*(difference(t.logits[:1], expected.logits[:1]) for t in traces), moved)  # pyright: ignore


def _plant(engine: Engine, given: list[list[int]], expected: list[Trace], chunk: int) -> dict[str, float]:
    """Each fault in a fresh batch of two rows, three tokens each; "none" is the control."""
    steps = 3
    wanted = [Trace(e.tokens[:steps], e.logits[:steps]) for e in expected]
    off: dict[str, float] = {"none": _worst(engine.batch(given, steps, chunk=chunk, together=True), wanted)}
    for name, fault in FAULTS.items():
        applied: list[bool] = []

        def plant(batch: list[Sequence], fault: Fault = fault, applied: list[bool] = applied) -> None:
            applied.append(fault(batch))

        traces = engine.batch(given, steps, chunk=chunk, together=True, fault=plant)
        if applied == [True]:
            off[name] = _worst(traces, wanted)
    if engine.tier == "batched-state":
        with stale_states():
            # The first row leaves while the second goes on: its state has to come out of the batch.
            off["stale state"] = _worst(engine.batch(given, steps, chunk=chunk, stagger=1), wanted)
    if engine.padded:
        for name, planted in PADDED_FAULTS.items():
            with planted():
                off[name] = _worst(engine.batch(given, steps, chunk=chunk, together=True), wanted)
    return off
