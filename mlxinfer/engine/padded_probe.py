"""Finds out whether a model can be batched with padded views, by comparing it with itself.

Three rows of different lengths are decoded alone and together. Their logits must agree; what padding holds must not
move a single bit; more padding than needed must change nothing. Then the same with thousands of made-up keys, because
some models choose keys or blocks by the number of slots once there are many. Refuses when in doubt.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.engine.kv import SLACK, STEP, SeqKV, Sequence, UnbatchableError, sequence_like
from mlxinfer.engine.padded import PaddedBatch, PaddedView
from mlxinfer.upstream import make_cache

if TYPE_CHECKING:
    from collections.abc import Generator

    from mlxinfer.engine.ragged import RaggedAttention

LENGTHS = (7, 12, 9)
"""Prompts: longer than what a state of the last few tokens holds."""
STEPS = 2
LONG = (2700, 2300)
"""More than the 2,048 keys at which the indexes of latent and block-sparse attention begin to choose."""
PEAK = 3.0
"""The made-up keys are this much larger than real ones: attention settles on few of them, so a lost one shows."""
POISON = 100.0
"""In padding: a key or value that can't be overlooked and stays finite in half precision."""
EXTRA = 70
TOLERANCE = {mx.float32: 1e-3}
HALF_TOLERANCE = 0.05
"""Of the largest logit. In half precision a batch rounds differently from a row by itself."""

FAILURES = (UnbatchableError, ValueError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError)


def probe_padded(
    model: nn.Module, attention: RaggedAttention, vocab_size: int
) -> Generator[None, None, tuple[PaddedView | None, str]]:
    """(the view that serves `model`, "") or (None, why none does), in two pieces a view."""
    trial = _Trial(model, attention, vocab_size)
    reason = ""
    for rank in (4, 5):
        view = PaddedView(mask_rank=rank)
        try:
            trial.short(view)
            yield
            trial.long(view)
            yield
        except FAILURES as error:
            # The common rank's complaint says more than that of the uncommon one.
            kind = "" if isinstance(error, UnbatchableError) else f"{type(error).__name__}: "
            reason = reason or f"{kind}{str(error)[:200]}"
        else:
            return view, ""
    return None, reason


class _Trial:
    """The rows, and what they give alone; made once, on the first use."""

    def __init__(self, model: Any, attention: RaggedAttention, vocab_size: int) -> None:
        self.model = model
        self.attention = attention
        rng = random.Random(0)
        self.prompts = [[rng.randrange(vocab_size) for _ in range(n)] for n in LENGTHS]
        self.tokens = [[rng.randrange(vocab_size) for _ in LENGTHS] for _ in range(STEPS)]
        self._rows: list[Sequence] = []
        self._alone: list[mx.array] = []

    def rows(self) -> list[Sequence]:
        """Copies of the prefilled rows."""
        if not self._rows:
            for prompt in self.prompts:
                sequence = sequence_like(make_cache(self.model))
                self._step([sequence], [prompt])
                mx.eval(sequence.arrays())
                self._rows.append(sequence)
        return [_copy(row) for row in self._rows]

    def short(self, view: PaddedView) -> None:
        """Raises UnbatchableError unless the rows together give what they give alone, whatever padding holds."""
        if not self._alone:
            alone = [self._alone_logits(row, i) for i, row in enumerate(self.rows())]
            self._alone = [mx.concatenate(list(step)) for step in zip(*alone, strict=True)]
        clean = self._together(self.rows(), view, 1)
        poisoned = self._together(self.rows(), replace(view, fill=POISON), STEPS)
        roomy = self._together(self.rows(), replace(view, fill=-POISON, extra=EXTRA), 1)
        for ours, theirs in zip(poisoned, self._alone, strict=True):
            _compare(ours, theirs, "rows in a batch get other logits than alone")
        if not mx.array_equal(clean[0], poisoned[0], equal_nan=True).item():
            raise UnbatchableError("padding shows in the logits")
        _compare(roomy[0], self._alone[0], "the number of padded slots shows in the logits")

    def long(self, view: PaddedView) -> None:
        """The same for one step over thousands of keys. Positions stay small: a table of them may be short."""
        rows = self.rows()[: len(LONG)]
        for index, (row, length) in enumerate(zip(rows, LONG, strict=True)):
            _lengthen(row, length, seed=index)
        alone = mx.concatenate([self._step([_copy(row)], [[self.tokens[0][i]]])[:, -1] for i, row in enumerate(rows)])
        mx.eval(alone)
        together = self._together(rows, replace(view, fill=POISON), 1)[0]
        _compare(together, alone, "over thousands of keys rows in a batch get other logits than alone")

    def _alone_logits(self, row: Sequence, index: int) -> list[mx.array]:
        return [self._step([row], [[tokens[index]]])[:, -1] for tokens in self.tokens]

    def _together(self, rows: list[Sequence], view: PaddedView, steps: int) -> list[mx.array]:
        batch = PaddedBatch(rows, self.attention, view)
        return [self._run(batch, [[t] for t in tokens[: len(rows)]])[:, -1] for tokens in self.tokens[:steps]]

    def _step(self, sequences: list[Sequence], tokens: list[list[int]]) -> mx.array:
        return self._run(PaddedBatch(sequences, self.attention, PaddedView()), tokens)

    def _run(self, batch: PaddedBatch, tokens: list[list[int]]) -> mx.array:
        batch.begin(len(tokens[0]))
        try:
            return self.model(mx.array(tokens), cache=batch.caches)
        finally:
            batch.end()


