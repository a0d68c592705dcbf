"""The engine's runner on one rank of several: the same steps, the tokens of rank 0.

Rank 0 samples; the others take part in the forward and are handed the tokens inside the graph, by a sum to which they
add nothing. So no rank waits for another outside of collectives, and none decides anything.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer import upstream
from mlxinfer.engine.blank import blank, num_layers, shallow
from mlxinfer.engine.runner import Runner
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import mlx.nn as nn

    from mlxinfer.distributed.shards import Part
    from mlxinfer.engine.rows import Row
    from mlxinfer.engine.sampling import Sampler

PROBED_LAYERS = 6
"""Of a pipeline's model: what a stage holds can't be tried by itself."""


class RankRunner(Runner):
    """`group` is None where there is but one rank."""

    def __init__(
        self, model: nn.Module, vocab_size: int, config: Mapping[str, Any], group: Any, part: Part | None
    ) -> None:
        """Raises UnsupportedModelError for a pipeline of a model whose rows can't share a forward."""
        self._group = group
        self._staged = part is not None and part.kind == "pipeline"
        self._rank = 0 if group is None else int(group.rank())
        super().__init__(model, vocab_size, probed=not self._staged)
        if self._staged:
            self._take_over(config)

    def _take_over(self, config: Mapping[str, Any]) -> None:
        """How the model can be driven, from a few whole layers of it with made-up weights."""
        whole = num_layers(config)
        few = min(whole, PROBED_LAYERS)
        tried = Runner(blank(shallow(config, few), keep_packed=False), self.vocab_size)
        if tried.tier != "ragged" or tried.view is not None:
            raise UnsupportedModelError(
                f"{config.get('model_type')} can't be run as a pipeline: {tried.tier_reason}; split it by heads"
            )
        self.tier, self.tier_reason, self.view = tried.tier, tried.tier_reason, tried.view
        self.needs_checkpoints, self.restores = tried.needs_checkpoints, False
        self.kv_cost = tried.kv_cost
        self.forward_tokens = tried.forward_tokens
        self.attention.handles.tied = True
        mx.eval(mx.random.state)

    def _sampler(self, rows: list[Row]) -> Sampler:
        if self._group is None:
            return super()._sampler(rows)
        own = super()._sampler(rows) if self._rank == 0 else None

        def agreed(logits: mx.array, uniforms: Sequence[float], allowed: Mapping[int, bytes] | None) -> mx.array:
            if own is not None:
                tokens = own(logits, uniforms, allowed).astype(mx.uint32)
            else:
                # The way of the others' tokens comes after this rank's part of the forward.
                after: Any = [a for row in rows for a in row.held.arrays()] if self._staged else logits
                tokens = mx.depends(mx.zeros(logits.shape[:1], mx.uint32), after)
            return self._returned(tokens) if self._staged else mx.distributed.all_sum(tokens, group=self._group)

        return agreed

    def _returned(self, tokens: mx.array) -> mx.array:
        """Of a pipeline's step, whose tokens rank 0 has: only the first stage, the last rank, embeds them."""
        last = self._group.size() - 1
        if self._rank == 0:
            return mx.distributed.send(tokens, last, group=self._group)
        if self._rank == last:
            # Receiving depends on nothing, so all that comes before it has to be on its way: the forward above all.
            for arrays in (*self._unsubmitted, [tokens]):
                mx.async_eval(arrays)
            return mx.distributed.recv_like(tokens, 0, group=self._group)
        return tokens

    def _forward(self, batch: Any, tokens: mx.array) -> mx.array:
        with self._stage():
            return super()._forward(batch, tokens)

    @contextlib.contextmanager
    def _stage(self) -> Iterator[None]:
        if not self._staged:
            yield
            return
        with upstream.without_gather():
            yield
