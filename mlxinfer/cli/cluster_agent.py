"""`mlxinfer cluster agent`: what runs on every machine of a cluster."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from mlxinfer.cli import clusters, options, output

if TYPE_CHECKING:
    from mlxinfer.distributed.agent import Agent


@click.command("agent", epilog=options.example("mlxinfer cluster agent --node mini"))
@clusters.cluster_option
@click.option("--node", required=True, metavar="NAME", help="Which machine of the cluster's file this is.")
@click.option("--parts", type=click.Path(path_type=Path), help="Where parts of models are kept [in the cache].")
@options.json_option
def agent(file: Path, node: str, parts: Path | None, as_json: bool) -> None:
    """Wait for the coordinator: start and end ranks, keep parts of models. Ctrl-C ends it, and its ranks.

    `--cluster -` takes the file's length, a line, and the file from stdin, and ends with it: so the coordinator starts
    it over ssh.
    """
    from mlxinfer.distributed import cluster_file
    from mlxinfer.distributed.agent import Agent

    piped = str(file) == "-"
    cluster = cluster_file.parse(_piped(), "stdin") if piped else cluster_file.read(file)
    own = cluster.node(node)
    where = parts or options.settings_of().cache_dir / "parts"
    running = Agent(own.host, own.port, cluster.secret, where)
    if as_json:
        output.emit_json({"node": node, "host": own.host, "port": running.port})
    output.say(f"The agent of {node} listens on {own.host}:{running.port}   (Ctrl-C stops)")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end(running))
    if piped:
        threading.Thread(target=_until_stdin_ends, name="stdin", daemon=True).start()
    running.run()


def _end(running: Agent) -> NoReturn:
    running.close()
    os._exit(0)


def _piped() -> bytes:
    from mlxinfer.distributed.cluster_file import MAX_BYTES

    line = sys.stdin.buffer.readline(20).strip()
    if not line.isdigit() or int(line) > MAX_BYTES:
        raise click.UsageError(f"--cluster -: a length is expected on stdin, not {line!r}")
    return sys.stdin.buffer.read(int(line))


def _until_stdin_ends() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
