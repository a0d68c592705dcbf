"""Training as Python calls it: what was asked for is checked, then the loop runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora import checkpoint, objectives, runs
from mlxinfer.lora.config import TrainConfig
from mlxinfer.lora.loop import Run
from mlxinfer.lora.options import options_of
from mlxinfer.lora.parallel import Ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import mlx.core as mx
    import mlx.nn as nn

    from mlxinfer.lora.callbacks import Callback
    from mlxinfer.lora.history import History
    from mlxinfer.lora.types import Loss
    from mlxinfer.tokenizer import Tokenizer


class Rows(Protocol):
    """What a data set is to the trainer."""

    @property
    def items(self) -> Sequence[Any]: ...


def train(
    model: nn.Module,
    tokenizer: Tokenizer | None,
    train: Rows,
    valid: Rows | None,
    config: TrainConfig,
    group: mx.distributed.Group | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    folder: Path | None = None,
    resume: bool = False,
    loss: Loss | None = None,
    teacher: nn.Module | None = None,
    model_config: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> History:
    """Train `model` in place and return what happened.

    With `folder`, the adapter, the log and the checkpoints go there; with `resume`, its last checkpoint is where the
    run goes on, to the same bits. `loss` replaces the one that the config names; `teacher` is for distillation.
    `model_config` is the base's config.json, and `extra` are further keys of adapter_config.json. A model that has
    adapters already is trained on with these.

    Raises InvalidRequestError for what cannot be trained, TrainingError for a loss or a gradient that is no number, for
    ranks that differ and for a checkpoint that cannot be written. KeyboardInterrupt comes after a checkpoint.
    """
    if not train.items:
        raise InvalidRequestError("there is no row to train on")
    _check_effects(config, tokenizer, valid, folder, resume=resume)
    for rows in (train, valid):
        if rows is not None and loss is None:
            objectives.check_rows(config, rows.items)
    run = Run(model, tokenizer, config, Ranks(group), folder)
    run.extra = dict(extra or {})
    run.prepare(train.items, valid.items if valid else None, model_config or {}, loss, teacher)
    if folder is None:
        return run.go(callbacks)
    runs.check_folder(folder, resume=resume, param="folder")
    with contextlib.nullcontext() if run.ranks.rank else runs.alone(folder):
        run.restore(folder / checkpoint.FOLDER)
        return run.go(callbacks)


def _check_effects(
    config: TrainConfig, tokenizer: Tokenizer | None, valid: Rows | None, folder: Path | None, *, resume: bool
) -> None:
    """Refuse what was set and changes nothing in this run."""
    missing = "rows to evaluate on"
    for name, here, what in (
        ("eval_every", valid is not None, missing),
        ("sample_prompts", valid is not None, missing),
        ("sample_prompts", tokenizer is not None, "a tokenizer"),
        ("save_every", folder is not None, "a folder"),
        ("keep_checkpoints", folder is not None, "a folder"),
    ):
        if not here and getattr(config, name) != options_of(TrainConfig)[name].default:
            raise InvalidRequestError(f"{name} has no effect without {what}", param=name)
    if folder is None and resume:
        raise InvalidRequestError("resume needs a folder", param="folder")
    for prompt in config.sample_prompts:
        if tokenizer is not None and not tokenizer.encode(prompt):
            raise InvalidRequestError(
                f"sample_prompts: {prompt!r:.80} has no token to continue", param="sample_prompts"
            )
