"""The figures that only one workload has, by name; seconds, tokens and ratios. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from mlxinfer.bench.metrics import metrics_of
from mlxinfer.bench.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlxinfer.bench.client import Record
    from mlxinfer.bench.words import Sizer
    from mlxinfer.bench.workloads import Phase


def figures(name: str, records: Sequence[Record], phases: Sequence[Phase], sizer: Sizer) -> dict[str, float]:
    """The named figures of one round of workload `name`; one that can't be known is left out."""
    found = MADE[name](records) if name in MADE else {}
    if name == "shared":
        found = _shared(records, sizer.tokens(phases[0].clients[0].calls[0].messages[0]["content"]))
    return {key: value for key, value in found.items() if value is not None}


def _shared(records: Sequence[Record], prefix: int) -> dict[str, float | None]:
    """Prompt tokens computed, against the least that can do: the prefix once and each suffix."""
    known = [r for r in records if r.error is None and r.prompt_tokens is not None]
    if len(known) < len(records) or not _tells_cached(records):
        return {}
    computed = sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in known)
    needed = prefix + sum((r.prompt_tokens or 0) - prefix for r in known)
    return {
        "computed_tokens": computed,
        "needed_tokens": needed,
        "computed_over_needed": computed / needed if needed > 0 else None,
    }


def _tells_cached(records: Sequence[Record]) -> bool:
    """Some servers name cached tokens only where there are any; one that never does isn't known to have none."""
    return any(record.cached_tokens is not None for record in records)


def _arrival(records: Sequence[Record]) -> dict[str, float | None]:
    streams = [r for r in records if r.label == "stream" and r.error is None]
    gaps = [gap for r in streams if (m := metrics_of(r)) is not None for gap in m.gaps]
    late = _first_text(records, "load", "long")
    alive = [r for r in streams if late is not None and r.end > late]
    p50 = percentile(gaps, 50) if gaps else None
    p99 = percentile(gaps, 99) if gaps else None
    return {
        "streams_longest_gap": max(gaps, default=None),
        "streams_itl_p50": p50,
        "streams_itl_p99": p99,
        "streams_itl_p99_over_p50": _over(p99, p50),
        # Below 4 the long prompt had less company than was meant: longer streams are needed.
        "streams_alive": len(alive) if late is not None else None,
        **_long_against_alone(records),
    }


def _overtake(records: Sequence[Record]) -> dict[str, float | None]:
    late, hi = _first_text(records, "load", "long"), [r for r in records if r.label == "hi"]
    return {
        "hi_ttft": _ttft(records, "load", "hi"),
        # 0: the long prompt was read before "hi" came, and there was nothing to overtake.
        "hi_came_in_time": float(late is not None and hi[0].start < late) if hi else None,
        **_long_against_alone(records),
    }


def _long_against_alone(records: Sequence[Record]) -> dict[str, float | None]:
    loaded, alone = _ttft(records, "load", "long"), _ttft(records, "alone", "long")
    return {"long_ttft": loaded, "long_ttft_alone": alone, "long_ttft_over_alone": _over(loaded, alone)}


def _agent(records: Sequence[Record]) -> dict[str, float | None]:
    """What was computed again, of the tokens that had been computed (or generated) in the turns before."""
    turns = sorted((r for r in records if r.error is None), key=lambda r: r.turn)
    first, last = (metrics_of(turns[0]), metrics_of(turns[-1])) if turns else (None, None)
    found: dict[str, float | None] = {
        "turns": len(turns),
        "ttft_first_turn": first.ttft if first else None,
        "ttft_last_turn": last.ttft if last else None,
    }
    if not _tells_cached(turns):
        return found
    seen = again = 0
    for before, turn in pairwise(turns):
        old_prompt, answer, prompt = before.prompt_tokens, before.completion_tokens, turn.prompt_tokens
        if old_prompt is None or answer is None or prompt is None:
            return found
        known = min(prompt, old_prompt + answer)
        seen += known
        again += max(0, known - (turn.cached_tokens or 0))
    return found | {"recomputed_tokens": again, "recomputed_share": again / seen if seen else None}


def _restart(records: Sequence[Record]) -> dict[str, float | None]:
    before, after = _ttft(records, "before", "long"), _ttft(records, "after", "long")
    return {"cold_ttft": before, "again_ttft": after, "again_over_cold": _over(after, before)}


def _ttft(records: Sequence[Record], phase: str, label: str) -> float | None:
    for record in records:
        if record.phase == phase and record.label == label and (found := metrics_of(record)) is not None:
            return found.ttft
    return None


def _first_text(records: Sequence[Record], phase: str, label: str) -> float | None:
    for record in records:
        if record.phase == phase and record.label == label and record.error is None and record.events:
            return record.events[0][0]
    return None


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


MADE: dict[str, Callable[[Sequence[Record]], dict[str, float | None]]] = {
    "arrival": _arrival,
    "overtake": _overtake,
    "agent": _agent,
    "restart": _restart,
}
