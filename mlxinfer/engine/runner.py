"""Turns a Step into mlx work: one prefill chunk, one forward for all decoding rows, one sampling call.

`launch` builds and submits; it never waits. The tokens are read later, so the next step's graph is built while this
one computes. Runs on the MLX thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.engine.kv import SeqKV, Sequence, UnbatchableError, sequence_like
from mlxinfer.engine.ragged import Batch, ragged_attention
from mlxinfer.engine.sampling import BatchSampler, RowSampling, RowState, uniform
from mlxinfer.upstream import make_cache

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from mlxinfer.engine.scheduler import DecodeRow, PrefillChunk, Step

CLEAR_EVERY = 256
"""Steps between two returns of mlx's cached buffers to the system."""


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the runner needs to know of a request before its first step; plain data like Step."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: RowSampling
    seed: int


@dataclass(slots=True)
class _Row:
    spec: RowSpec
    sequence: Sequence
    state: RowState
    token: mx.array | None = None
    """The token to feed next, [1], not yet read; None means the last prompt token."""


@dataclass(slots=True)
class Launched:
    """A submitted step. `tokens` [rows] may still be computing; `marker` is ready when a prefill chunk is."""

    step: Step
    tokens: mx.array | None = None
    marker: mx.array | None = None

    def read(self) -> list[int]:
        """Wait for the step; one token per decode row."""
        if self.tokens is None:
            # Without this wait a long prompt would be submitted whole, and a cancel or an arrival would come after it.
            if self.marker is not None:
                mx.eval(self.marker)
            return []
        return self.tokens.tolist()  # pyright: ignore[reportReturnType]


@dataclass(slots=True)
class _Decoding:
    """The batch of the last decode step, kept while the same rows decode."""

    ids: tuple[str, ...]
    rows: list[_Row]
    batch: Batch | None
    sampler: BatchSampler
    tokens: mx.array | None = field(default=None)


class Runner:
    """Drives one model. `tier` is "ragged", "batched-state" or "sequential"; `tier_reason` says why."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        self.model: Any = model
        self.vocab_size = vocab_size
        self.attention = ragged_attention()
        self.tier, self.tier_reason = probe_tier(self)
        self._rows: dict[str, _Row] = {}
        self._decoding: _Decoding | None = None
        self._steps = 0

    def admit(self, spec: RowSpec) -> None:
        """Make a row for a request; it holds no memory until its first chunk."""
        state = RowState(spec.sampling, spec.prompt_token_ids, self.vocab_size)
        self._rows[spec.request_id] = _Row(spec, self.new_sequence(), state)

    def new_sequence(self) -> Sequence:
        """An empty sequence of the tier's kind."""
        caches = make_cache(self.model)
        return Sequence([], own=caches) if self.tier == "sequential" else sequence_like(caches)

    def launch(self, step: Step) -> Launched:
        """Submit a step. Rows that it releases are gone afterwards."""
        if step.release:
            self._settle()
            for request_id in step.release:
                self._rows.pop(request_id, None)
        marker = None if step.prefill is None else self._prefill(step.prefill)
        tokens = self._decode(step.decode) if step.decode else None
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return Launched(step, tokens, marker)

    def drop_all(self) -> None:
        """Forget every row; after a failed step nothing of its arrays can be trusted."""
        self._rows.clear()
        self._decoding = None
        self.attention.handles.clear()

    def forget(self, request_id: str) -> None:
        """Drop a row that never started."""
        self._rows.pop(request_id, None)

    def close(self) -> None:
        """Let go of the model and of every row, after what was submitted has run."""
        mx.synchronize()
        self.drop_all()
        self.model = None

    def kv_bytes(self) -> int:
        """Bytes of keys, values and states held for all rows."""
        return sum(row.sequence.nbytes for row in self._rows.values())

    def _prefill(self, chunk: PrefillChunk) -> mx.array:
        row = self._rows[chunk.request_id]
        self.forward([row.sequence], [row.spec.prompt_token_ids[chunk.start : chunk.end]])
        # The logits stay unevaluated: mlx is lazy, so the head of the model costs nothing here.
        arrays = row.sequence.arrays()
        # Its own little buffer: holding the keys themselves would make their next update a copy.
        marker = mx.sum(arrays[-1][(slice(0, 1),) * arrays[-1].ndim])
        mx.async_eval(arrays, marker)
        return marker

    def forward(self, sequences: list[Sequence], tokens: Iterable[Seq[int]]) -> mx.array:
        """Run tokens [B][L] after what the sequences hold → logits [B, L, vocab], not evaluated."""
        array = mx.array(list(tokens))
        if self.tier == "sequential":
            return self._forward_own(sequences, array)
        batch = Batch(sequences, self.attention)
        logits = self._forward(batch, array)
        batch.release()
        return logits

    def _forward(self, batch: Batch, tokens: mx.array) -> mx.array:
        batch.begin(tokens.shape[1])
        try:
            return self.model(tokens, cache=batch.caches)
        finally:
            batch.end()

    def _forward_own(self, sequences: list[Sequence], tokens: mx.array) -> mx.array:
        """The sequential tier: each row by itself over mlx-lm's own caches."""
        logits: list[mx.array] = []
        for index, sequence in enumerate(sequences):
            logits.append(self.model(tokens[index : index + 1], cache=sequence.own))
            sequence.length += tokens.shape[1]
        return logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=0)

    def _decode(self, decode: tuple[DecodeRow, ...]) -> mx.array:
        if self.tier == "batched-state" and len(decode) > 1:
            rows = [self._rows[r.request_id] for r in decode]
            if any(row.sequence.length == 0 for row in rows):
                return self._decode_apart(rows, decode)
        d = self._batch_of(tuple(row.request_id for row in decode))
        inputs = d.tokens if d.tokens is not None else self._inputs(d.rows)
        inputs = inputs[:, None]
        if d.batch is not None:
            logits = self._forward(d.batch, inputs)
        else:
            logits = self._forward_own([row.sequence for row in d.rows], inputs)
        d.tokens = d.sampler(logits[:, -1, :], _uniforms(d.rows, decode))
        mx.async_eval(d.tokens)
        return d.tokens

    def _decode_apart(self, rows: list[_Row], decode: tuple[DecodeRow, ...]) -> mx.array:
        """One step row by row, for the first token of one-token prompts: a model may treat "no state yet" in its own
        way (recurrent_gemma does), which a stacked state of zeros can't stand for.
        """
        self._settle()
        inputs = self._inputs(rows)
        logits = mx.concatenate(
            [self._forward_rows([row], inputs[i : i + 1, None])[:, -1, :] for i, row in enumerate(rows)]
        )
        tokens = BatchSampler([row.state for row in rows])(logits, _uniforms(rows, decode))
        for i, row in enumerate(rows):
            row.token = tokens[i : i + 1].astype(mx.uint32)
        mx.async_eval(tokens)
        return tokens

    def _forward_rows(self, rows: list[_Row], tokens: mx.array) -> mx.array:
        batch = Batch([row.sequence for row in rows], self.attention)
        logits = self._forward(batch, tokens)
        batch.release()
        return logits

    def _inputs(self, rows: list[_Row]) -> mx.array:
        parts = [mx.array([r.spec.prompt_token_ids[-1]], mx.uint32) if r.token is None else r.token for r in rows]
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    def _batch_of(self, ids: tuple[str, ...]) -> _Decoding:
        if self._decoding is not None and self._decoding.ids == ids:
            return self._decoding
        self._settle()
        rows = [self._rows[i] for i in ids]
        batch = None if self.tier == "sequential" else Batch([r.sequence for r in rows], self.attention)
        self._decoding = _Decoding(ids, rows, batch, BatchSampler([r.state for r in rows]))
        return self._decoding

    def _settle(self) -> None:
        """Give the last batch's tokens and recurrent states back to its rows."""
        d, self._decoding = self._decoding, None
        if d is None:
            return
        if d.tokens is not None:
            for index, row in enumerate(d.rows):
                row.token = d.tokens[index : index + 1].astype(mx.uint32)
        if d.batch is not None:
            d.batch.release()


