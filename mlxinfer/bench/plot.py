"""A report as a picture: throughput against concurrency, TTFT and ITL percentiles. Needs matplotlib."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENDINGS = (".svg", ".png")
PERCENTILES = ("p50", "p95", "p99")


def check(path: Path) -> None:
    """Before the work: can it be drawn at all? Raises InvalidRequestError with what to do."""
    if path.suffix.lower() not in ENDINGS:
        raise InvalidRequestError(f"--plot {path.name!r:.160} must end in .svg or .png", param="plot")
    _figure_module()


def _figure_module() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidRequestError(
            "--plot needs matplotlib: pip install 'mlxinfer[bench]', or pip install matplotlib", param="plot"
        ) from error


def throughput(report: Mapping[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """By "workload, server": (label, clients, total tok/s) of each result that has both, by number of clients."""
    lines: dict[str, list[tuple[str, float, float]]] = {}
    for result in report["results"]:
        for name, one in result["targets"].items():
            clients, speed = result["clients"], one["summary"]["total_tok_s"]
            if clients is not None and speed is not None:
                line = lines.setdefault(f"{result['workload']}, {name}", [])
                line.append((result["label"], clients, speed))
    return {key: sorted(line, key=lambda point: point[1]) for key, line in lines.items()}


def latencies(report: Mapping[str, Any], key: str) -> dict[str, list[float]]:
    """By "label, server": p50, p95, p99 of `key` ("ttft", "itl") in seconds."""
    return {
        f"{result['label']}, {name}": [found[q] for q in PERCENTILES]
        for result in report["results"]
        for name, one in result["targets"].items()
        if (found := one["summary"][key])
    }


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture. Raises InvalidRequestError without matplotlib, OSError where it can't be written."""
    figure = _figure_module().Figure(figsize=(12, 4.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    lines = throughput(report)
    for name, line in lines.items():
        left.plot([x for _, x, _ in line], [y for _, _, y in line], marker="o", label=name)
    left.set(title="throughput", xlabel="clients", ylabel="output tokens per second", ylim=(0, None))
    if lines:
        left.legend(fontsize="small")
    for axes, key in ((middle, "ttft"), (right, "itl")):
        bars = latencies(report, key)
        width = 0.8 / max(1, len(bars))
        for i, (name, heights) in enumerate(bars.items()):
            axes.bar([x + i * width for x in range(len(PERCENTILES))], heights, width, label=name)
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(PERCENTILES))], PERCENTILES)
        axes.set(title=f"{key.upper()}, seconds", yscale="log")
    # For both panels of bars, and below them: inside, it would lie on the bars.
    handles, labels = middle.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    machine = report["machine"]
    figure.suptitle(f"{machine['device']}, {machine['os']}; mlxinfer {machine['mlxinfer']}", fontsize="small")
    figure.savefig(path)
