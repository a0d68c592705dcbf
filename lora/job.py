"""A whole training run by name: model, data and options in, an adapter folder out. The CLI and notebooks call it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora import objectives
from mlxinfer.lora.base import open_base
from mlxinfer.lora.config import TrainConfig
from mlxinfer.lora.data import DataOptions, read_examples
from mlxinfer.lora.data.files import split_files
from mlxinfer.lora.options import Options, options_of
from mlxinfer.lora.runs import check_folder
from mlxinfer.lora.trainer import train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import mlx.core as mx

    from mlxinfer.config import Settings
    from mlxinfer.lora.base import Base
    from mlxinfer.lora.callbacks import Callback
    from mlxinfer.lora.data import Dataset
    from mlxinfer.lora.history import History
    from mlxinfer.types import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a run reads and writes."""

    model: Annotated[str, "The base: an alias, a hub id, a folder or a .gguf file."]
    data: Annotated[tuple[str, ...], "A JSONL, CSV or Parquet file, a folder of them, or a data set of the hub."]
    output: Annotated[str, "The adapter's folder [./NAME-lora]."] = ""
    valid: Annotated[tuple[str, ...], "Rows to evaluate on; without, those of the split 'valid' in a data folder."] = ()
    valid_fraction: Annotated[float, "Hold out this part of the rows to evaluate on."] = 0.0
    teacher: Annotated[str, "distill: the model to follow."] = ""

    def __post_init__(self) -> None:
        if not 0 <= self.valid_fraction < 1:
            message = f"valid_fraction is {self.valid_fraction}; it is at least 0 and below 1"
            raise InvalidRequestError(message, param="valid_fraction")
        if self.valid and self.valid_fraction:
            raise InvalidRequestError("valid and valid_fraction exclude each other", param="valid_fraction")

    @property
    def folder(self) -> Path:
        return Path(self.output or f"{Path(self.model).name.removesuffix('.gguf')}-lora")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was asked for, checked."""

    job: Job
    data: DataOptions
    train: TrainConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows without their counts."""

    items: tuple[Any, ...]


@dataclass(slots=True)
class Opened:
    """Rows that were read and a base whose files were checked; no array yet."""

    plan: Plan
    base: Base
    rows: Rows
    valid: Rows | None
    datasets: list[Dataset] = field(default_factory=list)


OPTIONS = Options(Job, DataOptions, TrainConfig)
"""Of a run: the CLI's flags, the file's keys, the Python arguments."""


def plan_of(values: Mapping[str, Any], source: str = "") -> Plan:
    """Raises InvalidRequestError that names the option, for one that is unknown, wrong, missing or without effect."""
    checked = OPTIONS.checked(values, source)
    for name in ("model", "data"):
        if not checked.get(name):
            raise InvalidRequestError(f"{source}: {name} is missing" if source else f"{name} is missing", param=name)
    plan = Plan(*(OPTIONS.build(kind, checked, source) for kind in (Job, DataOptions, TrainConfig)))
    if (plan.train.loss == "distill") != bool(plan.job.teacher):
        what = (
            "distill needs a teacher" if not plan.job.teacher else f"teacher has no effect with loss {plan.train.loss}"
        )
        raise InvalidRequestError(what, param="teacher")
    return plan


def open_run(
    plan: Plan,
    settings: Settings,
    *,
    resolve: Callable[[str], Base] | None = None,
    progress: Progress | None = None,
) -> Opened:
    """Read every row and check every file, before any weights load. Raises InvalidRequestError, ModelFileError, …"""
    job, config = plan.job, plan.train
    find = resolve or (lambda name: resolved(name, settings, progress))
    base = find(job.model)
    options = plan.data
    data = read_examples(list(job.data), base.tokenizer, options)
    objectives.check_rows(config, data.items)
    opened = Opened(plan, base, Rows(data.items), None, [data])
    if job.valid_fraction:
        opened.rows, opened.valid = held_out(data.items, job.valid_fraction, config.seed)
        return opened
    if sources := list(job.valid) or _with_valid(job.data):
        valid = read_examples(sources, base.tokenizer, options, split="valid")
        objectives.check_rows(config, valid.items)
        opened.valid = Rows(valid.items)
        opened.datasets.append(valid)
    return opened


def resolved(name: str, settings: Settings, progress: Progress | None = None) -> Base:
    """The base of a name. Raises ModelNotFoundError, OfflineError, DownloadError, ModelFileError, …"""
    from mlxinfer import zoo

    return open_base(zoo.resolve(name, settings, progress=progress))


def _with_valid(sources: Sequence[str]) -> list[str]:
    return [source for source in sources if Path(source).is_dir() and split_files(Path(source), "valid")]


def held_out(items: tuple[Any, ...], fraction: float, seed: int) -> tuple[Rows, Rows]:
    """(to train on, to evaluate on), by the seed. Raises InvalidRequestError where one of them would be empty."""
    count = round(len(items) * fraction)
    if not 0 < count < len(items):
        message = f"valid_fraction {fraction} of {len(items)} rows is {count}: one side would have none"
        raise InvalidRequestError(message, param="valid_fraction")
    chosen = set(np.random.default_rng([seed, len(items)]).permutation(len(items))[:count].tolist())
    kept = tuple(item for number, item in enumerate(items) if number not in chosen)
    return Rows(kept), Rows(tuple(items[number] for number in sorted(chosen)))


def run(
    opened: Opened,
    settings: Settings,
    *,
    resume: bool = False,
    group: mx.distributed.Group | None = None,
    callbacks: Sequence[Callback] = (),
    resolve: Callable[[str], Base] | None = None,
) -> History:
    """Load the model and train. Raises what `train` raises."""
    plan = opened.plan
    folder = plan.job.folder
    check_folder(folder, resume=resume)
    find = resolve or (lambda name: resolved(name, settings))
    model = opened.base.load(keep_packed=plan.train.method == "qlora")
    teacher = find(plan.job.teacher).load(keep_packed=False) if plan.job.teacher else None
    return train(
        model,
        opened.base.tokenizer,
        opened.rows,
        opened.valid,
        plan.train,
        group,
        callbacks,
        folder=folder,
        resume=resume,
        teacher=teacher,
        model_config=opened.base.config,
        extra={"model": plan.job.model, "mlxinfer": {"options": _told(plan)}},
    )


def _told(plan: Plan) -> dict[str, Any]:
    """The options that aren't their defaults, for the adapter's config: what can be read again."""
    values = {one: getattr(part, one) for part in (plan.job, plan.data, plan.train) for one in options_of(type(part))}
    del values["output"]
    given = {name: value for name, value in values.items() if value != OPTIONS.by_name[name].default}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def fine_tune(
    *,
    group: mx.distributed.Group | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    settings: Settings | None = None,
    **options: Any,
) -> History:
    """Train an adapter: `fine_tune(model="smollm2-135m", data="train.jsonl", output="adapter", epochs=2)`.

    `options` are those of `mlxinfer lora train` with underscores (fields of Job, DataOptions and TrainConfig). Returns
    the history, whose `plot()` draws it. Raises InvalidRequestError that names an option, or a row by file and line.
    """
    from mlxinfer.config import load_settings

    settings = settings or load_settings()
    opened = open_run(plan_of(options), settings)
    return run(opened, settings, resume=resume, group=group, callbacks=callbacks)