def _uniforms(rows: list[_Row], decode: tuple[DecodeRow, ...]) -> list[float]:
    """One random number per row; greedy rows need none."""
    return [
        0.0 if row.state.sampling.greedy else uniform(row.spec.seed, r.position)
        for row, r in zip(rows, decode, strict=True)
    ]


def probe_tier(runner: Runner) -> tuple[str, str]:
    """(tier, reason): build the caches, then run two rows with handles that nobody should look into.

    The handles hold NaN, and in a second run they are longer too. NaN in the logits, logits that follow the handles'
    length, a handle that attention never looked up, or an error means that the model uses its keys, mask or positions
    in a way that a ragged batch can't serve; it then runs row by row over mlx-lm's own caches.
    """
    try:
        leaves = list(sequence_like(make_cache(runner.model)).leaves())
    except UnbatchableError as error:
        return "sequential", str(error)
    try:
        logits, longer = _probe(runner, 0), _probe(runner, 5)
        if mx.any(mx.isnan(logits)).item():
            return "sequential", "keys are used outside of attention as well"
        if not mx.array_equal(logits, longer).item():
            return "sequential", "positions are taken from the shape of the keys"
    except (UnbatchableError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        return "sequential", f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        runner.attention.handles.clear()
    recurrent = any(not isinstance(leaf, SeqKV) for leaf in leaves)
    return ("batched-state", "recurrent state by row") if recurrent else ("ragged", "keys and values only")


def _probe(runner: Runner, extra: int) -> mx.array:
    """Logits of one batched step of two short rows, with poisoned handles `extra` positions too long."""
    sequences = [sequence_like(make_cache(runner.model)) for _ in range(2)]
    for sequence, prompt in zip(sequences, ([0, 1], [1]), strict=True):
        batch = Batch([sequence], runner.attention)
        batch.begin(len(prompt))
        runner.model(mx.array([prompt]), cache=batch.caches)
        batch.end()
    batch = Batch(sequences, runner.attention)
    batch.poison(extra)
    batch.begin(1)
    logits = runner.model(mx.array([[1], [0]]), cache=batch.caches)
    if unused := runner.attention.handles.unused():
        raise UnbatchableError(f"{unused} layers use their keys outside of attention")
    batch.end()
    return logits
