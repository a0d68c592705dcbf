"""`mlxinfer cluster shard`: a model's parts for a plan, ahead of time."""

from __future__ import annotations

from pathlib import Path

import click

from mlxinfer.cli import clusters, options, output


@click.command("shard", epilog=options.example("mlxinfer cluster shard ./my-model ./parts --tensor 2"))
@click.argument("model", type=options.ModelName())
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--tensor", type=click.IntRange(1), metavar="N", help="Split by heads, for so many machines.")
@click.option("--pipeline", metavar="A,B,…", help="Split by layers: how many each machine has, the last layers first.")
@click.option("--pairs", is_flag=True, help="With --pipeline: two machines for each of them, which share its heads.")
@click.option("--rank", type=click.IntRange(0), help="This part only.")
@options.json_option
def shard(
    model: str,
    destination: Path,
    tensor: int | None,
    pipeline: str | None,
    pairs: bool,
    rank: int | None,
    as_json: bool,
) -> None:
    """Cut MODEL into parts below DESTINATION, one folder for each rank; parts that are whole already are kept."""
    from mlxinfer.distributed.shards import Part, cut
    from mlxinfer.zoo import human_bytes

    if (tensor is None) == (pipeline is None):
        raise click.UsageError("name one of --tensor and --pipeline")
    try:
        split = tuple(int(part) for part in (pipeline or "").split(",") if part)
    except ValueError:
        raise click.UsageError(f"--pipeline {pipeline!r}: numbers with commas between are expected") from None
    if pairs and not split:
        raise click.UsageError("--pairs goes with --pipeline")
    size = tensor or len(split) * (2 if pairs else 1)
    kind = "tensor" if tensor else "both" if pairs else "pipeline"
    if rank is not None and rank >= size:
        raise click.UsageError(f"--rank {rank}: there are {size}, the first is 0")
    folder = clusters.folder_of(model, options.settings_of())
    made: list[dict[str, object]] = []
    for number in range(size) if rank is None else (rank,):
        part = cut(folder, Part(kind, number, size, split), destination)
        taken = sum(file.stat().st_size for file in part.iterdir())
        made.append({"rank": number, "folder": str(part), "bytes": taken})
        if not as_json:
            click.echo(f"rank {number}  {human_bytes(taken)}  {part}")
    if as_json:
        output.emit_json({"parts": made})
