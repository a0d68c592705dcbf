"""The engine's runner on one rank of several: the same steps, the tokens of rank 0.

Rank 0 samples; the others take part in the forward and are handed the tokens inside the graph, by a sum to which they
add nothing. So no rank waits for another outside of collectives, and none decides anything.

Between stages of a pipeline there is one channel without addresses, so what is sent has to be received in the same
order: each forward's receive and send are submitted by themselves, before anything else of a step and in the order in
which the forwards are built, which is the same on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.distributed.groups import Pair, PretendGroup
from mlxinfer.distributed.passing import stage
from mlxinfer.distributed.rank_adapters import RankAdapters
from mlxinfer.distributed.rank_prefixes import RankPrefixes
from mlxinfer.distributed.ways import by_heads
from mlxinfer.engine.blank import blank, num_layers, shallow
from mlxinfer.engine.kv import SeqKV
from mlxinfer.engine.memory import KVCost
from mlxinfer.engine.padded import SplitBatch
from mlxinfer.engine.ragged import ragged_attention, stackable
from mlxinfer.engine.runner import Runner
from mlxinfer.errors import MlxinferError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.nn as nn

    from mlxinfer.distributed.shards import Part
    from mlxinfer.engine.kv import Sequence as Held
    from mlxinfer.engine.rows import Launched, Row
    from mlxinfer.engine.sampling import Sampler
    from mlxinfer.engine.steps import Step

PROBED_LAYERS = 6
"""Of a pipeline's model: what a stage holds can't be tried by itself."""
TRIED_LENGTHS = (1, 2, 5, 9)
"""Tokens of rows whose states have to have one shape."""


class RankRunner(Runner):
    """`group` is None where there is but one rank."""

    def __init__(
        self, model: nn.Module, vocab_size: int, config: Mapping[str, Any], group: Any, part: Part | None
    ) -> None:
        """Raises UnsupportedModelError for a pipeline of a model that can't be driven as one."""
        self._group = group
        self._staged = part is not None and part.kind != "tensor" and group is not None
        self._pair = Pair(group) if part is not None and part.kind == "both" else None
        self._rank = 0 if group is None else int(group.rank())
        self._passed: list[mx.array] = []
        """What the last forward received and sent."""
        self._noted = 0
        """How many of the step's `_unsubmitted` are these."""
        # Of the whole process: a stage of another model may have been here.
        ragged_attention().handles.tied = False
        super().__init__(model, vocab_size, probed=not self._staged)
        if self._staged:
            assert part is not None
            self._take_over(config, part.split[part.stage])
        else:
            self.exact = _exact(self)
        self.held_prefixes = RankPrefixes()
        self.adapters: RankAdapters = RankAdapters(model)

    def _take_over(self, config: Mapping[str, Any], own: int) -> None:
        """How the model can be driven, from a few whole layers of it with made-up weights. `own`: layers of this stage.

        Every rank finds out the same: it looks at the config alone, with the same weights.
        """
        tried, few = whole_runner(config, self.vocab_size, paired=self._pair is not None)
        self.tier, self.tier_reason, self.view = tried.tier, tried.tier_reason, tried.view
        self.needs_checkpoints, self.restores = tried.needs_checkpoints, tried.restores
        self.kv_cost = _share(tried.kv_cost, own, few)
        self.forward_tokens = tried.forward_tokens
        self.exact = _exact(tried)
        self.attention.handles.tied = True
        mx.eval(mx.random.state)
        del tried
        mx.clear_cache()

    exact = False
    """A row's state can be had only where the row is, not a few tokens before."""

    def digest(self) -> dict[str, Any]:
        """What is held, without the arrays: the same on all ranks, whatever part of the model each has."""
        rows = {name: -1 if row.sequence is None else row.sequence.length for name, row in self._rows.items()}
        return {"rows": rows, "prefixes": self.held_prefixes.digest()}

    # As Runner, but what is kept of rows is decided elsewhere

    def _restore(self, row: Row) -> None:
        self.held_prefixes.restore(row.held, row.spec.request_id)

    def _leave(self, row: Row, sequence: Held, tokens: tuple[int, ...]) -> None:
        self.held_prefixes.leave(sequence, row.spec.request_id)

    def _checkpoint(self, row: Row, end: int) -> None:
        # What is kept is submitted at once.
        for passed in self._unsubmitted[: self._noted]:
            mx.async_eval(passed)
        self.held_prefixes.checkpoint(row.held, row.spec.request_id)

    # As Runner, but for what goes between ranks

    def launch(self, step: Step) -> Launched:
        self._noted = 0
        return super().launch(step)

    def _must_decode_apart(self, rows: list[Row]) -> bool:
        # A stage may hold no states that differ while another does; that none differ was tried.
        return any(row.held.length == 0 for row in rows) if self._staged else super()._must_decode_apart(rows)

    def _sampler(self, rows: list[Row]) -> Sampler:
        if self._group is None:
            return super()._sampler(rows)
        own = super()._sampler(rows) if self._rank == 0 else None

        def agreed(logits: mx.array, uniforms: Sequence[float], allowed: Mapping[int, bytes] | None) -> mx.array:
            if own is not None:
                tokens = own(logits, uniforms, allowed).astype(mx.uint32)
            else:
                # The way of the others' tokens comes after this rank's part of the forward.
                after: Any = self._passed if self._staged else logits
                tokens = mx.depends(mx.zeros(logits.shape[:1], mx.uint32), after)
            return self._returned(tokens) if self._staged else mx.distributed.all_sum(tokens, group=self._group)

        return agreed

    def _returned(self, tokens: mx.array) -> mx.array:
        """Of a pipeline's step, whose tokens rank 0 has: only the first stage, the last rank or two, embeds them."""
        last = self._group.size() - 1
        if self._rank == 0:
            return mx.distributed.send(tokens, last, group=self._group)
        if self._rank < last - (self._pair is not None):
            return tokens
        # Receiving depends on nothing, so all that comes before it has to be on its way: the forward above all.
        for arrays in (*self._unsubmitted, [tokens]):
            mx.async_eval(arrays)
        if self._rank < last:
            return mx.distributed.recv_like(tokens, last, group=self._group)
        found = mx.distributed.recv_like(tokens, 0, group=self._group)
        return found if self._pair is None else mx.distributed.send(found, last - 1, group=self._group)

    def _forward(self, batch: Any, tokens: mx.array) -> mx.array:
        if not self._staged or isinstance(batch, SplitBatch):
            return super()._forward(batch, tokens)
        with stage(self._pair) as passed:
            logits = super()._forward(batch, tokens)
        self._note(passed)
        return logits

    def _forward_own(self, sequences: list[Held], tokens: mx.array) -> mx.array:
        if not self._staged:
            return super()._forward_own(sequences, tokens)
        with stage(self._pair) as passed:
            logits = super()._forward_own(sequences, tokens)
        self._note(passed)
        return logits

    def _note(self, passed: list[mx.array]) -> None:
        """One by one: how a graph with several ends is gone through is mlx's affair. Ahead of the rows' buffers: those
        that wait to be submitted are the same objects that later forwards of the step write to."""
        self._passed = passed
        self._unsubmitted[self._noted : self._noted] = [[array] for array in passed]
        self._noted += len(passed)


