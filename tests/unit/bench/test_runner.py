"""Rounds: the order of the targets, the same work for each, what counts and what only warms up."""

from __future__ import annotations

from typing import Any

import pytest

from mlxinfer.bench.client import Endpoint, Record
from mlxinfer.bench.runner import Plan, label, one_round, order, run
from mlxinfer.bench.targets import Target
from mlxinfer.bench.words import Sizer
from mlxinfer.bench.workloads import Load, Phase, phases, workload


class Log:
    """In place of the driver: remembers who was asked what, and answers at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []

    def drive(self, endpoint: Endpoint, phase: Phase, *, timeout_s: float) -> list[Record]:
        self.calls.append((endpoint.url, phase.name, phase.clients[0].calls[0].messages[0]["content"]))
        return [
            Record(c.calls[0].label, phase.name, i, 0, 0.0, 2.0, [(1.0, "a"), (2.0, "b")])
            for i, c in enumerate(phase.clients)
        ]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr("mlxinfer.bench.runner.drive", made.drive)
    return made


def target(name: str) -> Target:
    return Target(name, Endpoint(name, "m"), ours=False)


A, B = target("A"), target("B")


def test_targets_take_turns_in_an_order_that_alternates(log: Log) -> None:
    run(Plan(("single",), seed=1, rounds=4, warmup=0), [A, B], Sizer())
    assert [url for url, _, _ in log.calls] == ["A", "B", "B", "A", "A", "B", "B", "A"]
    assert order([A, B], 3) == [B, A]


def test_each_target_gets_the_same_text_in_a_round_and_new_text_in_the_next(log: Log) -> None:
    run(Plan(("single",), seed=1, rounds=2, warmup=0), [A, B], Sizer())
    first, second, third, fourth = (text for _, _, text in log.calls)
    assert first == second
    assert third == fourth
    assert first != third


def test_warm_up_rounds_do_the_same_kind_of_work_on_other_text_and_are_not_in_the_results(log: Log) -> None:
    lines: list[str] = []
    (measured,) = run(Plan(("single",), seed=1, rounds=2, warmup=2), [A], Sizer(), lines.append)
    assert len(log.calls) == 4
    assert len({text for _, _, text in log.calls}) == 4
    assert len(measured.rounds["A"]) == 2
    assert lines[0] == "single: warm-up, A"
    assert lines[-1] == "single: round 2 of 2, A"


def test_only_counted_phases_make_the_general_figures(log: Log) -> None:
    (measured,) = run(Plan(("overtake",), seed=1, rounds=1, warmup=0), [A], Sizer())
    (done,) = measured.rounds["A"]
    assert [r.phase for r in done.records] == ["alone", "load", "load"]
    assert [r.phase for r in done.counted] == ["load", "load"]
    assert done.figures["long_ttft_over_alone"] == 1.0


def test_the_server_is_restarted_between_when_the_bench_owns_it_and_else_it_is_said(log: Log) -> None:
    class Server:
        pid = None

        def restart(self) -> None:
            log.calls.append(("restart", "", ""))

    owned: Any = target("A")
    owned.server = Server()
    todo = phases(workload("restart"), seed=1, round_index=0, sizer=Sizer(), load=Load())
    assert one_round(owned, "restart", todo, Sizer(), 1.0).figures["restarted"] == 1
    assert [name for name, _, _ in log.calls] == ["A", "restart", "A"]
    assert one_round(B, "restart", todo, Sizer(), 1.0).figures["restarted"] == 0


def test_a_sweep_runs_what_scales_with_each_number_of_clients_and_the_rest_once() -> None:
    plan = Plan(("single", "chat"), seed=1, concurrency=(1, 4))
    assert [label(name, load) for name, load in plan.loads()] == ["single", "chat, 1 client", "chat, 4 clients"]
    assert [label(name, load) for name, load in Plan(("chat",), seed=1, rate=2.5).loads()] == ["chat, 2.5/s"]
