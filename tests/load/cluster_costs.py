"""What a model over ranks costs beside its speed: `python -m tests.load.cluster_costs MODEL [--ranks 3]`.

MODEL is a folder of safetensors whose heads can be shared by so many ranks. Measured are the bytes of each rank's part
on disk and over the network to an agent, what idle ranks take of a core, and the longest gap of streams while a prompt
of 1000 tokens arrives, over the median one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.distributed.agent import Agent
from mlxinfer.distributed.cluster_file import Node
from mlxinfer.distributed.there import There
from mlxinfer.engine.engine import Engine, Request
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.worker import mlx_thread
from tests import tiny
from tests.clusters import MOE, SECRET, engine_over, parts_of
from tests.counting import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

STREAMS, LONG = 4, 1000
WAYS: tuple[tuple[str, tuple[int, ...]], ...] = (("tensor", ()), ("pipeline", (12, 12)))
WORK: dict[str, Any] = MOE | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "mlp_only_layers": list(range(24)),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
"""A dense model whose steps are work for two cores: mlx's products of experts in float32 cost on a CPU as much for each
row."""


def sizes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor."""
    return {name: array.shape for file in files for name, array in mx.load(str(file)).items()}  # pyright: ignore[reportAttributeAccessIssue]


def parts(model: Path, ranks: int, folder: Path) -> dict[str, Any]:
    """Bytes of each rank's part, over what it has to have: its share of what is shared out, and all of the rest."""
    cut = mlx_thread().call(lambda: parts_of(model, folder / "cut", "tensor", ranks))
    whole = mlx_thread().call(
        lambda: {n: a.nbytes for f in model.glob("*.safetensors") for n, a in mx.load(str(f)).items()}
    )  # pyright: ignore[reportAttributeAccessIssue]
    shapes, own = (mlx_thread().call(lambda f=f: sizes(f.glob("*.safetensors"))) for f in (model, cut[-1]))
    shared = sum(size for name, size in whole.items() if own[name] != shapes[name])
    replicated = sum(whole.values()) - shared
    needed = shared / ranks + replicated
    disk = [sum(file.stat().st_size for file in one.iterdir()) for one in cut]
    agent = Agent("127.0.0.1", 0, SECRET, folder / "there")
    threading.Thread(target=agent.run, daemon=True).start()
    with counted(agent.port) as relay:
        there = There(Node("there", "127.0.0.1", 8, 100, port=relay.port), SECRET)
        there.bring(f"model/{cut[-1].name}", cut[-1])
        there.close()
    agent.close()
    return {
        "ranks": ranks,
        "whole_bytes": sum(whole.values()),
        "replicated_share": round(replicated / sum(whole.values()), 4),
        "disk_over_needed": [round(one / needed, 4) for one in disk],
        "network_over_needed": round(relay.total / needed, 4),
    }


def idle(engine: Engine, seconds: float = 30.0) -> list[float]:
    """Of each rank, the share of a core that it takes while nobody asks."""
    runner: Any = engine.runner

    def cpu() -> list[float]:
        taken = []
        for pid in runner.ranks.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            taken.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return taken

    time.sleep(2)
    before = cpu()
    time.sleep(seconds)
    return [round((after - was) / seconds, 4) for was, after in zip(before, cpu(), strict=True)]


def gaps(engine: Engine, seed: int) -> tuple[float, float]:
    """The longest gap of running streams after a long prompt arrived, and the median gap before it."""
    events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def submit(number: int, prompt: tuple[int, ...], tokens: int) -> None:
        spec = RowSpec(f"{seed}-{number}", prompt, RowSampling(temperature=0.0), number)
        engine.submit(Request(spec, tokens, frozenset()), lambda event: events.put((number, event)))

    for number in range(STREAMS):
        submit(number, (5 + number + seed, 6, 7), 400)
    last: dict[int, float] = {}
    quiet: list[float] = []
    during: list[float] = []
    long_at: float | None = None
    first = False
    while not first:
        number, event = events.get(timeout=120)
        assert event.error is None, event.error
        now = time.perf_counter()
        if number == STREAMS:
            first = event.token is not None
            continue
        if number in last:
            (quiet if long_at is None else during).append(now - last[number])
        last[number] = now
        if long_at is None and len(quiet) >= 60 * STREAMS:
            long_at = now
            submit(STREAMS, tuple(3 + (seed + i) % 90 for i in range(LONG)), 1)
    for number in range(STREAMS):
        engine.cancel(f"{seed}-{number}")
    return max(during), statistics.median(quiet[len(quiet) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kind", choices=[kind for kind, _ in WAYS], help="Only this way of splitting, for the gaps.")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    # The ranks of one machine share its cores.
    os.environ.setdefault("MLXINFER_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(json.dumps(parts(asked.model, asked.ranks, folder)), flush=True)
        source = tiny.write_folder(folder / "m", **WORK)
        for kind, split in WAYS if asked.kind is None else [way for way in WAYS if way[0] == asked.kind]:
            with engine_over(parts_of_here(source, folder, kind, split), max_num_seqs=16, prefill_chunk=512) as engine:
                found = [gaps(engine, seed) for seed in range(asked.rounds)]
                report: dict[str, Any] = {
                    "kind": kind,
                    "longest_gap_over_median": [round(longest / median, 2) for longest, median in found],
                    "median_gap_ms": round(1e3 * statistics.median(median for _, median in found), 1),
                }
                print(json.dumps(report | {"idle_share_of_a_core": idle(engine)}), flush=True)


def parts_of_here(source: Path, folder: Path, kind: Any, split: tuple[int, ...]) -> list[Path]:
    return mlx_thread().call(lambda: parts_of(source, folder / kind, kind, 2, split))


if __name__ == "__main__":
    main()