def whole_runner(config: Mapping[str, Any], vocab_size: int, *, paired: bool = False) -> tuple[Runner, int]:
    """A runner over the first layers of a model, with made-up weights, and how many they are. `paired`: over half of
    their heads.

    Raises UnsupportedModelError where the model can't be a pipeline.
    """
    few = min(num_layers(config), PROBED_LAYERS)
    # The same weights on every rank: what is tried may be a close thing.
    mx.random.seed(0)
    try:
        model = blank(shallow(config, few), keep_packed=False)
        if paired:
            by_heads(model, PretendGroup(0, 2))
        with stage():
            tried = Runner(model, vocab_size)
            if tried.tier == "batched-state" and not _states_alike(tried):
                raise UnsupportedModelError("rows of different lengths have states of different shapes")
    except (MlxinferError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{config.get('model_type')} can't be run as a pipeline: {error}; split it by heads"
        ) from error
    return tried, few


def _states_alike(tried: Runner) -> bool:
    """Whether rows of any length can decode together, so that no stage has to look."""
    held: list[Held] = []
    for length in TRIED_LENGTHS:
        held.append(sequence := tried.new_sequence())
        mx.eval(tried.forward([sequence], [[0] * length]))
    return stackable(held)


def _exact(runner: Runner) -> bool:
    return any(not isinstance(leaf, SeqKV) for leaf in runner.new_sequence().stateful())


def _share(cost: KVCost, own: int, few: int) -> KVCost:
    """Of `own` layers, from that of `few`: about, where layers are of several kinds."""
    windowed = tuple((most, -(-size * own // few)) for most, size in cost.windowed)
    return KVCost(-(-cost.per_token * own // few), windowed, -(-cost.fixed * own // few), cost.step)
