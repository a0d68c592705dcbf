"""`mlxinfer lora import`: an adapter of PEFT's or llama.cpp's as one of mlx-lm's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlxinfer.cli import options, training
from mlxinfer.cli.lora_export import base_of, say

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "import",
    epilog=options.example(
        "mlxinfer lora import org/base ./adapter-peft ./adapter",
        "mlxinfer lora import ./base adapter.gguf ./adapter",
    ),
)
@training.between_folders
@click.option("--base-name", metavar="ID", help="What the base is published under [MODEL if it is org/name].")
@options.json_option
def import_adapter(model: str, adapter: Path, destination: Path, base_name: str | None, as_json: bool) -> None:
    """Write ADAPTER, PEFT's folder or llama.cpp's .gguf file, as the folder DST, which must not exist.

    MODEL is the base that it is for. DST can be used with --adapter, trained further, or fused.
    """
    from mlxinfer.lora import exchange

    base, name = base_of(model)
    say(exchange.import_adapter(base, adapter, destination, base_name=base_name or name), as_json=as_json)