def _compare(ours: mx.array, theirs: mx.array, complaint: str) -> None:
    """Raises UnbatchableError if the logits differ by more than rounding; equal infinities are no difference."""
    finite = mx.isfinite(theirs)
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    largest = mx.max(mx.where(finite, mx.abs(b), 0.0))
    off: Any = (mx.max(mx.where(ours == theirs, 0.0, mx.abs(a - b))) / largest).item()
    limit = TOLERANCE.get(theirs.dtype, HALF_TOLERANCE)
    # Written so that NaN fails.
    if not off <= limit:
        raise UnbatchableError(f"{complaint}: off by {off:.1g} of the largest, at most {limit:g} is rounding")


def _copy(sequence: Sequence) -> Sequence:
    """Another sequence that remembers the same; mlx copies on write."""

    def copied(held: Any) -> Any:
        if isinstance(held, tuple):
            return tuple(copied(part) for part in held)
        if isinstance(held, SeqKV):
            other: Any = SeqKV(held.window)
            other.load([buffer[...] for buffer in held.buffers()], held.start, held.end)
            return other
        other = type(held)(len(held.cache))
        other.cache = list(held.cache)
        return other

    copy = Sequence([copied(layer) for layer in sequence.layers])
    copy.length = sequence.length
    return copy


def _lengthen(sequence: Sequence, length: int, seed: int) -> None:
    """Give every layer `length` random keys and values, judged by the size of those that it has."""
    for number, leaf in enumerate(sequence.leaves()):
        if not isinstance(leaf, SeqKV) or not leaf.buffers():
            continue
        held = length if leaf.window is None else min(length, leaf.window - 1 + SLACK)
        buffers: list[mx.array] = []
        for which, old in enumerate(leaf.buffers()):
            real = old[..., : leaf.end - leaf.start, :].astype(mx.float32)
            size = mx.sqrt(mx.mean(mx.square(real))) if real.size else mx.array(0.0)
            key = mx.random.key(seed * 10_007 + number * 2 + which)
            shape = (*old.shape[:2], held + STEP, old.shape[3])
            size = size * PEAK if which == 0 else size
            buffers.append((mx.random.normal(shape, key=key) * size).astype(old.dtype))
        leaf.load(buffers, length - held, length)
