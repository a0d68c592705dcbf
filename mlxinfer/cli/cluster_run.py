"""`mlxinfer cluster run`: any program over the machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlxinfer.cli import clusters, options, output

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=options.example(
        "mlxinfer cluster run train.py --steps 100",
        "mlxinfer cluster run -- -m mlxinfer lora train smollm2-135m --data rows.jsonl --output adapter",
    ),
)
@clusters.cluster_option
@click.option("--wifi", is_flag=True, help="Take Wi-Fi where nothing else joins two machines.")
@click.option("--port", type=click.IntRange(1024, 65000), default=32323, help="The first port of the ring [32323].")
@click.option("--python", default="", metavar="PROGRAM", help="Python on every machine [this one's path].")
@options.json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context, file: Path, wifi: bool, port: int, python: str, as_json: bool, command: tuple[str, ...]
) -> None:
    """Run SCRIPT, or -m MODULE, with its arguments as one rank on each machine, by mlx.launch.

    The other machines need `ssh` in the cluster's file, and the script at the same path. `mx.distributed.init()` in it
    gives the group. It ends with 0 if every rank did, else with the code of one that didn't; --json prints that code
    after what the ranks print.
    """
    from mlxinfer.distributed import cluster_file, launching

    code = launching.run(cluster_file.read(file), command, wifi=wifi, port=port, python=python)
    if as_json:
        output.emit_json({"exit_code": code})
    ctx.exit(code)
