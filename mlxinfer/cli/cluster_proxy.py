"""`mlxinfer cluster proxy`: a HAProxy configuration for servers that have the whole model each."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import clusters, options, output
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlxinfer.distributed.proxy import Replica

SERVER_PORT = 8080


@click.command(
    "proxy",
    epilog=options.example(
        "mlxinfer cluster proxy --replica 10.0.0.1:8080 --replica 10.0.0.2:8080 -o haproxy.cfg",
        "mlxinfer cluster proxy --cluster cluster.toml --replica-port 8000 > haproxy.cfg",
    ),
)
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="[NAME=]HOST:PORT",
    help="A running `mlxinfer serve`. May be repeated; without any: the machines of the cluster's file.",
)
@click.option("--cluster", "file", type=click.Path(path_type=Path), help="The cluster's file [cluster.toml].")
@click.option(
    "--replica-port", type=int, default=SERVER_PORT, metavar="N", help="Of the servers of the cluster's file [8080]."
)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Where the proxy listens [127.0.0.1].")
@click.option("--port", type=int, default=8080, metavar="N", help="Its port [8080].")
@click.option("--keyed", is_flag=True, help="Say that each replica asks for keys: needed for other addresses.")
@click.option(
    "--max-body",
    "max_body_kb",
    type=int,
    default=1024,
    metavar="KB",
    help="The largest body that can be sent again to another replica [1024].",
)
@click.option(
    "--max-requests",
    type=int,
    default=288,
    metavar="N",
    help="At a time for each replica: its max_num_seqs + max_queue; more wait in the proxy [288].",
)
@click.option(
    "--timeout", "timeout_s", type=int, default=3600, metavar="S", help="Seconds without a byte of an answer [3600]."
)
@click.option(
    "--session-header",
    "session_headers",
    multiple=True,
    metavar="NAME",
    help="A header that names a conversation, before the usual ones. May be repeated.",
)
@click.option("--socket", type=click.Path(path_type=Path), help="HAProxy's runtime API [haproxy.sock beside the file].")
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), help="Where it is written [stdout].")
@click.option("--overwrite", is_flag=True, help="Replace a file that exists.")
@options.json_option
def proxy(
    replicas: tuple[str, ...],
    file: Path | None,
    replica_port: int,
    keyed: bool,
    session_headers: tuple[str, ...],
    socket: Path | None,
    target: Path | None,
    overwrite: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Write the configuration of a HAProxy in front of replicas: servers that have the whole model each.

    A conversation's turns go to the replica that has computed its beginning. Nothing is started: what to run is said.
    """
    from mlxinfer.distributed.proxy import SESSION_HEADERS, ProxyOptions, configuration
    from mlxinfer.server.options import is_loopback

    if replicas and file is not None:
        raise click.UsageError("--replica and --cluster both say where the replicas are; give one of them")
    if target is not None and target.exists() and not overwrite:
        raise click.UsageError(f"{target} exists; --overwrite replaces it")
    if not keyed and not is_loopback(limits["host"]):
        raise click.UsageError(
            f"--host {limits['host']} can be reached from other machines, and the proxy asks for no key: start each "
            "replica with keys (MLXINFER_API_KEY or --keys) and say so by --keyed"
        )
    found = [replica_of(text, number) for number, text in enumerate(replicas, 1)] or of_cluster(
        file or clusters.FILE, replica_port
    )
    beside = Path() if target is None else target.parent
    chosen = ProxyOptions(
        socket=(socket or beside / "haproxy.sock").absolute(),
        session_headers=tuple(dict.fromkeys((*session_headers, *SESSION_HEADERS))),
        **limits,
    )
    text = configuration(found, chosen)
    if target is None and not as_json:
        click.echo(text, nl=False)
    elif target is not None:
        write(target, text)
    named = [{"name": one.name, "address": one.address} for one in found]
    if as_json:
        output.emit_json(
            {"replicas": named, "socket": str(chosen.socket)}
            | ({"configuration": text} if target is None else {"file": str(target)})
        )
    else:
        explain(target or Path("haproxy.cfg"), chosen.socket, found)


def replica_of(text: str, number: int) -> Replica:
    """Of [NAME=]HOST:PORT. Raises UsageError."""
    from mlxinfer.distributed.proxy import Replica

    name, equals, address = text.rpartition("=")
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise click.UsageError(f"--replica {text!r} is not [NAME=]HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return Replica(name if equals else f"replica{number}", host, int(port))


def of_cluster(file: Path, port: int) -> list[Replica]:
    """Every machine of a cluster's file. Raises InvalidRequestError."""
    from mlxinfer.distributed import cluster_file
    from mlxinfer.distributed.proxy import Replica

    return [Replica(node.name, node.host.strip("[]"), port) for node in cluster_file.read(file).nodes]


def write(target: Path, text: str) -> None:
    """Whole or not at all. Raises InvalidRequestError where the disk says no."""
    from mlxinfer.formats.files import replace_file

    try:
        replace_file(target, text.encode("ascii"))
    except OSError as error:
        raise InvalidRequestError(f"{target} cannot be written: {error.strerror}", param="output") from error


def explain(target: Path, socket: Path, replicas: list[Replica]) -> None:
    """What to run."""
    config, pid = shlex.quote(str(target)), shlex.quote(str(target.with_suffix(".pid")))
    runtime = shlex.quote(str(socket))
    output.say(f"{len(replicas)} replicas: {', '.join(f'{one.name} at {one.address}' for one in replicas)}")
    for what, command in (
        ("check", f"haproxy -c -f {config}"),
        ("run", f"haproxy -f {config}"),
        ("in the background", f"haproxy -D -f {config} -p {pid}"),
        ("reload", f"haproxy -D -f {config} -p {pid} -x {runtime} -sf $(cat {pid})"),
        ("drain", f"echo 'set server replicas/{replicas[0].name} state drain' | nc -U {runtime}   (and: state ready)"),
    ):
        output.say(f"{what:>18}  {command}")
    output.say("Clients that call it by a name need that at each replica: mlxinfer serve --allow-host NAME", dim=True)
