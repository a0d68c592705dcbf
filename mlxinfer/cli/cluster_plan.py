"""`mlxinfer cluster plan`: how a model would be spread, without loading it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import clusters, options, output

if TYPE_CHECKING:
    from pathlib import Path


@click.command("plan", epilog=options.example("mlxinfer cluster plan ./my-model --objective throughput"))
@click.argument("model", type=options.ModelName())
@clusters.cluster_option
@clusters.planning_options
@options.json_option
def plan(model: str, file: Path, ctx: int, objective: Any, kinds: tuple[str, ...], wifi: bool, as_json: bool) -> None:
    """Predict speed and memory of MODEL over the machines of the cluster: alone, split by heads, by layers, by both.

    Nothing is loaded. A way that there isn't says why.
    """
    from mlxinfer.distributed import cluster_file, planning
    from mlxinfer.formats.files import read_json_object

    folder = clusters.folder_of(model, options.settings_of())
    config = read_json_object(folder / "config.json") or {}
    found = planning.plan(
        cluster_file.read(file), config, name=folder.name, context=ctx, objective=objective, wifi=wifi
    )
    if as_json:
        output.emit_json(dataclasses.asdict(found))
    else:
        clusters.show(found, frozenset(kinds))
