"""`mlxinfer stop`: have a server drain and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlxinfer.cli import options, output
from mlxinfer.cli.serve import url
from mlxinfer.errors import ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.server.announce import RunningServer

SLACK_S = 10.0
"""Beyond the server's own grace, for models to be unloaded."""


@click.command("stop", epilog=options.example("mlxinfer stop", "mlxinfer stop 8080", "mlxinfer stop --all"))
@click.argument("server", required=False, metavar="[PORT|MODEL]")
@click.option("-a", "--all", "everything", is_flag=True, help="All of them.")
@options.json_option
def stop(server: str | None, everything: bool, as_json: bool) -> None:
    """Stop the server on PORT, or the one that serves MODEL; without either, the only one that runs.

    Requests that run may end first, for as long as that server's grace (30 s).
    """
    from mlxinfer.server import announce

    if everything and server is not None:
        raise click.UsageError("name a server or say --all, not both")
    cache_dir = options.settings_of().cache_dir
    chosen = choose(announce.running(cache_dir), server, everything=everything)
    stopped = [(one, announce.stop(cache_dir, one, one.grace_s + SLACK_S)) for one in chosen]
    if as_json:
        output.emit_json({"stopped": [{"pid": s.pid, "port": s.port, "ended": ended} for s, ended in stopped]})
    else:
        for one, _ in filter(lambda pair: pair[1], stopped):
            output.say(f"Stopped {url(one.host, one.port)} (process {one.pid})")
    if late := [str(s.pid) for s, ended in stopped if not ended]:
        raise click.ClickException(f"still running after its grace: process {', '.join(late)}")


def choose(servers: Sequence[RunningServer], wanted: str | None, *, everything: bool) -> list[RunningServer]:
    """The servers that are meant. Raises ModelNotFoundError when there is none, UsageError when several could be."""
    listed = "; ".join(f"{s.port}: {', '.join(s.models)}" for s in servers)
    if wanted is None:
        if len(servers) > 1 and not everything:
            raise click.UsageError(f"several servers run; name one, or say --all ({listed})")
        if not servers and not everything:
            raise ModelNotFoundError("no server runs")
        return list(servers)
    found = [s for s in servers if wanted == str(s.port)] or [s for s in servers if wanted in s.models]
    if not found:
        raise ModelNotFoundError(f"no server runs on port {wanted} or serves such a model; running: {listed or 'none'}")
    if len(found) > 1:
        raise click.UsageError(f"several servers serve {wanted}; name the port ({listed})")
    return found
