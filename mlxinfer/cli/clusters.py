"""What the verbs of `mlxinfer cluster` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import output, progress
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlxinfer.config import Settings
    from mlxinfer.distributed.cluster_file import Link
    from mlxinfer.distributed.planning import Plan, Planned

FILE = Path("cluster.toml")
KINDS = ("one", "tensor", "pipeline", "both")

cluster_option = click.option(
    "--cluster", "file", type=click.Path(path_type=Path), default=FILE, help="The cluster's file [cluster.toml]."
)


def planning_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--ctx, --objective, --kind, --wifi."""
    for option in (
        click.option("--wifi", is_flag=True, help="Take Wi-Fi where nothing else joins two machines."),
        click.option(
            "--kind",
            "kinds",
            multiple=True,
            type=click.Choice(KINDS),
            help="Only such plans; both: pairs that share heads, in a pipeline (experimental). May be repeated.",
        ),
        click.option(
            "--objective",
            type=click.Choice(["latency", "throughput"]),
            default="latency",
            help="One stream's speed, or that of many together [latency].",
        ),
        click.option("--ctx", type=click.IntRange(1), default=4096, metavar="N", help="Tokens of context [4096]."),
    ):
        command = option(command)
    return command


def folder_of(model: str, settings: Settings) -> Path:
    """The folder of a model in mlx's layout, fetched and converted first where that is needed."""
    from mlxinfer import zoo
    from mlxinfer.cli import converted

    with progress.reporting() as report:
        files = converted.loadable(zoo.resolve(model, settings, progress=report), settings, report)
    if files.kind != "folder":
        raise UnsupportedModelError(
            f"{model} is a GGUF file; for a cluster convert it first: mlxinfer convert {model} ./folder"
        )
    return files.path


def wanted(kinds: tuple[str, ...]) -> frozenset[str]:
    """Of plans that may be served."""
    from mlxinfer.distributed.serving import RUN

    return frozenset(kinds or RUN)


def show(planned: Planned, kinds: frozenset[str]) -> None:
    """A table of plans, the best first, and what there is none of."""
    plans = [made for made in planned.plans if made.kind in kinds or not kinds]
    rows = [("", "machines", "layers", "tok/s", "all streams", "TTFT", "GB each")]
    rows += [(_kind(made), " + ".join(made.nodes), *_figures(made)) for made in plans]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if plans:
        for link in plans[0].links:
            click.echo(f"over {link}")
    for refusal in planned.refusals:
        output.say(f"no {refusal.what}: {refusal.why}", dim=True)


def show_links(links: Sequence[Link]) -> None:
    """A table, after a blank line; nothing where there is none."""
    rows = [
        (
            " - ".join(link.between),
            link.kind,
            f"{link.latency_us:.0f} us",
            f"{link.bandwidth_gb_s:.3g} GB/s",
            "measured" if link.measured else "not measured",
        )
        for link in links
    ]
    if rows:
        click.echo()
        click.echo(output.columns(("LINK", "KIND", "ONE WAY", "BANDWIDTH", ""), rows))


def _kind(made: Plan) -> str:
    return f"{made.kind} (experimental)" if made.experimental else made.kind


def _figures(made: Plan) -> tuple[str, ...]:
    return (
        "+".join(map(str, made.split)) if made.kind in ("pipeline", "both") else str(made.split[0]),
        f"{made.tok_s:.1f}",
        f"{made.throughput_tok_s:.1f}",
        f"{made.ttft_s:.2f} s",
        ", ".join(f"{size / 1e9:.1f}" for size in dict.fromkeys(made.bytes_per_rank)),
    )
