"""The engine as the conformance test sees it: prompts in, greedy tokens and the logits they came from out.

Everything goes through `Runner.admit` and `Runner.launch`, the calls the worker makes; this file alone knows them.
"""

from __future__ import annotations

import unittest.mock
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.sampling import BatchSampler, RowSampling
from mlxinfer.engine.steps import DecodeRow, PrefillChunk, Release, Start, Step
from tests.conformance.reference import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Seq

    from mlxinfer.engine.kv import Sequence


class Recorder(BatchSampler):
    """A sampler that remembers the logits it was given."""

    seen: ClassVar[list[mx.array]] = []

    def __call__(self, logits: mx.array, uniforms: Seq[float], allowed: Mapping[int, bytes] | None = None) -> mx.array:
        self.seen.append(logits)
        return super().__call__(logits, uniforms, allowed)


@dataclass
class _Live:
    """One prompt on its way through the engine."""

    id: str
    prompt: list[int]
    joins: int
    started: bool = False
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


class Engine:
    """One runner over one model. `tier`, `reason` and `padded` are what the runner found out about the model."""

    def __init__(self, model: nn.Module, vocab_size: int, kv_bits: int | None = None) -> None:
        self._runner = Runner(model, vocab_size, kv_bits)
        self.tier, self.reason = self._runner.tier, self._runner.tier_reason
        self.padded = self._runner.view is not None
        self._steps = 0

    def solo(self, prompt: list[int], steps: int, *, chunk: int) -> Trace:
        """One prompt by itself, prefilled in chunks of `chunk` tokens."""
        return self.batch([prompt], steps, chunk=chunk)[0]

    def batch(
        self,
        prompts: list[list[int]],
        steps: int,
        *,
        chunk: int,
        stagger: int = 0,
        skip: int | None = None,
        together: bool = False,
        fault: Callable[[list[Sequence]], None] | None = None,
    ) -> list[Trace]:
        """All prompts together until each has `steps` tokens.

        Prompt i starts its prefill `stagger` * i steps after the first, between the decode steps of the others, so
        rows join a running batch and leave it one after the other. The longest-running row sits out step `skip`.
        With `together`, no row decodes before the last is prefilled; `fault` gets the sequences at that moment.
        """
        rows = [_Live(f"row{i}", prompt, joins=i * stagger) for i, prompt in enumerate(prompts)]
        for row in rows:
            self._runner.admit(RowSpec(row.id, tuple(row.prompt), RowSampling(temperature=0.0), seed=0))
        release: list[str] = []
        now = 0
        while any(len(row.tokens) < steps for row in rows):
            started = [row for row in rows if row.joins <= now and len(row.tokens) < steps]
            filling = next((row for row in started if row.fed < len(row.prompt) - 1), None)
            if fault is not None and not filling:
                fault(self._sequences(rows))
                fault = None
            decoding = [row for row in started if row.fed >= len(row.prompt) - 1]
            if now == skip:
                decoding = decoding[1:]
            if together and filling is not None:
                decoding = []
            elif filling is not None and filling.fed + chunk >= len(filling.prompt) - 1:
                # Its last chunk and its first token share a step, as the scheduler has it.
                decoding = [*decoding, filling]
            self._step(release, filling, decoding, chunk)
            release = [row.id for row in decoding if len(row.tokens) == steps]
            now += 1
        self._launch(Step(self._steps, release=tuple(Release(row.id) for row in rows)))
        return [Trace(row.tokens, np.stack(row.logits)) for row in rows]

    def _step(self, release: list[str], filling: _Live | None, decoding: list[_Live], chunk: int) -> None:
        chunks: tuple[PrefillChunk, ...] = ()
        if filling is not None:
            end = min(filling.fed + chunk, len(filling.prompt) - 1)
            chunks = (PrefillChunk(filling.id, filling.fed, end),)
            filling.fed = end
        new = [row for row in (*decoding, *([filling] if filling else [])) if not row.started]
        starts = tuple(dict.fromkeys(Start(row.id) for row in new))
        for row in new:
            row.started = True
        decode = tuple(DecodeRow(row.id, len(row.tokens)) for row in decoding)
        gone = tuple(Release(name) for name in release)
        tokens, logits = self._launch(Step(self._steps, gone, starts, chunks, decode))
        for row, token, row_logits in zip(decoding, tokens, logits, strict=True):
            row.tokens.append(token)
            row.logits.append(row_logits)

    def _launch(self, step: Step) -> tuple[list[int], list[np.ndarray]]:
        self._steps += 1
        Recorder.seen.clear()
        with unittest.mock.patch("mlxinfer.engine.runner.BatchSampler", Recorder):
            tokens = self._runner.launch(step).read().tokens
        rows = [row for out in Recorder.seen for row in np.array(out.astype(mx.float32))]
        return tokens, rows

    def _sequences(self, rows: list[_Live]) -> list[Sequence]:
        return [self._runner._rows[row.id].held for row in rows]
