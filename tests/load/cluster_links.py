"""Plans against measurement over slow links: `python -m tests.load.cluster_links [--tokens 16]`.

Ranks of this machine are joined by relays with a delay and a rate. Each setting's links are measured as `cluster check`
does it, the plan is made of that, and greedy decoding of one stream and of eight is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import tempfile
import time
from pathlib import Path
from typing import Any

from mlxinfer.distributed import planning
from mlxinfer.distributed.cluster_file import Cluster, Link, Node
from mlxinfer.distributed.ranks import RankSet, Seat
from mlxinfer.engine.engine import Engine, Request
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.formats.files import read_json_object
from tests import tiny
from tests.clusters import MOE, SECRET, engine_over, parts_of
from tests.relay import SlowRing

SETTINGS: tuple[tuple[str, int, float, float], ...] = (
    ("tensor", 2, 10000, 100),
    ("tensor", 2, 5000, 2),
    ("tensor", 4, 30000, 50),
    ("pipeline", 2, 20000, 100),
    ("pipeline", 3, 25000, 1),
    ("pipeline", 4, 40000, 20),
    ("both", 4, 20000, 20),
)
"""Kind, ranks, one way delay in us, MB/s."""
MODEL: dict[str, Any] = MOE | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def measured_link(delay_us: float, mb_s: float) -> tuple[float, float]:
    """(us, GB/s) as `cluster check` finds them."""
    with SlowRing(delay_us, mb_s) as ring:
        ranks = RankSet([Seat(ring.place(rank), "") for rank in range(2)], SECRET, begin="probe")
        ranks.close()
    return ranks.facts["latency_s"] * 1e6, ranks.facts["bytes_per_s"] / 1e9


def rates(engine: Engine, streams: int, tokens: int, rounds: int = 2) -> float:
    """Tokens a second of all streams together, the best of some rounds; the first tokens are not counted."""
    best = 0.0
    for number in range(rounds):
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for i in range(streams):
            spec = RowSpec(f"{streams}-{number}-{i}", (5 + i, 6, 7), RowSampling(temperature=0.0), i)
            engine.submit(Request(spec, tokens, frozenset()), events.put)
        times: list[float] = []
        left = streams
        while left:
            event = events.get(timeout=120)
            assert event.error is None, event.error
            times += [time.perf_counter()] if event.token is not None else []
            left -= event.finished is not None
        from_ = len(times) // 4
        best = max(best, (len(times) - from_ - 1) / (times[-1] - times[from_]))
    return best


def one(kind: Any, size: int, delay_us: float, mb_s: float, source: Path, folder: Path, tokens: int) -> dict[str, Any]:
    layers = int(MODEL["num_hidden_layers"])
    stages = {"tensor": 0, "pipeline": size, "both": size // 2}[kind]
    split = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    parts = parts_of(source, folder, kind, size, split)
    # What computing takes is measured where the links cost nothing.
    with engine_over(parts) as engine:
        # Ranks that wait for each other spin, and more of them than cores are in each other's way: the best of many.
        alone = rates(engine, 1, tokens, 8)
    latency, bandwidth = measured_link(delay_us, mb_s)
    nodes = tuple(Node(f"n{rank}", "127.0.0.1", 8, 1e6, port=9000 + rank) for rank in range(size))
    links = tuple(
        Link((a.name, b.name), "ethernet", latency, bandwidth, ("127.0.0.1", "127.0.0.1"))
        for a, b in itertools.combinations(nodes, 2)
    )
    config = read_json_object(source / "config.json") or {}
    found = planning.plan(Cluster(nodes, links, SECRET), config, context=64)
    plan = next(p for p in found.plans if p.kind == kind and p.size == size)
    predicted = 1 / plan.tok_s + 1 / alone
    with SlowRing(delay_us, mb_s) as ring, engine_over(parts, places=[ring.place(r) for r in range(size)]) as engine:
        single, eight = rates(engine, 1, tokens), rates(engine, 8, tokens)
    return {
        "kind": kind,
        "ranks": size,
        "delay_us": delay_us,
        "mb_s": mb_s,
        "measured_us": round(latency),
        "measured_mb_s": round(bandwidth * 1e3, 1),
        "communication_share": round(1 - single / alone, 3),
        "predicted_ms": round(predicted * 1e3, 2),
        "step_ms": round(1e3 / single, 2),
        "off": round(predicted * single - 1, 3),
        "eight_over_one": round(eight / single, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--only", type=int, nargs="*", help="Numbers of settings.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = tiny.write_folder(Path(folder) / "m", **MODEL)
        for number, setting in enumerate(SETTINGS):
            if asked.only is None or number in asked.only:
                print(json.dumps(one(*setting, source, Path(folder) / str(number), asked.tokens)), flush=True)


if __name__ == "__main__":
    main()
