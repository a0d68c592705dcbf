"""`mlxinfer cluster init`: a cluster.toml of machines that are named, or asked."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output

if TYPE_CHECKING:
    from mlxinfer.distributed.cluster_file import Node

KINDS = ("ethernet", "loopback", "thunderbolt4", "thunderbolt5", "wifi")


@click.command(
    "init",
    epilog=options.example(
        "mlxinfer cluster init --host me@mini.local --host me@air.local",
        "mlxinfer cluster init --node studio=10.0.0.1:192:800 --node mini=10.0.0.2:64:273",
    ),
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="SSH",
    help="A machine as ssh takes it; it is asked for its memory, chip and networks. This machine comes first.",
)
@click.option("--command", default="mlxinfer", metavar="PROGRAM", help="mlxinfer on those machines [mlxinfer].")
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME=HOST:GB:GB/S[:PORT]",
    help="A machine: its address, memory for models, memory bandwidth. The first one coordinates. May be repeated.",
)
@click.option("--link", type=click.Choice(KINDS), default="ethernet", help="What joins machines of --node [ethernet].")
@click.option("-o", "--output", "file", type=click.Path(path_type=Path), default=Path("cluster.toml"))
@click.option("--overwrite", is_flag=True, help="Replace a file that exists; its secret goes with it.")
@options.json_option
def init(
    hosts: tuple[str, ...], command: str, nodes: tuple[str, ...], link: Any, file: Path, overwrite: bool, as_json: bool
) -> None:
    """Write cluster.toml, with a new secret, for the owner's eyes only.

    Machines are named by --node, or asked over ssh, by --host. Where agents are started by hand, copy it to every
    machine (they need the secret), and keep it as safe as a key.
    """
    from mlxinfer.distributed import cluster_file, discovering
    from mlxinfer.distributed.cluster_file import Cluster

    if bool(hosts) == bool(nodes):
        raise click.UsageError("name machines by --host or by --node")
    if file.exists() and not overwrite:
        raise click.UsageError(f"{file} exists; --overwrite replaces it")
    if hosts:
        output.say("Asking the machines; this one's memory is measured first")
        made, links = discovering.discovered(hosts, command)
    else:
        made = tuple(node_of(text) for text in nodes)
        links = discovering.stated(made, link)
    cluster = Cluster(made, links, secrets.token_urlsafe(32))
    # What is written has to be read again.
    cluster_file.parse(cluster_file.dumps(cluster).encode(), str(file))
    cluster_file.write(file, cluster)
    if as_json:
        output.emit_json({"file": str(file), "nodes": [node.name for node in made]})
        return
    click.echo(f"Wrote {file}: {len(made)} machines, {len(links)} links, as such links usually are.")
    if hosts:
        output.say(f"Next: mlxinfer cluster check --cluster {file}")
    else:
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
