"""What a run will take, before its weights are loaded: peak memory, time, and what to change where it won't fit.

Two runs over a few layers (probe.py) give what one more layer costs; the rest is counted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer import runtime
from mlxinfer.engine.blank import hidden_size, num_layers
from mlxinfer.engine.blank import weights_bytes as weights_bytes_of
from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora import objectives, probe
from mlxinfer.lora.base import PLAIN_SHARE
from mlxinfer.lora.types import Example, Judged, Pair
from mlxinfer.zoo.files import human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlxinfer.lora.config import TrainConfig
    from mlxinfer.lora.probe import Trial

FEW, MORE = 3, 6
"""Layers of the two trials."""
MARGIN = 0.09
"""Of what isn't weights. The trainer lets mlx run ahead by a twentieth of it, and what a layer costs is measured on a
few."""
FIXED_BYTES = 4 << 20
"""Never left out: what a run allocates besides."""
OPTIMIZER_COPIES = {"adamw": 2, "adafactor": 1, "muon": 1, "sgd": 1}
"""Float32 numbers that an optimizer keeps of each trained one, at most."""
HEADROOM = 0.1
"""Of the machine's memory that a run should leave alone."""
TIME_RANGE = (0.7, 1.6)
"""Of the trials' seconds. A guess for an otherwise idle machine; a busy one, or one that throttles, takes longer."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes at the peak, by what they are for, and seconds."""

    weights: int
    """Of the base, and of the teacher."""
    trained: int
    """Adapters or trained weights, the optimizer's state, and sums of gradients."""
    activations: int
    """What is kept for the way back, and what is made on it."""
    seconds: tuple[float, float]
    """Of the whole run: at least, at most. Evaluations, samples and checkpoints are left out."""
    updates: int

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.weights + self.trained + self.activations


