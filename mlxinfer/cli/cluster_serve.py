"""`mlxinfer cluster serve`: the server, its model over several machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import clusters, options, output
from mlxinfer.cli import serve as single

if TYPE_CHECKING:
    from collections.abc import Iterable


@click.command("serve", epilog=options.example("mlxinfer cluster serve ./my-model --port 8080"))
@click.argument("model", type=options.ModelName())
@clusters.cluster_option
@clusters.planning_options
@click.option("--host", metavar="ADDRESS", help="Where to listen [127.0.0.1]; others need MLXINFER_API_KEY set.")
@click.option("--port", type=int, metavar="N", help="Port [8080]; 0 takes a free one.")
@click.option("--access-log", metavar="WHERE", help="A line for each request: stderr, off or a file [stderr].")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Offer MODEL:NAME, the model with an adapter. May be repeated.",
)
@click.option("--parts", type=click.Path(path_type=Path), help="Where parts of models are kept [in the cache].")
@click.option(
    "--backend",
    type=click.Choice(["ring", "jaccl"]),
    default="ring",
    help="Collectives over TCP, or over RDMA on Thunderbolt 5 [ring].",
)
@options.json_option
def serve(
    model: str,
    file: Path,
    ctx: int,
    objective: Any,
    kinds: tuple[str, ...],
    wifi: bool,
    adapters: tuple[str, ...],
    parts: Path | None,
    backend: Any,
    as_json: bool,
    **flags: Any,
) -> None:
    """Serve MODEL over the machines of the cluster, by the best plan for those that answer.

    This is the first machine of the cluster's file; the others run `mlxinfer cluster agent`. When a machine or a rank
    is lost, the model is loaded again over what is left, and open streams go on from their tokens.
    """
    from mlxinfer.distributed import cluster_file
    from mlxinfer.distributed.serving import Spread, load_over
    from mlxinfer.distributed.status import StatusFile
    from mlxinfer.pool import ModelPool

    settings = options.settings_of(ctx=ctx, adapters=adapters or None, **flags)
    cluster = cluster_file.read(file)
    access = single.access(settings, 1)
    single.check_address(settings, access)
    folder = clusters.folder_of(model, settings)
    name = single.served_name(model)
    offered = single.name_adapters(settings.adapters, (name,))
    where = parts or settings.cache_dir / "parts" / "cut" / name
    status = StatusFile(settings.cache_dir, name)
    spread = Spread(
        cluster,
        folder,
        where,
        context=ctx,
        objective=objective,
        kinds=clusters.wanted(kinds),
        dtype=settings.dtype,
        wifi=wifi,
        reserved=min(_bytes_of(offered.get(name, {}).values()), settings.adapter_mb << 20),
        backend=backend,
        say=output.say,
        planned=status.write,
    )
    try:
        llm = load_over(spread, name, settings)
        try:
            pool = ModelPool.of({name: llm})
            for adapter, adapter_folder in offered.get(name, {}).items():
                pool.offer(name, adapter, adapter_folder)
            single.run_pool(pool, settings, access, as_json=as_json)
        finally:
            llm.unload()
    finally:
        spread.close()
        status.close()


def _bytes_of(folders: Iterable[str]) -> int:
    """Of the weights of adapters."""
    from mlxinfer.engine.adapter_files import WEIGHTS

    return sum((Path(folder) / WEIGHTS).stat().st_size for folder in folders)
