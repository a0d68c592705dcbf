"""`mlxinfer lora plan`: what a run would take, before its model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output, training
from mlxinfer.lora.job import OPTIONS

if TYPE_CHECKING:
    from mlxinfer.lora.job import Opened

FLAGS = {name: option for name, option in OPTIONS.by_name.items() if name not in ("model", "template_kwargs")}
REFUSED = 1


@click.command("plan", epilog=options.example("mlxinfer lora plan smollm2-135m --data rows.jsonl --micro-batch-size 8"))
@click.argument("model", required=False, type=options.ModelName())
@click.option("--config", type=click.Path(path_type=Path), help="Read options from a .toml or .yaml file; flags win.")
@training.flags(FLAGS)
@options.json_option
def plan(model: str | None, config: Path | None, as_json: bool, **values: Any) -> None:
    """Predict the peak memory and the time of `lora train` with the same options, and what would make it fit.

    A few layers with random weights do two of the run's own updates; the model's weights aren't loaded. Ends with 1
    where the run would not fit.
    """
    from mlxinfer import runtime
    from mlxinfer.lora import job, planner
    from mlxinfer.lora.options import read_file

    asked = (read_file(config) if config else {}) | training.given(values | {"model": model})
    wanted = job.plan_of(asked, str(config) if config else "")
    find = training.base_of(options.settings_of())
    opened = job.open_run(wanted, options.settings_of(), resolve=find)
    training.say_rows(opened.datasets)
    made = planner.plan(
        opened.base.config,
        wanted.train,
        opened.rows.items,
        runtime.memory().budget,
        weights_bytes=_packed_bytes(opened),
        evaluated=opened.valid is not None,
        teacher=find(wanted.job.teacher).config if wanted.job.teacher else None,
    )
    if as_json:
        output.emit_json(made.to_json())
    else:
        click.echo(made.text())
    if not made.fits:
        click.get_current_context().exit(REFUSED)


def _packed_bytes(opened: Opened) -> int | None:
    """What the weights of a base that stays packed take; None for one whose floats count."""
    return opened.base.prepared.needed_bytes if opened.plan.train.method == "qlora" else None
