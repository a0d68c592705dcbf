"""A few layers of a model, with made-up weights, taken through a few updates: what a layer costs in bytes and seconds.

What is alive at a peak depends on the kernels, on what each layer keeps for the way back and on how far mlx runs ahead
of the arrays it frees. All of that is in the run itself; a few layers of the right width show it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer import runtime
from mlxinfer.engine.blank import blank, shallow
from mlxinfer.lora import methods, objectives
from mlxinfer.lora.batches import WIDTH_STEP
from mlxinfer.lora.gradients import Gradients
from mlxinfer.lora.interrupt import Interrupt
from mlxinfer.lora.optimizers import build_optimizer, clip, global_norm
from mlxinfer.lora.parallel import Ranks
from mlxinfer.lora.recompute import recomputed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlxinfer.lora.batches import Micro, UnitBatches
    from mlxinfer.lora.config import TrainConfig

UPDATES = 4
"""Of a trial."""
PLANNED_EPOCHS = 3
"""Epochs that are searched for the largest micro-batch."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Bytes above the base's weights, at the highest point of each part of an update, and seconds."""

    layers: int
    gradients: int
    """While gradients are taken."""
    update: int
    """While the optimizer moves the weights."""
    evaluation: int
    """While rows are evaluated; 0 where none are."""
    trained: int
    """Parameters."""
    seconds: float
    """Of one micro-batch, the optimizer's part left out."""
    tokens: int
    """Width times rows of that micro-batch."""
    micro_batches: int
    """Of an epoch."""
    epoch_tokens: int
    """Width times rows of them all."""
    updates: int
    """Of an epoch."""


def try_layers(
    config: Mapping[str, Any],
    options: TrainConfig,
    items: Sequence[Any],
    layers: int,
    *,
    keep_packed: bool,
    evaluated: bool,
    teacher: Mapping[str, Any] | None = None,
) -> Trial:
    """Take UPDATES updates over the largest micro-batch of `items`, on `layers` layers; mlx's RNG is reseeded.

    `options.num_layers`, where it is set, is how many of these are trained. The peak of the process is reset.
    """
    mx.random.seed(options.seed)
    facts = shallow(config, layers)
    model = blank(facts, keep_packed=keep_packed)
    guide = blank(shallow(teacher, 1), keep_packed=False) if teacher else None
    mx.eval(model.parameters(), guide.parameters() if guide else {})
    before = _settled()
    methods.apply(model, options.method_options)
    mx.eval(model.parameters())
    packed = objectives.is_packed(options, model, facts, items)
    batches = objectives.batches_of(items, options, packed=packed)
    sizes = _Sizes(items, batches)
    plan = batches.plan(0, 0, 1)
    micros = [micro for update in plan for micro in update]
    micro = _largest(batches, sizes, options)
    loss = objectives.build_loss(options, guide)
    held = Gradients(model, loss, batches, Ranks(None), Interrupt())
    steps = min(2, options.grad_accumulation_steps) if not packed else 2
    scope = recomputed(model) if options.grad_checkpointing else contextlib.nullcontext()
    model.train()
    with scope, runtime.least_memory():
        peaks, seconds = _updates(model, options, held, [micro] * steps)
    evaluation = 0
    if evaluated:
        model.eval()
        with runtime.least_memory():
            evaluation = min(_evaluated(lambda: loss(model, batches.batch(micro))) for _ in range(UPDATES - 1))
    trained: Any = tree_flatten(model.trainable_parameters())
    return Trial(
        layers=layers,
        gradients=peaks[0] - before,
        update=peaks[1] - before,
        evaluation=max(0, evaluation - before),
        trained=sum(array.size for _, array in trained),
        seconds=seconds / steps,
        tokens=sizes.tokens(micro),
        micro_batches=len(micros),
        epoch_tokens=sum(map(sizes.tokens, micros)),
        updates=len(plan),
    )


def _evaluated(make: Callable[[], Any]) -> int:
    """Bytes at the peak."""
    mx.reset_peak_memory()
    mx.eval(make())
    return mx.get_peak_memory()


def _settled() -> int:
    """Bytes in use, with nothing left over."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def _updates(
    model: nn.Module, options: TrainConfig, held: Gradients, update: list[Micro]
) -> tuple[tuple[int, int], float]:
    """As the trainer takes them; (peaks of gradients and of the optimizer), seconds of the quickest one's gradients.

    From the second on the optimizer's state is there. What comes on top is how far mlx happened to run ahead, so the
    lowest of several is what is needed.
    """
    optimizer = build_optimizer(options)
    found: list[tuple[int, int]] = []
    seconds = math.inf
    for _ in range(UPDATES):
        mx.reset_peak_memory()
        began = time.perf_counter()
        sums = held.sums(update)
        seconds = min(seconds, time.perf_counter() - began)
        first = mx.get_peak_memory()
        mx.reset_peak_memory()
        gradients = {name: value / sums.count for name, value in sums.gradients.items()}
        norm: Any = global_norm(gradients).item()
        if options.max_grad_norm is not None:
            gradients = clip(gradients, float(norm), options.max_grad_norm)
        optimizer.update(model, tree_unflatten(list(gradients.items())))
        mx.eval(model.trainable_parameters(), optimizer.state)
        found.append((first, mx.get_peak_memory()))
        del sums, gradients
    # DoRA's first gradients take more than all later ones.
    first = max(found[0][0], min(first for first, _ in found[1:]))
    return (first, min(second for _, second in found)), seconds


class _Sizes:
    """Micro-batches by their shapes, without making them."""

    def __init__(self, items: Sequence[Any], batches: UnitBatches) -> None:
        self._units = [[len(example.token_ids) for example in unit] for unit in objectives.units_of(items)]
        self._packed = batches.packed

    def rows(self, micro: Micro) -> list[list[int]]:
        """The lengths that stand in each row."""
        if self._packed:
            return [[length for unit in row for length in self._units[unit]] for row in micro]
        return [[length] for row in micro for unit in row for length in self._units[unit]]

    def tokens(self, micro: Micro) -> int:
        rows = self.rows(micro)
        return len(rows) * -(-max(sum(row) for row in rows) // WIDTH_STEP) * WIDTH_STEP

    def order(self, micro: Micro) -> tuple[int, int]:
        """Most tokens, then most squared lengths: attention's part."""
        return self.tokens(micro), sum(length**2 for row in self.rows(micro) for length in row)


def _largest(batches: UnitBatches, sizes: _Sizes, options: TrainConfig) -> Micro:
    epochs = range(min(PLANNED_EPOCHS, options.epochs or PLANNED_EPOCHS) if batches.packed else 1)
    return max((micro for epoch in epochs for update in batches.plan(epoch, 0, 1) for micro in update), key=sizes.order)


def with_layers(options: TrainConfig, layers: int) -> TrainConfig:
    """The same with at most that many layers trained."""
    wanted = options.num_layers
    return options if wanted is None or wanted <= layers else replace(options, num_layers=layers)
