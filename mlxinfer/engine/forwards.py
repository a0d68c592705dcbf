"""Drives a model's forwards, whichever way its rows can be put together; finds that out when it is made.

On the MLX thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxinfer.engine.groups import forward_bytes, length_groups
from mlxinfer.engine.head import HeadRows
from mlxinfer.engine.kv import Sequence, kv_cost, sequence_like
from mlxinfer.engine.padded import PaddedBatch, SplitBatch
from mlxinfer.engine.prefix_store import can_restore
from mlxinfer.engine.quantized import Packing, check_tier
from mlxinfer.engine.ragged import Batch, ragged_attention
from mlxinfer.engine.tier import probe_tier
from mlxinfer.upstream import make_cache

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from collections.abc import Sequence as Seq

    from mlxinfer.engine.memory import KVCost
    from mlxinfer.engine.padded import PaddedView


class Forwards:
    """Drives one model. `tier` is "ragged", "batched-state" or "sequential"; `tier_reason` says why.

    `view` is set where the rows of a batch are shown to the model as padded views.
    """

    def __init__(self, model: nn.Module, vocab_size: int, kv_bits: int | None = None, *, probed: bool = True) -> None:
        """Keys and values are held in `kv_bits`, 8 or 4. Raises InvalidRequestError where the model can't have that.

        Without `probed` nothing has been tried yet: `probe` has to be run to its end before the first request.
        """
        self.model: Any = model
        self.vocab_size = vocab_size
        self.attention = ragged_attention()
        self.head = HeadRows()
        self.tier = self.tier_reason = ""
        self.view: PaddedView | None = None
        self.forward_tokens = 0
        """How many tokens' keys take as long to read as the weights."""
        self.restores = False
        """A sequence goes on the same from a checkpoint."""
        self.kv_bits = kv_bits
        self.packing: Packing | None = None
        """How keys and values are packed; None: they aren't."""
        if probed:
            for _ in self.probe():
                pass

    def probe(self) -> Generator[None, None, None]:
        """Find out how the model can be driven, in pieces of one forward, so that other engines go on meanwhile."""
        tier = yield from probe_tier(self.model, self.attention, self.vocab_size)
        self.tier, self.tier_reason, self.view = tier.name, tier.reason, tier.view
        if self.kv_bits is not None:
            self.packing = self._pack(self.kv_bits)
            yield
        if self.fused:
            yield from self.head.install(self.model, self._head_probe)
            yield
        self.needs_checkpoints = bool(self.new_sequence().stateful())
        self.kv_cost = self._measure()
        yield
        self.forward_tokens = self._forward_tokens()
        self.restores = yield from can_restore(self)

    @property
    def fused(self) -> bool:
        """Prompt chunks and decoding rows can share one forward."""
        return self.tier == "ragged" and self.view is None

    def new_sequence(self) -> Sequence:
        """An empty sequence of the tier's kind."""
        caches = make_cache(self.model)
        if self.tier == "sequential":
            return Sequence([], own=caches)
        sequence = sequence_like(caches)
        return sequence if self.packing is None else self.packing.empty(sequence)

    def _forward_groups(
        self, sequences: list[Sequence], lengths: list[int], tokens: mx.array, keep: list[int] | None
    ) -> mx.array:
        """Tokens [R, 1], lengths[i] of them for sequence i → logits [K, 1, vocab] of the rows in `keep`, or all."""
        batch = Batch(sequences, self.attention, lengths)
        kept = mx.array(keep) if keep else None
        self.head.keep = kept if self.head.installed else None
        try:
            logits = self._forward(batch, tokens)
        finally:
            self.head.keep = None
        return logits if kept is None or self.head.installed else logits[kept]

    def _head_probe(self, keep: mx.array | None) -> mx.array:
        """Logits of a fused forward for three tokens of two sequences, with `keep` set as given."""
        batch = Batch([self.new_sequence(), self.new_sequence()], self.attention, [1, 2])
        self.head.keep = keep
        try:
            return self._forward(batch, mx.array([[0], [1], [0]]))
        finally:
            self.head.keep = None

    def _pack(self, bits: int) -> Packing:
        check_tier(bits, self.tier, self.tier_reason)
        return Packing.of(self._one_token(), bits)

    def _measure(self) -> KVCost:
        """What a sequence takes in memory, from one token's."""
        return kv_cost(self._one_token())

    def _one_token(self) -> Sequence:
        """A sequence that holds one token."""
        sequence = self.new_sequence()
        mx.eval(self.forward([sequence], [[0]]))
        return sequence

    def _forward_tokens(self) -> float:
        weights: list[tuple[str, mx.array]] = tree_flatten(self.model.parameters())  # pyright: ignore[reportAssignmentType]
        per_token = self.kv_cost.per_token + sum(size for _, size in self.kv_cost.windowed)
        return forward_bytes([(w.shape, w.nbytes) for _, w in weights]) / max(1, per_token)

    def forward(self, sequences: list[Sequence], tokens: Iterable[Seq[int]]) -> mx.array:
        """Run tokens [B][L] after what the sequences hold → logits [B, L, vocab], not evaluated."""
        array = mx.array(list(tokens))
        if self.tier == "sequential":
            return self._forward_own(sequences, array)
        batch = self._new_batch(sequences)
        logits = self._forward(batch, array)
        batch.release()
        return logits

    def _new_batch(self, sequences: list[Sequence]) -> Batch | SplitBatch:
        view = self.view
        if view is None:
            return Batch(sequences, self.attention)
        if len(sequences) == 1:
            return PaddedBatch(sequences, self.attention, view)
        groups = length_groups([s.length for s in sequences], self.forward_tokens)
        parts = [PaddedBatch([sequences[i] for i in rows], self.attention, view) for rows in groups]
        return parts[0] if len(parts) == 1 else SplitBatch(groups, parts)

    def _forward(self, batch: Batch | SplitBatch, tokens: mx.array) -> mx.array:
        if isinstance(batch, SplitBatch):
            return batch.joined([self._forward(part, tokens[rows]) for rows, part in batch.parts])
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
