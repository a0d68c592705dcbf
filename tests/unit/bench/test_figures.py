"""The named figures of each workload, on records written down by hand."""

from __future__ import annotations

import pytest

from mlxinfer.bench.client import Record
from mlxinfer.bench.figures import figures
from mlxinfer.bench.words import Sizer
from mlxinfer.bench.workloads import Call, Client, Phase


def record(label: str, phase: str, start: float, moments: list[float], **fields: object) -> Record:
    end = moments[-1] if moments else start
    made = Record(label, phase, 0, 0, start=start, end=end, events=[(moment, "x") for moment in moments])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_arrival_tells_the_streams_gaps_and_the_long_prompt_under_load_against_alone() -> None:
    records = [
        record("long", "alone", 0.0, [2.0]),
        record("stream", "load", 10.0, [11.0, 12.0, 13.0, 17.0]),
        record("stream", "load", 10.0, [11.0, 12.0]),
        record("long", "load", 12.0, [15.0, 95.0]),
    ]
    found = figures("arrival", records, (), Sizer())
    assert found["streams_longest_gap"] == 4.0  # the long one's own gap of 80 is not a stream's
    assert found["streams_itl_p50"] == 1.0
    assert found["streams_itl_p99_over_p50"] == pytest.approx(1 + 0.97 * 3)
    assert found["streams_alive"] == 1  # at 15, the second one had ended
    assert (found["long_ttft"], found["long_ttft_alone"], found["long_ttft_over_alone"]) == (3.0, 2.0, 1.5)


def test_overtake_tells_hi_and_whether_there_was_something_to_overtake() -> None:
    records = [
        record("long", "alone", 0.0, [4.0]),
        record("long", "load", 10.0, [15.0]),
        record("hi", "load", 11.0, [11.25]),
    ]
    found = figures("overtake", records, (), Sizer())
    assert (found["hi_ttft"], found["hi_came_in_time"], found["long_ttft_over_alone"]) == (0.25, 1.0, 1.25)
    records[1] = record("long", "load", 10.0, [10.5])
    assert figures("overtake", records, (), Sizer())["hi_came_in_time"] == 0.0


def test_a_figure_whose_request_failed_is_left_out() -> None:
    records = [
        record("long", "alone", 0.0, [4.0], error="broke"),
        record("long", "load", 10.0, [15.0]),
        record("hi", "load", 11.0, [11.25]),
    ]
    found = figures("overtake", records, (), Sizer())
    assert found["long_ttft"] == 5.0
    assert not {"long_ttft_alone", "long_ttft_over_alone"} & set(found)


def test_shared_compares_what_was_computed_with_the_prefix_once_and_the_suffixes() -> None:
    system = {"role": "system", "content": "p " * 100}
    phase = Phase("shared", (Client((Call("chat", (system,), 8),)),))
    usage = [(120, 0), (130, 100)]
    records = [record("chat", "shared", 0, [1.0], prompt_tokens=p, cached_tokens=c) for p, c in usage]
    found = figures("shared", records, (phase,), Sizer(lambda text: len(text.split())))
    assert (found["computed_tokens"], found["needed_tokens"]) == (150, 150)
    records[1].cached_tokens = 0
    found = figures("shared", records, (phase,), Sizer(lambda text: len(text.split())))
    assert found["computed_over_needed"] == pytest.approx(250 / 150)
    # Named only where there are any: the first has none. Never named: not known.
    records[0].cached_tokens, records[1].cached_tokens = None, 100
    assert figures("shared", records, (phase,), Sizer(lambda text: len(text.split())))["computed_tokens"] == 150
    records[1].cached_tokens = None
    assert figures("shared", records, (phase,), Sizer()) == {}


def test_agent_counts_what_was_known_and_computed_all_the_same() -> None:
    # Turn 1 knows 100 + 10 tokens of turn 0, turn 2 knows 150 + 10 of turn 1.
    usage = [(100, 10, 0), (150, 10, 100), (200, 10, 160)]
    records = [
        record("turn", "agent", 0, [1.0], turn=i, prompt_tokens=p, completion_tokens=c, cached_tokens=k)
        for i, (p, c, k) in enumerate(usage)
    ]
    found = figures("agent", records, (), Sizer())
    assert (found["turns"], found["recomputed_tokens"]) == (3, 10)
    assert found["recomputed_share"] == pytest.approx(10 / (110 + 160))
    records[0].cached_tokens = records[1].cached_tokens = None
    assert figures("agent", records, (), Sizer())["recomputed_tokens"] == 110
    records[2].cached_tokens = None
    assert "recomputed_share" not in figures("agent", records, (), Sizer())


def test_restart_compares_the_time_after_with_the_time_before() -> None:
    records = [record("long", "before", 0.0, [4.0]), record("long", "after", 9.0, [9.5])]
    assert figures("restart", records, (), Sizer()) == {"cold_ttft": 4.0, "again_ttft": 0.5, "again_over_cold": 0.125}


def test_other_workloads_have_none() -> None:
    assert figures("chat", [record("chat", "chat", 0.0, [1.0])], (), Sizer()) == {}
