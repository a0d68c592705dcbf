"""Everything that was measured, as one JSON-ready object. Tables and plots are made of it and of nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from mlxinfer.bench.machine import ModelBytes, bandwidth_share
from mlxinfer.bench.metrics import Summary, metrics_of, summarize
from mlxinfer.bench.process import command_line
from mlxinfer.bench.runner import label
from mlxinfer.bench.stats import Spread, ratio
from mlxinfer.bench.workloads import workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mlxinfer.bench.client import Record
    from mlxinfer.bench.runner import Measured, Plan, Round
    from mlxinfer.bench.targets import Target
    from mlxinfer.bench.words import Sizer

FORMAT = 1
SizeAt: TypeAlias = Callable[[int], ModelBytes | None]
"""What a decode step of the first target's model reads at a context; None where that isn't known."""

COMPARED: dict[str, Callable[[Summary], float | None]] = {
    "total_tok_s": lambda s: s.total_tok_s,
    "decode_tok_s": lambda s: s.decode_tok_s,
    "prefill_tok_s": lambda s: s.prefill_tok_s,
    "ttft_p50": lambda s: _p50(s.ttft),
    "ttft_p95": lambda s: s.ttft.p95 if s.ttft else None,
    "tpot_p50": lambda s: _p50(s.tpot),
    "itl_p50": lambda s: _p50(s.itl),
    "itl_p99": lambda s: s.itl.p99 if s.itl else None,
    "e2e_p50": lambda s: _p50(s.e2e),
    "longest_gap": lambda s: s.longest_gap,
    "wall": lambda s: s.wall or None,
}
"""The figures of one round of which ratios are taken; the workload's own named figures come on top."""


def _p50(found: Spread | None) -> float | None:
    return found.p50 if found else None


def build(
    plan: Plan,
    targets: Sequence[Target],
    measured: Sequence[Measured],
    sizer: Sizer,
    *,
    machine: dict[str, Any],
    bandwidth: dict[str, Any],
    started: str,
    flags: dict[str, Any],
    size_at: SizeAt = lambda _: None,
) -> dict[str, Any]:
    """The report. `started` is an ISO date; `flags` are the settings that hold for the server the bench started."""
    first = targets[0]
    return {
        "format": FORMAT,
        "started": started,
        "machine": machine,
        "bandwidth": bandwidth,
        "plan": dataclasses.asdict(plan) | {"prompt_tokens_by": sizer.how},
        "targets": [_target(target, flags if target is first and target.server else {}) for target in targets],
        "model": size.as_dict() if (size := size_at(1)) else None,
        "results": [_result(one, targets, bandwidth, size_at) for one in measured],
    }


def _target(target: Target, flags: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": target.name,
        "url": target.endpoint.url,
        "model": target.endpoint.model,
        "ours": target.ours,
        "says": target.facts,
        "command": " ".join(target.server.command) if target.server else command_line(target.pid),
        "settings": flags,
        "request_fields": dict(target.endpoint.extra) | {"temperature": 0},
    }


def _result(
    measured: Measured, targets: Sequence[Target], bandwidth: dict[str, Any], size_at: SizeAt
) -> dict[str, Any]:
    names = [target.name for target in targets]
    by_target = {name: _of_target(measured.rounds[name]) for name in names}
    first = measured.rounds[names[0]]
    by_target[names[0]]["bandwidth_share"] = _share(first, bandwidth["gb_s"], size_at)
    own, load = workload(measured.workload), measured.load
    clients = None if load.rate is not None else load.concurrency or own.clients
    crowd = "" if not own.scales else f"{clients} at a time: " if clients else "as they come: "
    return {
        "workload": measured.workload,
        "label": label(measured.workload, load),
        "about": crowd + own.about,
        "clients": clients,
        "rate": load.rate,
        "targets": by_target,
        "ratios": {name: _ratios(first, measured.rounds[name]) for name in names[1:]},
    }


def _of_target(rounds: Sequence[Round]) -> dict[str, Any]:
    """Pooled over the rounds, and each round by itself; named figures are medians over the rounds."""
    errors = Counter(record.error for one in rounds for record in one.records if record.error is not None)
    peaks = [one.peak_memory for one in rounds if one.peak_memory is not None]
    named = {key: None for one in rounds for key in one.figures}
    return {
        "summary": summarize([one.counted for one in rounds]).as_dict(),
        "figures": {key: statistics.median(one.figures[key] for one in rounds if key in one.figures) for key in named},
        "errors": [{"message": message, "count": count} for message, count in errors.most_common()],
        "peak_memory_bytes": max(peaks, default=None),
        "bandwidth_share": None,
        "client_cpu": max((one.client_cpu for one in rounds), default=0.0),
        "rounds": [values(one) | {"requests": [_request(record) for record in one.records]} for one in rounds],
    }


def values(one: Round) -> dict[str, float | None]:
    """The figures of one round by name. None for all when a request failed: with less work done nothing compares."""
    found: dict[str, float | None] = dict.fromkeys((*COMPARED, *one.figures))
    if any(record.error is not None for record in one.records):
        return found
    summary = summarize([one.counted])
    return {name: take(summary) for name, take in COMPARED.items()} | one.figures


def _request(record: Record) -> dict[str, Any]:
    """What came of one request; moments count from the sending."""
    found = metrics_of(record)
    return {
        "phase": record.phase,
        "label": record.label,
        "client": record.client,
        "turn": record.turn,
        "error": record.error,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "tokens": found.tokens if found else None,
        "ttft": found.ttft if found else None,
        "e2e": found.e2e if found else None,
        "longest_gap": max(found.gaps, default=None) if found else None,
    }


def _ratios(ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, Any]:
    """By figure: the median, lowest and highest of the per-round ratios ours / theirs."""
    mine, other = [values(one) for one in ours], [values(one) for one in theirs]
    found: dict[str, Any] = {}
    for name in {key: None for one in (*mine, *other) for key in one}:
        made = ratio([one.get(name) for one in mine], [one.get(name) for one in other])
        if made is not None:
            found[name] = dataclasses.asdict(made)
    return found


def _share(rounds: Sequence[Round], gb_s: float, size_at: SizeAt) -> float | None:
    """Decode as a share of the bandwidth limit; only where one stream decodes at a time."""
    counted = [one.counted for one in rounds]
    speed = summarize(counted).decode_tok_s
    known = [r for records in counted for r in records if r.prompt_tokens is not None and r.error is None]
    if speed is None or not known or any(record.client for records in counted for record in records):
        return None
    context = statistics.mean((r.prompt_tokens or 0) + (r.completion_tokens or 0) / 2 for r in known)
    size = size_at(round(context))
    return bandwidth_share(speed, size, context, gb_s) if size else None


def write(report: dict[str, Any], path: Path) -> None:
    """Write the report as JSON, in one rename. Raises OSError."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temp.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)
