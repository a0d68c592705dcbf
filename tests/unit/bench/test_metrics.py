"""TTFT, TPOT, ITL, E2E and what is made of them, on moments written down by hand."""

from __future__ import annotations

import pytest

from mlxinfer.bench.client import Record
from mlxinfer.bench.metrics import measure, metrics_of, summarize, wall


def record(start: float, moments: list[float], end: float, **fields: object) -> Record:
    made = Record("chat", "p", 0, 0, start=start, end=end, events=[(moment, "x") for moment in moments])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_one_request_by_the_definitions() -> None:
    found = measure(10.0, [(10.5, "a"), (10.7, "b"), (11.2, "c")], 11.5, 4)
    assert found is not None
    assert found.ttft == pytest.approx(0.5)
    assert found.e2e == pytest.approx(1.5)
    assert found.tpot == pytest.approx((1.5 - 0.5) / 3)
    assert found.gaps == pytest.approx((0.2, 0.5))
    assert (found.tokens, found.counted) == (4, False)


def test_without_usage_the_chunks_are_counted_and_it_is_said() -> None:
    found = measure(0.0, [(1.0, "a"), (2.0, "b")], 2.0, None)
    assert found is not None
    assert (found.tokens, found.counted) == (2, True)


def test_one_token_has_no_tpot_and_no_text_has_no_metrics() -> None:
    one = measure(0.0, [(1.0, "a")], 1.0, 1)
    assert one is not None
    assert one.tpot is None
    assert measure(0.0, [], 3.0, 0) is None


def test_failed_requests_are_counted_and_in_no_other_figure() -> None:
    good = record(0.0, [1.0, 2.0], 2.0, completion_tokens=2, prompt_tokens=10, cached_tokens=4)
    bad = record(0.0, [9.0], 100.0, completion_tokens=50, prompt_tokens=10, cached_tokens=0, error="broke")
    empty = record(0.0, [], 4.0, completion_tokens=1, prompt_tokens=10, cached_tokens=0)
    both = summarize([[good, bad, empty]])
    assert (both.requests, both.errors, both.empty) == (3, 1, 1)
    assert both.ttft is not None
    assert (both.ttft.p50, both.ttft.count) == (1.0, 1)
    assert both.output_tokens == 2
    assert both.wall == 4.0
    assert both.cached_tokens == 4
    assert both.cached_share == pytest.approx(4 / 20)
    assert both.longest_gap == 1.0


def test_where_all_fail_there_are_no_figures() -> None:
    none = summarize([[record(0.0, [], 5.0, error="no")]])
    assert (none.errors, none.ttft, none.total_tok_s, none.longest_gap, none.wall) == (1, None, None, None, 0.0)


def test_rates_are_tokens_over_wall_and_medians_over_rounds() -> None:
    rounds = [[record(0.0, [1.0, 2.0], length, completion_tokens=10)] for length in (2.0, 5.0, 10.0)]
    found = summarize(rounds)
    assert found.wall == 5.0
    assert found.total_tok_s == 2.0
    assert found.output_tokens == 30


def test_the_wall_goes_from_the_first_sent_to_the_last_ended() -> None:
    assert wall([record(3.0, [4.0], 5.0), record(1.0, [2.0], 4.0)]) == 4.0
    assert wall([]) == 0.0


def test_prefill_speed_leaves_out_prompts_that_were_mostly_cached() -> None:
    cold = record(0.0, [2.0], 2.0, prompt_tokens=100, cached_tokens=20)
    warm = record(0.0, [0.1], 0.1, prompt_tokens=100, cached_tokens=99)
    assert summarize([[cold, warm]]).prefill_tok_s == pytest.approx(80 / 2)
    assert summarize([[warm]]).prefill_tok_s is None


def test_tokens_per_chunk_shows_when_a_chunk_holds_several() -> None:
    assert summarize([[record(0.0, [1.0, 2.0], 2.0, completion_tokens=8)]]).tokens_per_chunk == 4.0
    counted = summarize([[record(0.0, [1.0, 2.0], 2.0)]])
    assert (counted.tokens_per_chunk, counted.tokens_counted_from_chunks) == (1.0, True)


def test_p99_over_p50_of_the_gaps() -> None:
    # Gaps 1, 1, 3: the median 1, the 99th percentile at rank 1.98, that is 1 + 0.98 * 2.
    found = summarize([[record(0.0, [1.0, 2.0, 3.0, 6.0], 6.0)]])
    assert found.itl_p99_over_p50 == pytest.approx(2.96)


def test_a_record_with_an_error_has_no_metrics_even_with_text() -> None:
    assert metrics_of(record(0.0, [1.0], 2.0, error="broke off")) is None
