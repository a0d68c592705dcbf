"""`mlxinfer cluster init`: a cluster.toml of machines that are named."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxinfer.cli import options, output

if TYPE_CHECKING:
    from mlxinfer.distributed.cluster_file import Node

GUESSED = {
    "thunderbolt5": (50.0, 6.0),
    "thunderbolt4": (300.0, 2.0),
    "ethernet": (100.0, 1.1),
    "wifi": (8000.0, 0.1),
    "loopback": (20.0, 2.0),
}
"""Latency in us and GB/s of a kind of link, until it is measured."""


@click.command(
    "init",
    epilog=options.example("mlxinfer cluster init --node studio=10.0.0.1:192:800 --node mini=10.0.0.2:64:273"),
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    required=True,
    metavar="NAME=HOST:GB:GB/S[:PORT]",
    help="A machine: its address, memory for models, memory bandwidth. The first one coordinates. May be repeated.",
)
@click.option(
    "--link", type=click.Choice(sorted(GUESSED)), default="ethernet", help="What joins the machines [ethernet]."
)
@click.option("-o", "--output", "file", type=click.Path(path_type=Path), default=Path("cluster.toml"))
@click.option("--overwrite", is_flag=True, help="Replace a file that exists; its secret goes with it.")
@options.json_option
def init(nodes: tuple[str, ...], link: str, file: Path, overwrite: bool, as_json: bool) -> None:
    """Write cluster.toml, with a new secret, for the owner's eyes only.

    Copy it to every machine (its agents need the secret) and keep it as safe as a key.
    """
    from mlxinfer.distributed import cluster_file
    from mlxinfer.distributed.cluster_file import Cluster, Kind, Link

    if file.exists() and not overwrite:
        raise click.UsageError(f"{file} exists; --overwrite replaces it")
    made = tuple(node_of(text) for text in nodes)
    kind: Kind = link  # pyright: ignore[reportAssignmentType]
    latency, rate = GUESSED[link]
    links = tuple(
        Link((a.name, b.name), kind, latency, rate, (a.host, b.host)) for a, b in itertools.combinations(made, 2)
    )
    cluster_file.write(file, Cluster(made, links, secrets.token_urlsafe(32)))
    try:
        cluster_file.read(file)
    except Exception:
        file.unlink()
        raise
    if as_json:
        output.emit_json({"file": str(file), "nodes": [node.name for node in made]})
    else:
        click.echo(f"Wrote {file}: {len(made)} machines, {len(links)} links as {link} usually is.")
        output.say(f"Copy it to each of them, and start: mlxinfer cluster agent --cluster {file} --node NAME")


def node_of(text: str) -> Node:
    """Of NAME=HOST:GB:GB/S[:PORT]. Raises UsageError."""
    from mlxinfer.distributed.cluster_file import DEFAULT_PORT, Node

    name, equals, rest = text.partition("=")
    parts = rest.rsplit(":", 3) if rest.count(":") == 3 else rest.rsplit(":", 2)
    if not equals or len(parts) < 3:
        raise click.UsageError(f"--node {text!r} is not NAME=HOST:GB:GB/S[:PORT]")
    try:
        port = int(parts[3]) if len(parts) == 4 else DEFAULT_PORT
        return Node(name, parts[0].strip("[]"), float(parts[1]), float(parts[2]), port)
    except ValueError:
        raise click.UsageError(f"--node {text!r}: memory, bandwidth and port are numbers") from None