@dataclass(frozen=True, slots=True)
class Change:
    """One more option to set, the ones before it kept, and what the run needs then."""

    options: dict[str, Any]
    need: Need


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs, what there is, and what to change."""

    need: Need
    memory: int
    """Bytes that the machine can give."""
    changes: tuple[Change, ...] = ()
    """In order of what they cost, up to the first that fits; () where the run fits as it is."""

    @property
    def fits(self) -> bool:
        return _fits(self.need, self.memory)

    def to_json(self) -> dict[str, Any]:
        """All of it in bytes and seconds."""
        return {
            "fits": self.fits,
            "memory_bytes": self.memory,
            **_told(self.need),
            "changes": [{"set": change.options, **_told(change.need)} for change in self.changes],
        }

    def text(self) -> str:
        """A few lines for a terminal."""
        need = self.need
        verdict = "fits" if self.fits else "does not fit"
        least, most = map(human_seconds, need.seconds)
        lines = [
            f"peak memory   {human_bytes(need.peak)} of {human_bytes(self.memory)}: {verdict}",
            f"  base        {human_bytes(need.weights)}",
            f"  trained     {human_bytes(need.trained)} (weights, optimizer, gradients)",
            f"  activations {human_bytes(need.activations)}",
            f"time          {least} to {most}, {need.updates:,} updates",
        ]
        for change in self.changes:
            what = ", ".join(f"{name} {_value(value)}" for name, value in change.options.items())
            verdict = "fits" if _fits(change.need, self.memory) else "does not fit"
            most = human_seconds(change.need.seconds[1])
            lines.append(f"with {what}: {human_bytes(change.need.peak)}, {most} at most: {verdict}")
        if not self.fits and not (self.changes and _fits(self.changes[-1].need, self.memory)):
            lines.append("nothing here makes it fit: take a smaller base, or a packed one")
        return "\n".join(lines)


def _told(need: Need) -> dict[str, Any]:
    return {
        "peak_bytes": need.peak,
        "weights_bytes": need.weights,
        "trained_bytes": need.trained,
        "activations_bytes": need.activations,
        "seconds": list(need.seconds),
        "updates": need.updates,
    }


def plan(
    config: Mapping[str, Any],
    options: TrainConfig,
    items: Sequence[Any],
    memory: int,
    *,
    weights_bytes: int | None = None,
    evaluated: bool = False,
    teacher: Mapping[str, Any] | None = None,
    advise: bool = True,
) -> Plan:
    """Of a run of `options` over `items` on a base with this config.json, where `memory` bytes can be had.

    `weights_bytes` is what the base takes once it is loaded, where the files tell; `evaluated`: rows are held out;
    `teacher` is the config.json of distillation's. Runs a few layers with random weights twice for each prediction, so
    it takes some seconds, the memory of MORE layers, and resets mlx's peak and RNG. Raises InvalidRequestError for what
    cannot be trained, UnsupportedModelError for a model that cannot be built.
    """
    if not items:
        raise InvalidRequestError("there is no row to plan for")
    run = _Run(config, items, weights_bytes, evaluated, teacher, memory)
    need = run.need(options)
    changes: list[Change] = []
    if advise and not _fits(need, memory):
        for changed, told in _cheaper(options, config, items):
            changes.append(Change(told, run.need(changed, _cut(items, changed.max_tokens))))
            if _fits(changes[-1].need, memory):
                break
    return Plan(need, memory, tuple(changes))


def items_of(lengths: Sequence[int], loss: str, prompt: float = 0.0) -> tuple[Any, ...]:
    """Rows of made-up tokens for `loss`, where lengths are all that is known; `prompt` is the part not supervised."""

    def example(length: int) -> Example:
        learnt = tuple(at >= max(1, int(length * prompt)) for at in range(length))
        return Example(tuple(at % 16 + 3 for at in range(length)), learnt, "planned")

    made = [example(length) for length in lengths]
    if loss in ("dpo", "orpo", "simpo"):
        return tuple(Pair(one, one) for one in made)
    return tuple(Judged(one, number % 2 == 0) for number, one in enumerate(made)) if loss == "kto" else tuple(made)


@dataclass(frozen=True, slots=True)
class _Run:
    """What stays the same while options change."""

    config: Mapping[str, Any]
    items: Sequence[Any]
    weights_bytes: int | None
    evaluated: bool
    teacher: Mapping[str, Any] | None
    memory: int

    def need(self, options: TrainConfig, items: Sequence[Any] | None = None) -> Need:
        packed = self._stays_packed(options)
        layers = num_layers(self.config)
        few, more = self._trials(options, items or self.items, layers, packed)
        trained_layers = min(layers, options.num_layers or layers)
        added = trained_layers - min(more.layers, options.num_layers or more.layers)
        step = max(1, more.layers - few.layers)
        trained = more.trained + (more.trained - few.trained) * added // step
        held = trained * 4 * (OPTIMIZER_COPIES[options.optimizer] + 2)
        # With each layer its optimizer's state, its sums and its gradients come along, whatever hides them in a trial.
        least = (more.trained - few.trained) * 4 * (OPTIMIZER_COPIES[options.optimizer] + 2) / step
        if options.grad_checkpointing:
            # So does what goes into it: a trial's peaks are off by about as much.
            least += more.tokens * hidden_size(self.config) * (4 if runtime.on_cpu() else 2)
        peak = max(
            _extended(few.gradients, more.gradients, step, added, least),
            _extended(few.update, more.update, step, added, least),
            _extended(self._evaluation(options, few), self._evaluation(options, more), step, added, 0.0),
        )
        peak = int(peak * (1 + MARGIN)) + FIXED_BYTES
        held = min(held, peak)
        base = self.weights_bytes or weights_bytes_of(self.config, keep_packed=packed)
        if self.weights_bytes and not packed and self.config.get("quantization"):
            base = weights_bytes_of(self.config, keep_packed=False)
        if self.teacher:
            base += weights_bytes_of(self.teacher, keep_packed=False)
        return Need(base, held, peak - held, *self._time(options, few, more, layers))

    def _evaluation(self, options: TrainConfig, trial: Trial) -> int:
        """With the optimizer's state, which a trial has let go by then."""
        return trial.evaluation + 4 * trial.trained * OPTIMIZER_COPIES[options.optimizer]

    def _stays_packed(self, options: TrainConfig) -> bool:
        """As a run loads its base: on a CPU a packed one is unpacked for adapters where there is room."""
        if not self.config.get("quantization"):
            return False
        if options.method == "qlora" or not runtime.on_cpu():
            return True
        return weights_bytes_of(self.config, keep_packed=False) > PLAIN_SHARE * self.memory

    def _trials(self, options: TrainConfig, items: Sequence[Any], layers: int, packed: bool) -> tuple[Trial, Trial]:
        """Over FEW and MORE layers, or twice the same one over all where there are no more."""
        some = {"keep_packed": packed, "evaluated": self.evaluated, "teacher": self.teacher}

        def over(count: int) -> Trial:
            return probe.try_layers(self.config, probe.with_layers(options, count), items, count, **some)

        more = over(min(MORE, layers))
        return (over(FEW), more) if layers > MORE else (more, more)

    def _time(self, options: TrainConfig, few: Trial, more: Trial, layers: int) -> tuple[tuple[float, float], int]:
        each = (more.seconds - few.seconds) / max(1, more.layers - few.layers)
        # Another process may have slowed one of them down; a layer takes no more than its share of all.
        each = min(max(0.0, each), more.seconds / more.layers)
        seconds = more.seconds + each * (layers - more.layers)
        epochs = options.epochs or (1 if options.updates is None else None)
        planned = more.updates * epochs if epochs else options.updates or 0
        updates = min(planned, options.updates or planned)
        whole = seconds * more.epoch_tokens / more.tokens * updates / more.updates
        return (whole * TIME_RANGE[0], whole * TIME_RANGE[1]), updates


