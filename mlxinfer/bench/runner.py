"""Rounds: every target does the same work in turn, in an order that alternates, so that a machine that slows down or
speeds up does so for all of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxinfer.bench.drive import drive
from mlxinfer.bench.figures import figures
from mlxinfer.bench.process import PeakMemory
from mlxinfer.bench.workloads import Load, phases, workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlxinfer.bench.client import Record
    from mlxinfer.bench.targets import Target
    from mlxinfer.bench.words import Sizer
    from mlxinfer.bench.workloads import Phase


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, the same for each target."""

    workloads: tuple[str, ...]
    seed: int
    rounds: int = 3
    warmup: int = 1
    """Rounds before the first that counts."""
    concurrency: tuple[int, ...] = ()
    """Empty: the workload's own."""
    rate: float | None = None
    requests: int | None = None
    max_tokens: int | None = None
    timeout_s: float = 600.0

    def loads(self) -> list[tuple[str, Load]]:
        """(workload, load) of each thing to measure; a sweep only where the workload scales."""
        made: list[tuple[str, Load]] = []
        for name in self.workloads:
            if not workload(name).scales:
                made.append((name, Load(max_tokens=self.max_tokens)))
                continue
            for count in (None,) if self.rate is not None else self.concurrency or (None,):
                made.append((name, Load(count, self.rate, self.requests, self.max_tokens)))
        return made


@dataclass(frozen=True, slots=True)
class Round:
    """One target's part of one round."""

    records: tuple[Record, ...]
    counted: tuple[Record, ...]
    """Those of the phases that the general figures are made of."""
    figures: dict[str, float]
    peak_memory: int | None
    client_cpu: float
    """Of one core, the share that the load generator itself used; near 1 it is what was measured."""


@dataclass(slots=True)
class Measured:
    """One workload under one load: the rounds of each target, in the order of the targets."""

    workload: str
    load: Load
    rounds: dict[str, list[Round]] = field(default_factory=dict)


def run(
    plan: Plan, targets: Sequence[Target], sizer: Sizer, say: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """Measure everything. `say` gets one line for each part of a round."""
    return [_measure(plan, name, load, targets, sizer, say) for name, load in plan.loads()]


def _measure(
    plan: Plan, name: str, load: Load, targets: Sequence[Target], sizer: Sizer, say: Callable[[str], None]
) -> Measured:
    measured = Measured(name, load, {target.name: [] for target in targets})
    for index in range(-plan.warmup, plan.rounds):
        todo = phases(workload(name), seed=plan.seed, round_index=index, sizer=sizer, load=load)
        for target in order(targets, index):
            done = one_round(target, name, todo, sizer, plan.timeout_s)
            failed = sum(record.error is not None for record in done.records)
            which = f"round {index + 1} of {plan.rounds}" if index >= 0 else "warm-up"
            trouble = f", {failed} of {len(done.records)} requests failed" if failed else ""
            say(f"{label(name, load)}: {which}, {target.name}{trouble}")
            if index >= 0:
                measured.rounds[target.name].append(done)
    return measured


def order(targets: Sequence[Target], index: int) -> list[Target]:
    """A B in even rounds, B A in odd ones."""
    return list(targets) if index % 2 == 0 else list(reversed(targets))


def one_round(target: Target, name: str, todo: Sequence[Phase], sizer: Sizer, timeout_s: float) -> Round:
    """Run the phases one after the other."""
    records: list[Record] = []
    counted: list[Record] = []
    peaks: list[int] = []
    shares: list[float] = []
    extra: dict[str, float] = {}
    for phase in todo:
        if phase.restart_before:
            extra["restarted"] = float(target.server is not None)
            if target.server is not None:
                target.server.restart()
        with PeakMemory(target.current_pid()) as memory:
            began, busy = time.perf_counter(), time.process_time()
            made = drive(target.endpoint, phase, timeout_s=timeout_s)
            shares.append((time.process_time() - busy) / (time.perf_counter() - began))
        records += made
        counted += made if phase.counted else []
        if memory.peak is not None:
            peaks.append(memory.peak)
    found = figures(name, records, todo, sizer) | extra
    return Round(tuple(records), tuple(counted), found, max(peaks, default=None), max(shares, default=0.0))


def label(name: str, load: Load) -> str:
    """For example "chat", "chat, 4 clients" or "chat, 2/s"."""
    if load.rate is not None:
        return f"{name}, {load.rate:g}/s"
    return f"{name}, {load.concurrency} client{'s' * (load.concurrency != 1)}" if load.concurrency else name
