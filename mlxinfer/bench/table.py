"""A result of the report as rows of text: figures down, servers and ratios across."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from mlxinfer.zoo.files import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NO_VALUE = "-"
SPREADS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
RATES = {"total_tok_s": "total tok/s", "decode_tok_s": "decode tok/s", "prefill_tok_s": "prefill tok/s"}
PLAIN = ("turns", "streams_alive", "restarted", "hi_came_in_time")
SHARES = ("_share",)
TIMES_OF = ("_over_p50", "_over_alone", "_over_cold", "_over_needed")
BUSY = 0.5
"""More of a core than this spent in the load generator may show in the figures."""
CHUNKY = 1.1
"""More tokens per chunk than this and the gap between chunks is no longer that between tokens."""


def rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of one entry of the report's `results`."""
    names, others = list(result["targets"]), list(result["ratios"])
    header = [result["label"], *names, *(f"{names[0]} / {other}" for other in others)]
    found = [result["targets"][name] for name in names]
    ratios = [result["ratios"][other] for other in others]
    made: list[list[str]] = []

    def add(label: str, cells: list[str], key: str | None = None) -> None:
        if any(cell != NO_VALUE for cell in cells):
            made.append([label, *cells, *(_ratio(ratio.get(key)) if key else "" for ratio in ratios)])

    add("requests", [_requests(one["summary"]) for one in found])
    add("tokens in / out", [f"{one['summary']['prompt_tokens']} / {one['summary']['output_tokens']}" for one in found])
    for key, label in RATES.items():
        add(label, [_number(one["summary"][key]) for one in found], key)
    for key, label in SPREADS.items():
        add(f"{label} p50 / p95 / p99", [_spread(one["summary"][key]) for one in found], f"{key}_p50")
    add("ITL p99 / p50", [_number(one["summary"]["itl_p99_over_p50"]) for one in found])
    for key in ("longest_gap", "wall"):
        add(key.replace("_", " "), [_seconds(one["summary"][key]) for one in found], key)
    for key in {key: None for one in found for key in one["figures"]}:
        add(_label(key), [_figure(key, one["figures"].get(key)) for one in found], key)
    add("cached prompt tokens", [_percent(one["summary"]["cached_share"]) for one in found])
    add("peak memory", [_bytes(one["peak_memory_bytes"]) for one in found])
    add("share of the bandwidth limit", [_percent(one["bandwidth_share"]) for one in found])
    return header, made


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader has to know to read the rows rightly; one sentence each."""
    made: list[str] = []
    for name, one in result["targets"].items():
        summary = one["summary"]
        if summary["tokens_counted_from_chunks"]:
            made.append(f"{name} sends no usage: its tokens are counted as chunks.")
        if (several := summary["tokens_per_chunk"]) and several > CHUNKY:
            made.append(f"{name} sends {several:.1f} tokens a chunk: its ITL and gaps are between chunks.")
        if summary["empty"]:
            made.append(f"{name} answered {summary['empty']} requests without any text.")
        if one["client_cpu"] > BUSY:
            made.append(f"{name}: the load generator itself took {one['client_cpu']:.0%} of a core in one round.")
        made += [f"{name}: {error['count']} x {error['message']}" for error in one["errors"]]
    return made


KEY_FIGURES: dict[str, tuple[str, ...]] = {
    "single": ("decode_tok_s", "ttft_p50"),
    "chat": ("total_tok_s", "ttft_p50"),
    "long": ("ttft_p50", "decode_tok_s"),
    "mixed": ("total_tok_s", "ttft_p50"),
    "shared": ("wall", "ttft_p50", "computed_over_needed"),
    "arrival": ("streams_longest_gap", "streams_itl_p99_over_p50", "long_ttft_over_alone"),
    "overtake": ("hi_ttft", "long_ttft_over_alone"),
    "agent": ("recomputed_share", "ttft_last_turn"),
    "restart": ("again_over_cold", "again_ttft"),
}
"""What a workload is for; the rows of `markdown`."""


def markdown(report: Mapping[str, Any]) -> str:
    """The key figures of every result as one table: medians over the rounds, and ratios with their range."""
    names = [target["name"] for target in report["targets"]]
    heads = ["workload", "figure", *names, *(f"{names[0]} / {other}" for other in names[1:])]
    lines = [heads, ["---"] * len(heads)]
    for result in report["results"]:
        for key in KEY_FIGURES[result["workload"]]:
            cells = [_cell(key, _middle(result["targets"][name]["rounds"], key)) for name in names]
            ratios = [_ratio(result["ratios"][name].get(key)) for name in names[1:]]
            lines.append([result["label"], _label(key), *cells, *ratios])
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def _middle(rounds: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [one[key] for one in rounds if one.get(key) is not None]
    return statistics.median(found) if found else None


def _cell(key: str, value: float | None) -> str:
    return _number(value) if key in RATES else _figure(key, value)


def _label(key: str) -> str:
    return RATES.get(key, key.replace("_", " ").replace("ttft", "TTFT").replace("itl", "ITL"))


def _requests(summary: Mapping[str, Any]) -> str:
    return f"{summary['requests']}, {summary['errors']} failed" if summary["errors"] else str(summary["requests"])


def _figure(key: str, value: float | None) -> str:
    if value is None:
        return NO_VALUE
    if key.endswith(SHARES):
        return _percent(value)
    if key in PLAIN or key.endswith("_tokens"):
        return f"{value:g}"
    return f"{value:.2f}x" if key.endswith(TIMES_OF) else _seconds(value)


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    around = f" ({found['low']:.2f}-{found['high']:.2f})" if found["rounds"] > 1 else ""
    return f"{found['median']:.2f}x{around}"


def _spread(found: Mapping[str, Any] | None) -> str:
    return " / ".join(_seconds(found[q]) for q in ("p50", "p95", "p99")) if found else NO_VALUE


def _seconds(value: float | None) -> str:
    if not value:
        return NO_VALUE
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _number(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.1%}"


def _bytes(value: int | None) -> str:
    return NO_VALUE if value is None else human_bytes(value)
