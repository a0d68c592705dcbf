"""`mlxinfer export`: an mlx-lm folder as safetensors for transformers or as GGUF for llama.cpp."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output, progress
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from mlxinfer.convert.export.writing import Outcome
    from mlxinfer.types import Progress

DTYPES = ("float32", "float16", "bfloat16", "q8_0")


@click.command(
    "export",
    epilog=options.example(
        "mlxinfer export ./my-model my-model.gguf --to gguf",
        "mlxinfer export ./my-model ./my-model-hf --to hf --dtype float32",
        "mlxinfer export ./my-model my-model.gguf --to gguf --dry-run",
    ),
)
@click.argument("model", type=options.InstalledName(), metavar="SRC")
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST")
@click.option(
    "--to",
    "form",
    type=click.Choice(["hf", "gguf"]),
    help="hf: a folder for transformers; gguf: a file for llama.cpp [gguf where DST ends in .gguf, else hf].",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Of hf, all weights; of gguf, the matrices that are not packed, q8_0 too [the model's own].",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@options.json_option
def export(model: str, destination: Path, form: str | None, dtype: str | None, dry_run: bool, as_json: bool) -> None:
    """Write SRC, a model in mlx-lm's layout, as DST, which must not exist.

    DST appears when all of it is written, or not at all. What is printed says of every kind of tensor whether its
    values are the model's (exact), rounded (near) or computed anew (requantized).
    """
    from mlxinfer import zoo

    form = form or ("gguf" if destination.suffix == ".gguf" else "hf")
    if form == "hf" and dtype == "q8_0":
        raise click.UsageError("q8_0 is a type of GGUF; --to hf takes float32, float16 and bfloat16")
    files = zoo.resolve(model, options.settings_of(), fetch=False)
    if not files.path.is_dir():
        raise UnsupportedModelError(f"{files.path} is not a folder in mlx-lm's layout; convert it to one first")
    with progress.reporting() as report:
        outcome = _export(files.path, destination, form, dtype, dry_run, report)
    if as_json:
        output.emit_json(_as_json(outcome, dry_run))
        return
    click.echo(_table(outcome))
    for note in outcome.notes:
        output.say(f"Note: {note}.")
    output.say(_verdict(outcome, dry_run), dim=True)


def _export(folder: Path, destination: Path, form: str, dtype: str | None, dry_run: bool, report: Progress) -> Outcome:
    from mlxinfer.types import ProgressEvent

    def written(done: int, total: int) -> None:
        report(ProgressEvent("write", done, total, destination.name))

    if form == "hf":
        from mlxinfer.convert.export.huggingface import export_huggingface

        return export_huggingface(folder, destination, dtype=dtype, dry_run=dry_run, report=written)
    from mlxinfer.convert.export.gguf import export_gguf

    return export_gguf(folder, destination, floats=dtype, dry_run=dry_run, report=written)


def _table(outcome: Outcome) -> str:
    """One row for each way in which tensors were handled."""
    from mlxinfer.zoo.files import human_bytes

    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for tensor in outcome.outputs:
        key = (tensor.type, tensor.handling, tensor.note.partition(" by up to")[0])
        counts[key] += 1
        sizes[key] += tensor.nbytes
    rows = [(k[0], k[1], str(counts[k]), human_bytes(sizes[k]), k[2]) for k in sorted(counts)]
    return output.columns(("type", "values", "tensors", "size", "how"), rows)


def _verdict(outcome: Outcome, dry_run: bool) -> str:
    from mlxinfer.zoo.files import human_bytes

    what = "would be" if dry_run else "is"
    return f"{outcome.path} {what} {human_bytes(outcome.nbytes)} of {outcome.architecture}."


def _as_json(outcome: Outcome, dry_run: bool) -> dict[str, Any]:
    return {
        "path": str(outcome.path),
        "format": outcome.format,
        "architecture": outcome.architecture,
        "size_bytes": outcome.nbytes,
        "written": not dry_run,
        "handling": dict(Counter(tensor.handling for tensor in outcome.outputs)),
        "notes": list(outcome.notes),
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": tensor.type,
                "bytes": tensor.nbytes,
                "sources": list(tensor.sources),
                "handling": tensor.handling,
                "note": tensor.note,
            }
            for tensor in outcome.outputs
        ],
    }
