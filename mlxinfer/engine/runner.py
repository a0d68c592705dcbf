"""Turns a Step into mlx work: prompt chunks, one token for each decoding row, one sampling call.

`launch` builds a step's graph and never waits. The tokens are read later, so the next step's graph is built while this
one computes. Runs on the MLX thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import runtime
from mlxinfer.engine.adapters import Adapters
from mlxinfer.engine.forwards import Forwards
from mlxinfer.engine.grammar import Pacer
from mlxinfer.engine.logprobs import Logprobs
from mlxinfer.engine.prefix_store import PrefixStore
from mlxinfer.engine.ragged import stackable
from mlxinfer.engine.rows import Choice, Decoding, Launched, Row, RowSpec, uniforms
from mlxinfer.engine.sampling import BatchSampler, RowState, Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from mlxinfer.engine.grammar import CompiledGrammar
    from mlxinfer.engine.kv import Sequence
    from mlxinfer.engine.prefix_disk import PrefixDisk
    from mlxinfer.engine.steps import DecodeRow, PrefillChunk, Release, Start, Step

CLEAR_EVERY = 256
"""Steps between two returns of mlx's cached buffers to the system."""


class Runner(Forwards):
    """Rows on top of the forwards: they start, take prompt chunks, decode together and go."""

    def __init__(self, model: nn.Module, vocab_size: int, kv_bits: int | None = None, *, probed: bool = True) -> None:
        """As Forwards."""
        super().__init__(model, vocab_size, kv_bits, probed=probed)
        self.prefixes: PrefixStore | None = None
        self.adapters = Adapters(model)
        self._rows: dict[str, Row] = {}
        self._decoding: Decoding | None = None
        self._steps = 0
        self._unsubmitted: list[list[mx.array]] = []
        self._prompts: list[tuple[str, int, Logprobs]] = []
        self._pacer = Pacer()
        self.submits_early = not runtime.on_cpu()
        """A step is submitted while the one before computes. On a CPU mlx would then copy every buffer that both write
        to: it holds a step's inputs until the step has run."""

    def remember(self, disk: PrefixDisk | None = None) -> None:
        """Keep what rows leave for others that begin alike, where the model can go on from it. It may hold nothing
        until it is given room."""
        if self.restores:
            self.prefixes = PrefixStore(needs_state=self.needs_checkpoints, max_bytes=0, disk=disk)

    def admit(self, spec: RowSpec, grammar: CompiledGrammar | None = None) -> None:
        """Take a request in; it holds no memory until it starts."""
        state = RowState(spec.sampling, spec.prompt_token_ids, self.vocab_size)
        self._rows[spec.request_id] = Row(spec, state, spec.prompt_token_ids, grammar=grammar)

    def launch(self, step: Step) -> Launched:
        """Build a step's graph and submit it where `submits_early`. Rows that it releases are gone afterwards.

        Where a row has a grammar the graph ends with the logits, until `choose` is called on what is returned.
        """
        if step.release:
            self._settle()
            for release in step.release:
                self._release(release)
        if step.prefill or step.decode:
            self.adapters.use(step.adapter)
        for start in step.start:
            self._start(start)
        marker = choice = None
        self._unsubmitted, self._prompts = [], []
        if self._joins(step):
            choice, marker = self._mixed(step)
        else:
            for chunk in step.prefill:
                marker = self._prefill(chunk)
            if step.decode:
                choice = self._decode(step.decode)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        launched = Launched(step, choice, marker, self._unsubmitted, self._prompts, self._pacer)
        if choice is not None and choice.constraints:
            self._unsubmitted.append([choice.logits])
        else:
            launched.choose()
        if self.submits_early:
            launched.submit()
        return launched

    def drop_all(self) -> None:
        """Drop every row's arrays; after a failed step nothing of them can be trusted. The requests stay known."""
        self._decoding = None
        self.attention.handles.clear()
        self.head.keep = None
        if self.prefixes is not None:
            self.prefixes.drop_claims()
        for row in self._rows.values():
            row.sequence = row.token = None

    def forget(self, request_id: str) -> None:
        """Drop a row that holds nothing."""
        self._rows.pop(request_id, None)

    def close(self) -> None:
        """Let go of the model and of every row, after what was submitted has run."""
        mx.synchronize()
        self.drop_all()
        self._rows.clear()
        self._pacer.close()
        if self.prefixes is not None:
            self.prefixes.close()
        self.adapters.close()
        self.prefixes = self.model = None

    def kv_bytes(self) -> int:
        """Bytes of keys, values and states held for all rows."""
        return sum(row.sequence.nbytes for row in self._rows.values() if row.sequence is not None)

    # -- rows come and go ------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        row = self._rows[start.request_id]
        if start.output:
            row.state = RowState(row.spec.sampling, row.spec.prompt_token_ids, self.vocab_size, start.output)
        row.tokens = (*row.spec.prompt_token_ids, *start.output)
        row.constraint = None if row.grammar is None else row.grammar.begin()
        if row.constraint is not None and start.output:
            self._pacer.advance([(row.constraint, start.output)])
        row.sequence = self.new_sequence()
        row.sequence.expect(len(row.tokens) + 1)
        row.token = None
        if start.source is not None:
            row.sequence.share(self._rows[start.source].held, start.cached)
        elif start.cached:
            self._restore(row)

    def _release(self, release: Release) -> None:
        row = self._rows.get(release.request_id)
        if row is None:
            # It was preempted, and cancelled while it waited.
            return
        sequence, row.sequence = row.sequence, None
        if release.final:
            del self._rows[release.request_id]
        if sequence is not None:
            self._leave(row, sequence, (*row.spec.prompt_token_ids, *release.output)[: sequence.length])

    # What the prefix cache has to do with rows; over several ranks another process decides it.

    def _restore(self, row: Row) -> None:
        """Fill the row of a request that has claimed a prefix."""
        assert self.prefixes is not None
        self.prefixes.restore(row.held, row.spec.request_id)

    def _leave(self, row: Row, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """`sequence` is what `row` held, of which `tokens` are known."""
        if self.prefixes is not None:
            self.prefixes.save(sequence, row.spec.cache_key, tokens)

    def _checkpoint(self, row: Row, end: int) -> None:
        """Remember the state after `end` tokens of the row."""
        if self.prefixes is not None:
            self.prefixes.checkpoint(row.held, row.spec.cache_key, row.tokens[:end])

    # -- forwards --------------------------------------------------------------------------------------------------

    def _joins(self, step: Step) -> bool:
        """Whether chunks and decode rows go through one forward. Not where the prompt's own logits are wanted."""
        if not (self.fused and step.prefill and (step.decode or len(step.prefill) > 1)):
            return False
        return all(self._rows[c.request_id].spec.prompt_logprobs is None for c in step.prefill)

    def _prefill(self, chunk: PrefillChunk) -> mx.array:
        """One chunk by itself, [1, L]."""
        row = self._rows[chunk.request_id]
        logits = self.forward([row.held], [row.tokens[chunk.start : chunk.end]])
        wanted = row.spec.prompt_logprobs
        if wanted is not None:
            following = row.tokens[chunk.start + 1 : chunk.end + 1]
            logprobs = Logprobs.of(logits[0, : len(following)], mx.array(following), [wanted] * len(following))
            self._prompts.append((chunk.request_id, chunk.start + 1, logprobs))
            self._unsubmitted.append(logprobs.arrays())
        # Else the logits stay unevaluated: mlx is lazy, so the head of the model costs nothing here.
        return self._after_prefill([chunk])

    def _after_prefill(self, chunks: Seq[PrefillChunk]) -> mx.array:
        """Have the chunks' keys and states computed; returns what is ready when the last chunk is."""
        arrays: list[mx.array] = []
        for chunk in chunks:
            row = self._rows[chunk.request_id]
            arrays += row.held.arrays()
            if chunk.checkpoint:
                self._checkpoint(row, chunk.end)
        # Its own little buffer: holding the keys themselves would make their next update a copy.
        marker = mx.sum(arrays[-1][(slice(0, 1),) * arrays[-1].ndim])
        self._unsubmitted.append([*arrays, marker])
        return marker

    def _mixed(self, step: Step) -> tuple[Choice | None, mx.array]:
        """Chunks and decode rows in one forward of single tokens [R, 1]."""
        d = self._batch_of(tuple(row.request_id for row in step.decode)) if step.decode else None
        completing = {c.request_id for c in step.prefill}
        parts: list[mx.array] = []
        sequences: list[Sequence] = []
        lengths: list[int] = []
        keep: list[int] = []
        if d is not None:
            inputs = d.tokens if d.tokens is not None else self._inputs(d.rows)
            running = [i for i, row in enumerate(d.rows) if row.spec.request_id not in completing]
            # New rows come last: they joined the batch with this step.
            assert running == list(range(len(running)))
            sequences += [d.rows[i].held for i in running]
            lengths += [1] * len(running)
            keep += running
            if running:
                parts.append(inputs[: len(running)])
        decoding = {row.request_id for row in step.decode}
        for chunk in step.prefill:
            row = self._rows[chunk.request_id]
            last = chunk.request_id in decoding
            parts.append(mx.array(row.tokens[chunk.start : chunk.end + last], mx.uint32))
            sequences.append(row.held)
            lengths.append(chunk.end - chunk.start + last)
            if last:
                keep.append(sum(lengths) - 1)
        logits = self._forward_groups(sequences, lengths, mx.concatenate(parts)[:, None], keep)
        choice = None if d is None else _choice(d, logits, step.decode)
        return choice, self._after_prefill(step.prefill)

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self, decode: tuple[DecodeRow, ...]) -> Choice:
        if self.tier == "batched-state" and len(decode) > 1:
            rows = [self._rows[r.request_id] for r in decode]
            if self._must_decode_apart(rows):
                return self._decode_apart(rows, decode)
        d = self._batch_of(tuple(row.request_id for row in decode))
        inputs = d.tokens if d.tokens is not None else self._inputs(d.rows)
        inputs = inputs[:, None]
        if self.tier == "sequential":
            logits = self._forward_own([row.held for row in d.rows], inputs)
        else:
            if d.batch is None:
                d.batch = self._new_batch([row.held for row in d.rows])
            logits = self._forward(d.batch, inputs)
        return _choice(d, logits, decode)

    def _must_decode_apart(self, rows: list[Row]) -> bool:
        if any(row.held.length == 0 for row in rows):
            return True
        if self._decoding is not None and self._decoding.ids == tuple(row.spec.request_id for row in rows):
            return False
        # The states are looked at where they belong.
        self._settle()
        return not stackable([row.held for row in rows])

    def _decode_apart(self, rows: list[Row], decode: tuple[DecodeRow, ...]) -> Choice:
        """One step row by row, for the first token of one-token prompts: a model may treat "no state yet" in its own
        way (recurrent_gemma does), which a stacked state of zeros can't stand for. Also while states have different
        sizes: longcat_flash_ngram keeps the last tokens, of which a short prompt has fewer.
        """
        self._settle()
        inputs = self._inputs(rows)
        logits = mx.concatenate(
            [self._forward_rows([row], inputs[i : i + 1, None])[:, -1, :] for i, row in enumerate(rows)]
        )

        def keep(tokens: mx.array) -> None:
            for i, row in enumerate(rows):
                row.token = tokens[i : i + 1].astype(mx.uint32)

        return Choice(rows, self._sampler(rows), uniforms(rows, decode), logits, keep)

    def _forward_rows(self, rows: list[Row], tokens: mx.array) -> mx.array:
        batch = self._new_batch([row.held for row in rows])
        logits = self._forward(batch, tokens)
        batch.release()
        return logits

    def _inputs(self, rows: list[Row]) -> mx.array:
        parts = [mx.array([row.tokens[-1]], mx.uint32) if row.token is None else row.token for row in rows]
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    def _batch_of(self, ids: tuple[str, ...]) -> Decoding:
        if self._decoding is not None and self._decoding.ids == ids:
            return self._decoding
        self._settle()
        rows = [self._rows[i] for i in ids]
        self._decoding = Decoding(ids, rows, self._sampler(rows))
        return self._decoding

    def _sampler(self, rows: list[Row]) -> Sampler:
        """What turns these rows' logits into tokens."""
        return BatchSampler([row.state for row in rows])

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


def _choice(d: Decoding, logits: mx.array, decode: tuple[DecodeRow, ...]) -> Choice:
    """Of the batch's logits [B, L, vocab]."""

    def keep(tokens: mx.array) -> None:
        d.tokens = tokens

    return Choice(d.rows, d.sampler, uniforms(d.rows, decode), logits[:, -1, :], keep)
