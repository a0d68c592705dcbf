"""`mlxinfer cluster facts`: what `cluster init` asks a machine."""

from __future__ import annotations

import click

from mlxinfer.cli import options, output


@click.command("facts", epilog=options.example("mlxinfer cluster facts --json"))
@options.json_option
def facts(as_json: bool) -> None:
    """What this machine would be in a cluster: memory, its bandwidth, networks, versions."""
    from mlxinfer.distributed import interfaces, machine

    found = machine.measured()
    if as_json:
        output.emit_json(found)
        return
    for name in ("name", "chip", "os", "memory_gb", "bandwidth_gb_s", "bandwidth_source", "version", "mlx", "mlx-lm"):
        click.echo(f"{name:<17} {found[name]}")
    for one in interfaces.of_json(found["interfaces"]):
        click.echo(f"{one.name:<17} {one.kind}, {', '.join(one.networks)}")
