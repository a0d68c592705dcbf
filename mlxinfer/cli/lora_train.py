"""`mlxinfer lora train`: rows in, an adapter out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output, training
from mlxinfer.lora.job import OPTIONS

if TYPE_CHECKING:
    from mlxinfer.lora.callbacks import Callback
    from mlxinfer.lora.history import History
    from mlxinfer.lora.job import Opened

FLAGS = {name: option for name, option in OPTIONS.by_name.items() if name not in ("model", "template_kwargs")}


@click.command(
    "train",
    epilog=options.example(
        "mlxinfer lora train smollm2-135m --data rows.jsonl",
        "mlxinfer lora train org/name --data ./data --method dora --rank 16 --epochs 2 --output ./adapter",
        "mlxinfer lora train --config run.toml --resume",
    ),
)
@click.argument("model", required=False, type=options.ModelName())
@click.option("--config", type=click.Path(path_type=Path), help="Read options from a .toml or .yaml file; flags win.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the adapter's folder, bit for bit.")
@click.option("--tensorboard", type=click.Path(path_type=Path), metavar="FOLDER", help="Write scalars for TensorBoard.")
@click.option("--wandb", metavar="PROJECT", help="Report to Weights & Biases.")
@training.flags(FLAGS)
@options.json_option
def train(
    model: str | None,
    config: Path | None,
    resume: bool,
    tensorboard: Path | None,
    wandb: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Train an adapter for MODEL on rows of --data.

    Every row is read and checked before the model loads. Ctrl-C leaves a checkpoint; --resume goes on from it.
    """
    from mlxinfer.lora import job
    from mlxinfer.lora.options import read_file

    asked = (read_file(config) if config else {}) | training.given(values | {"model": model})
    plan = job.plan_of(asked, str(config) if config else "")
    settings = options.settings_of()
    group = training.group_of_ranks()
    find = training.base_of(settings)
    opened = job.open_run(plan, settings, resolve=find)
    first = group is None or group.rank() == 0
    if first:
        training.say_rows(opened.datasets)
        if plan.job.valid_fraction and opened.valid is not None:
            output.say(f"Held out: {len(opened.valid.items):,} of these rows, to evaluate on", dim=True)
    told = [training.shown(), *_reporters(tensorboard, wandb)] if first else []
    try:
        history = job.run(opened, settings, resume=resume, group=group, callbacks=told, resolve=find)
    except KeyboardInterrupt:
        if first and (plan.job.folder / "checkpoints").is_dir():
            output.say(f"Stopped. {plan.job.folder} holds a checkpoint; the same command with --resume goes on.")
        raise
    if first:
        _say(opened, history, as_json=as_json)


def _reporters(tensorboard: Path | None, wandb: str | None) -> list[Callback]:
    from mlxinfer.lora.callbacks import TensorBoard, Wandb

    return [*([TensorBoard(tensorboard)] if tensorboard else []), *([Wandb(wandb)] if wandb else [])]


def _say(opened: Opened, history: History, *, as_json: bool) -> None:
    folder = opened.plan.job.folder
    if as_json:
        evaluations = history.curve("loss", "evaluation")
        output.emit_json(
            {
                "path": str(folder),
                "updates": history.records[-1]["update"] if history.records else 0,
                "loss": history.losses[-1] if history.losses else None,
                "best_loss": history.best_loss,
                "evaluations": evaluations,
                "stopped_early": history.stopped_early,
                "rows": [
                    {"rows": d.rows, "trained": d.trained, "truncated": d.truncated, "dropped": len(d.dropped)}
                    for d in opened.datasets
                ],
                "trained_rows": len(opened.rows.items),
                "held_out_rows": len(opened.valid.items) if opened.valid else 0,
                "packed": history.facts["packed"],
                "digest": history.digest,
            }
        )
        return
    click.echo(str(folder))
    output.say(f"Chat with it: mlxinfer run {opened.plan.job.model} --adapter {folder}", dim=True)
