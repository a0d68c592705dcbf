"""`mlxinfer lora export`: an adapter for PEFT or for llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output, training

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.lora.exchange import Exchanged


@click.command(
    "export",
    epilog=options.example(
        "mlxinfer lora export org/base ./adapter ./adapter-peft",
        "mlxinfer lora export ./base ./adapter adapter.gguf",
    ),
)
@training.between_folders
@click.option(
    "--to",
    "form",
    type=click.Choice(["peft", "gguf"]),
    help="peft: a folder for PEFT; gguf: a file for llama.cpp [gguf where DST ends in .gguf, else peft].",
)
@click.option("--base-name", metavar="ID", help="What the base is published under [MODEL if it is org/name].")
@options.json_option
def export(model: str, adapter: Path, destination: Path, form: Any, base_name: str | None, as_json: bool) -> None:
    """Write ADAPTER, a folder as training leaves it, for another program as DST, which must not exist.

    MODEL is the base that it was trained on; only its names and shapes are read.
    """
    from mlxinfer.lora.exchange import export_adapter

    base, name = base_of(model)
    form = form or ("gguf" if destination.suffix == ".gguf" else "peft")
    say(export_adapter(base, adapter, destination, form, base_name=base_name or name), as_json=as_json)


def base_of(model: str) -> tuple[Path, str]:
    """(folder or file, the hub id if the name is one)."""
    from mlxinfer import zoo
    from mlxinfer.zoo.names import parse_name

    files = zoo.resolve(model, options.settings_of(), fetch=False)
    return files.path, model if parse_name(model).kind == "hub" else ""


def say(done: Exchanged, *, as_json: bool) -> None:
    """What was written: the path on stdout, the rest on stderr."""
    from mlxinfer.zoo.files import human_bytes

    if as_json:
        output.emit_json(
            {
                "path": str(done.path),
                "format": done.form,
                "method": done.method,
                "rank": done.rank,
                "scale": done.scale,
                "layers": done.layers,
                "size_bytes": done.nbytes,
                "notes": list(done.notes),
            }
        )
        return
    click.echo(str(done.path))
    for note in done.notes:
        output.say(f"Note: {note}.")
    size = human_bytes(done.nbytes)
    output.say(f"{done.layers} layers, {done.method} of rank {done.rank}, scale {done.scale:.6g}, {size}.", dim=True)
