"""`mlxinfer lora fuse`: an adapter made part of its base, as a model folder of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output, progress, training
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.lora.changes import Fused
    from mlxinfer.lora.fuse import FuseOptions

REFUSED = 1
SHOWN = 20


@click.command(
    "fuse",
    epilog=options.example(
        "mlxinfer lora fuse ./base ./adapter ./fused",
        "mlxinfer lora fuse ./base-4bit ./adapter ./fused --dequantize adapted",
        "mlxinfer lora fuse ./base-4bit ./adapter ./fused --bits 8 --dry-run",
    ),
)
@training.between_folders
@click.option(
    "--dequantize",
    type=click.Choice(["none", "adapted", "all"]),
    default="none",
    help="Layers that become floats [none].",
)
@click.option("--bits", type=int, metavar="N", help="Of adapted layers that are packed [as they were].")
@click.option("--group-size", type=int, metavar="N", help="Weights that share a scale, with --bits or --mode.")
@click.option("--mode", type=click.Choice(["affine", "mxfp4", "mxfp8", "nvfp4"]), help="Kind of packing [as it was].")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of floats [as they are].")
@click.option("--force", is_flag=True, help="Write it even where layers lose more than a tenth of the adapter.")
@click.option("--dry-run", is_flag=True, help="Say what each layer would keep, and write nothing.")
@options.json_option
def fuse(model: str, adapter: Path, destination: Path, dry_run: bool, as_json: bool, **asked: Any) -> None:
    """Write MODEL, a folder in mlx-lm's layout, with ADAPTER in its weights as DST, which must not exist.

    Of every layer it is measured how much of the adapter's change the stored weights keep; where that is less than
    90 %, nothing is written. DST appears whole or not at all.
    """
    from mlxinfer import zoo
    from mlxinfer.lora import fuse as fusing
    from mlxinfer.types import ProgressEvent

    chosen = _chosen(**asked)
    files = zoo.resolve(model, options.settings_of(), fetch=False)
    if not files.path.is_dir():
        raise UnsupportedModelError(f"{files.path} is no folder in mlx-lm's layout; mlxinfer convert makes one of it")
    with progress.reporting() as report:

        def written(done: int, total: int) -> None:
            report(ProgressEvent("write", done, total, destination.name))

        fused = fusing.fuse(files.path, adapter, destination, chosen, dry_run=dry_run, report=written)
    refused = bool(fused.lost) and not chosen.force
    if as_json:
        said = {"path": str(fused.path), "written": not dry_run, "refused": refused}
        output.emit_json(said | fusing.as_dict(fused))
    else:
        _say(fused, dry_run=dry_run)
    if refused:
        click.get_current_context().exit(REFUSED)


def _chosen(
    *, dequantize: Any, bits: int | None, group_size: int | None, mode: str | None, dtype: str | None, force: bool
) -> FuseOptions:
    from mlxinfer.convert.quantizing import packing_of
    from mlxinfer.lora.fuse import FuseOptions

    if group_size and not bits and not mode:
        raise click.UsageError("--group-size goes with --bits or --mode")
    packing = packing_of(bits, group_size, mode) if bits or mode else None
    return FuseOptions(dequantize, packing, dtype, force)


def _say(fused: Fused, *, dry_run: bool) -> None:
    from mlxinfer.convert.quantizing import describe
    from mlxinfer.zoo.files import human_bytes

    worst = sorted(fused.layers, key=lambda kept: kept.share)[:SHOWN]
    rows = [
        (k.name, describe(k.form.packing), f"{k.size:.2e}", f"{k.cosine:.4f}", f"{k.norm:.3f}", f"{k.share:.1%}")
        for k in worst
    ]
    click.echo(output.columns(("LAYER", "STORED", "CHANGE", "COSINE", "SIZE", "KEPT"), rows))
    if len(fused.layers) > SHOWN:
        output.say(f"These keep least; {len(fused.layers) - SHOWN} more are in fusion.json.", dim=True)
    if fused.lost:
        output.say(f"{len(fused.lost)} of {len(fused.layers)} layers keep less than 90 % of the adapter.")
    output.say(f"{fused.path} {'would be' if dry_run else 'is'} {human_bytes(fused.nbytes)}.", dim=True)
