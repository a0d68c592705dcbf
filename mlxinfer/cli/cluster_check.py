"""`mlxinfer cluster check`: the machines and links as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxinfer.cli import clusters, options, output

if TYPE_CHECKING:
    from mlxinfer.distributed.checking import Checked
    from mlxinfer.distributed.cluster_file import Cluster


@click.command("check", epilog=options.example("mlxinfer cluster check", "mlxinfer cluster check --report check.json"))
@clusters.cluster_option
@click.option(
    "--no-write", is_flag=True, help="Leave the cluster's file as it is; else measured links are written to it."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write all that was found here; no secret is in it.",
)
@options.json_option
@click.pass_context
def check(ctx: click.Context, file: Path, no_write: bool, report: Path | None, as_json: bool) -> None:
    """Ask every machine of the cluster, measure every link with real collectives, and say what to mend.

    The others need their agents, by hand or over ssh where the file has `ssh`. It ends with 1 if something is wrong.
    """
    import dataclasses

    from mlxinfer.distributed import checking, cluster_file
    from mlxinfer.formats.files import json_bytes, replace_file

    cluster = cluster_file.read(file)
    checked = checking.check(cluster, output.say)
    found = checking.report(checked, cluster)
    if not no_write and checked.links != cluster.links:
        cluster_file.write(file, dataclasses.replace(cluster, links=checked.links))
    if report is not None:
        replace_file(report, json_bytes(found))
    if as_json:
        output.emit_json(found)
    else:
        _show(checked, cluster)
    if not checked.ready:
        ctx.exit(1)


def _show(checked: Checked, cluster: Cluster) -> None:
    rows = [
        (
            node.name,
            f"{node.host}:{node.port}",
            str(said.get("chip", "")),
            str(said.get("os", "")),
            f"{said['memory_gb']:g} GB",
            f"mlxinfer {said['version']}, mlx {said['mlx']}",
        )
        for node in cluster.nodes
        if (said := checked.machines.get(node.name)) is not None
    ]
    click.echo(output.columns(("NODE", "AGENT", "CHIP", "SYSTEM", "MEMORY", "VERSIONS"), rows))
    clusters.show_links(checked.links)
    for finding in checked.findings:
        click.echo(f"\n{finding.level}: {finding.where}: {finding.what}\n  {finding.mend}")
    wrong = sum(finding.level == "wrong" for finding in checked.findings)
    click.echo(f"\n{'The cluster is ready.' if checked.ready else f'{wrong} to mend.'}")
