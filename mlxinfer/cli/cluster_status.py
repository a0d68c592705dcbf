"""`mlxinfer cluster status`: machines, links, plan and rates of what runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import clusters, options, output

if TYPE_CHECKING:
    from pathlib import Path


@click.command("status", epilog=options.example("mlxinfer cluster status", "mlxinfer cluster status --json"))
@clusters.cluster_option
@options.json_option
def status(file: Path, as_json: bool) -> None:
    """Say which machines answer, which ranks run there, by what plan, and how fast. Nothing is disturbed."""
    import dataclasses

    from mlxinfer.distributed import cluster_file
    from mlxinfer.distributed import status as statuses

    cluster = cluster_file.read(file)
    nodes = statuses.of_nodes(cluster)
    served = _served()
    if as_json:
        links = [dataclasses.asdict(link) for link in cluster.links]
        output.emit_json({"coordinator": cluster.nodes[0].name, "nodes": nodes, "links": links, "serving": served})
        return
    rows = [(cluster.nodes[0].name, "here", "coordinates")]
    for name, said in nodes.items():
        if "error" in said:
            rows.append((name, "silent", str(said["error"])))
        else:
            rows.append((name, f"{said['answered_s'] * 1000:.0f} ms", _ranks(said["ranks"])))
    click.echo(output.columns(("NODE", "ANSWERS", "RANKS"), rows))
    clusters.show_links(cluster.links)
    for one in served:
        plan = one["plan"]
        click.echo(f"\n{one['model']} at {one['url']}: {plan['kind']} over {', '.join(plan['nodes'])}")
        click.echo(
            f"  predicted {plan['tok_s']:.1f} tok/s a stream; {one['running']} running, {one['waiting']} waiting"
        )
        if one["begun_again"]:
            click.echo(f"  begun again {one['begun_again']} times, last because {one['why']}")
    if not served:
        output.say("Nothing is served over machines from here. Try: mlxinfer cluster serve MODEL")


def _served() -> list[dict[str, Any]]:
    from mlxinfer.cli.ps import describe
    from mlxinfer.distributed.status import of_process
    from mlxinfer.server.announce import running

    cache = options.settings_of().cache_dir
    found = []
    for server in running(cache):
        about = of_process(cache, server.pid)
        if about is not None:
            now = describe(server)
            about = {key: about.get(key) for key in ("model", "plan", "since", "begun_again", "why")}
            found.append({**about, **{key: now[key] for key in ("pid", "url", "status", "running", "waiting")}})
    return found


def _ranks(ranks: list[dict[str, Any]]) -> str:
    from mlxinfer.zoo import human_bytes

    said = [
        f"rank {one['rank']} ({one['ended'] or human_bytes(int(one['bytes']))}, for {_time(one['for_s'])})"
        for one in ranks
    ]
    return ", ".join(said) or "none"


def _time(seconds: float) -> str:
    return time.strftime("%H:%M:%S" if seconds >= 3600 else "%M:%S", time.gmtime(seconds))
