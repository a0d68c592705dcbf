"""Workloads: the same seed the same requests, every round new text, and each shaped as its name says."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from mlxinfer.bench.words import Sizer
from mlxinfer.bench.workloads import LONG, SHARED, TURNS, WORKLOADS, Load, arrivals, phases, workload
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlxinfer.bench.workloads import Phase

COUNT = Sizer(lambda text: len(text.split()))


def make(name: str, *, seed: int = 1, index: int = 0, load: Load | None = None) -> tuple[Phase, ...]:
    return phases(workload(name), seed=seed, round_index=index, sizer=COUNT, load=load or Load())


def firsts(made: tuple[Phase, ...]) -> list[str]:
    """How each conversation begins."""
    return [client.calls[0].messages[0]["content"] for phase in made for client in phase.clients]


def size(messages: tuple[dict[str, str], ...]) -> int:
    return sum(COUNT.tokens(message["content"]) for message in messages)


@pytest.mark.parametrize("name", WORKLOADS)
def test_one_seed_gives_the_same_requests_and_another_others(name: str) -> None:
    assert make(name) == make(name)
    assert make(name) != make(name, seed=2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_two_conversations_share_how_they_begin_across_rounds(name: str) -> None:
    one, other = firsts(make(name, index=0)), firsts(make(name, index=1))
    heads = [text[:10] for text in (*one, *other)]
    for a in one:
        for b in other:
            # Ten random digits: that the first six are the same by chance does not happen in this test.
            assert a[:6] != b[:6]
    # Within a round only these two are about a prefix that comes again.
    assert len(set(heads)) == (2 if name in ("shared", "restart") else len(heads))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_first_message_is_a_system_message_and_the_last_a_users(name: str) -> None:
    for phase in make(name):
        for client in phase.clients:
            assert client.calls[0].messages[0]["role"] == "system"
            assert all(call.messages[-1]["role"] == "user" for call in client.calls)


def test_mixed_spreads_lengths_evenly_over_its_range_in_random_order() -> None:
    (phase,) = make("mixed")
    calls = [call for client in phase.clients for call in client.calls]
    assert (len(phase.clients), len(calls)) == (8, 16)
    lengths = [size(call.messages) for call in calls]
    assert all(30 <= n <= 900 for n in lengths)
    assert max(lengths) > 850
    assert min(lengths) < 65
    assert lengths != sorted(lengths)
    assert all(24 <= call.max_tokens <= 96 for call in calls)
    assert sorted(lengths) == sorted(
        size(call.messages) for client in make("mixed", seed=5)[0].clients for call in client.calls
    )


def test_shared_is_one_system_prompt_and_eight_questions_at_once() -> None:
    (phase,) = make("shared")
    systems = {client.calls[0].messages[0]["content"] for client in phase.clients}
    assert len(systems) == 1
    assert COUNT.tokens(systems.pop()) == SHARED
    assert len({client.calls[0].messages[1]["content"] for client in phase.clients}) == len(phase.clients) == 8
    assert all(client.after_s == 0 for client in phase.clients)


def test_arrival_sends_the_long_prompt_when_four_streams_are_live_and_once_alone_before() -> None:
    alone, load = make("arrival")
    assert (alone.counted, load.counted) == (False, True)
    assert [client.calls[0].label for client in load.clients] == ["stream"] * 4 + ["long"]
    assert [client.when_live for client in load.clients] == [0, 0, 0, 0, 4]
    for phase in (alone, load):
        assert size(phase.clients[-1].calls[0].messages) == LONG


def test_overtake_sends_hi_one_second_after_a_long_prompt() -> None:
    alone, load = make("overtake")
    assert not alone.counted
    long, hi = load.clients
    assert size(long.calls[0].messages) == LONG
    assert (hi.after_s, hi.calls[0].messages[-1]["content"]) == (1.0, "hi")


def test_agent_is_one_conversation_of_a_task_and_ten_tool_results() -> None:
    (phase,) = make("agent")
    (client,) = phase.clients
    assert client.conversation
    assert len(client.calls) == 1 + TURNS
    assert all(call.messages[0]["content"].startswith("Tool result:") for call in client.calls[1:])


def test_restart_asks_the_same_before_and_after() -> None:
    before, after = make("restart")
    assert before.clients == after.clients
    assert (before.restart_before, after.restart_before) == (False, True)
    assert not before.counted


def test_concurrency_deals_the_calls_to_that_many_clients() -> None:
    (phase,) = make("chat", load=Load(concurrency=3, requests=7))
    assert [len(client.calls) for client in phase.clients] == [3, 2, 2]
    assert len(make("chat", load=Load(concurrency=5))[0].clients) == 5


def test_an_open_loop_has_one_client_for_each_arrival() -> None:
    (phase,) = make("chat", load=Load(rate=2.0, requests=6))
    moments = [client.after_s for client in phase.clients]
    assert [len(client.calls) for client in phase.clients] == [1] * 6
    assert moments[0] == 0
    assert moments == sorted(moments)
    assert moments == [client.after_s for client in make("chat", load=Load(rate=2.0, requests=6))[0].clients]
    assert moments != [client.after_s for client in make("chat", seed=2, load=Load(rate=2.0, requests=6))[0].clients]


def test_arrivals_have_the_rate_and_the_irregularity_of_a_poisson_process() -> None:
    moments = arrivals(random.Random(1), 4.0, 4001)
    gaps = [b - a for a, b in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.05)
    # Exponential gaps: the deviation equals the mean.
    assert variance**0.5 == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_max_tokens_limits_every_answer(name: str) -> None:
    made = make(name, load=Load(max_tokens=5))
    assert {call.max_tokens for phase in made for client in phase.clients for call in client.calls} == {5}


def test_an_unknown_workload_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidRequestError, match="single, chat"):
        workload("chatt")
