"""`mlxinfer ps`: the servers that run on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output
from mlxinfer.cli.serve import url

if TYPE_CHECKING:
    from mlxinfer.server.announce import RunningServer

HEALTH_S = 2.0
"""A server that does not answer for so long is shown as silent."""
MAX_HEALTH_BYTES = 1 << 20


@click.command("ps", epilog=options.example("mlxinfer ps", "mlxinfer ps --json"))
@options.json_option
def ps(as_json: bool) -> None:
    """List the servers you run on this machine: address, memory, requests and models."""
    from mlxinfer.server.announce import running

    servers = [describe(server) for server in running(options.settings_of().cache_dir)]
    if as_json:
        output.emit_json({"servers": servers})
        return
    if not servers:
        output.say("No server runs. Try: mlxinfer serve smollm2-135m")
        return
    click.echo(output.columns(("PID", "URL", "STATUS", "MEMORY", "RUNNING", "WAITING", "MODELS"), map(_row, servers)))


def describe(server: RunningServer) -> dict[str, Any]:
    """A server, and what it says when it is asked."""
    import psutil

    health = _health(server)
    models = health.get("models")
    models = models if isinstance(models, dict) else {name: {} for name in server.models}
    memory = None
    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(server.pid).memory_info().rss
    return {
        "pid": server.pid,
        "url": url(server.host, server.port),
        "port": server.port,
        "version": server.version,
        "status": health.get("status", "silent"),
        "resident_bytes": memory,
        "running": sum(int(model.get("running", 0)) for model in models.values()),
        "waiting": sum(int(model.get("waiting", 0)) for model in models.values()),
        "models": {name: model.get("status", "?") for name, model in models.items()},
    }


def _health(server: RunningServer) -> dict[str, Any]:
    host = url(server.host, server.port).removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=HEALTH_S)
    try:
        connection.request("GET", "/health")
        body = json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))
        return body if isinstance(body, dict) else {}
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    from mlxinfer.zoo.files import human_bytes

    memory = server["resident_bytes"]
    return (
        str(server["pid"]),
        server["url"],
        server["status"],
        "?" if memory is None else human_bytes(memory),
        str(server["running"]),
        str(server["waiting"]),
        ", ".join(f"{name} ({state})" for name, state in server["models"].items()),
    )