def _extended(few: int, more: int, step: int, added: int, least: float) -> float:
    return more + added * max((more - few) / step, least)


def _fits(need: Need, memory: int) -> bool:
    return need.peak <= memory * (1 - HEADROOM)


def _cheaper(
    options: TrainConfig, config: Mapping[str, Any], items: Sequence[Any]
) -> Iterator[tuple[TrainConfig, dict[str, Any]]]:
    """Options that need less and less, and what was set: time first, then what is learnt."""
    told: dict[str, Any] = {}

    def with_more(**more: Any) -> tuple[TrainConfig, dict[str, Any]]:
        nonlocal options
        options = dataclasses.replace(options, **more)
        told.update(more)
        return options, dict(told)

    if not options.grad_checkpointing:
        yield with_more(grad_checkpointing=True)
    if options.micro_batch_size > 1:
        rows = options.micro_batch_size * options.grad_accumulation_steps
        yield with_more(micro_batch_size=1, grad_accumulation_steps=rows)
    if options.method in ("lora", "rslora") and config.get("quantization"):
        yield with_more(method="qlora")
    longest = max(len(example.token_ids) for unit in objectives.units_of(items) for example in unit)
    if min(longest, options.max_tokens) > SHORT_ROW:
        yield with_more(max_tokens=max(SHORT_ROW, min(longest, options.max_tokens) // 2))
    layers = num_layers(config)
    if (options.num_layers or layers) > 1:
        yield with_more(num_layers=max(1, (options.num_layers or layers) // 4))


SHORT_ROW = 128
"""Shorter rows aren't proposed."""


def _cut(items: Sequence[Any], limit: int) -> list[Any]:
    """Rows as they would be read with a lower limit."""

    def example(one: Example) -> Example:
        kept = one.supervised[:limit]
        return (
            one if len(one.token_ids) <= limit else Example(one.token_ids[:limit], (*kept[:-1], True), one.where, True)
        )

    def item(one: Any) -> Any:
        if isinstance(one, Pair):
            return Pair(example(one.chosen), example(one.rejected))
        return Judged(example(one.example), one.wanted) if isinstance(one, Judged) else example(one)

    return [item(one) for one in items]


def _value(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
