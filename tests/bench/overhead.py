"""`python -m tests.bench.overhead`: time per decode step where the model costs next to nothing, against mlx-lm.

On Metal a small model's step is bounded by what the host does for it; on a CPU this is the nearest proxy. Ratios are
medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine.engine import Engine, Request
from mlxinfer.engine.governor import Governor
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.sampling import RowSampling
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 24
PROMPT = tuple(range(5, 25))


class _Here:
    """The MLX thread's part, played by this thread."""

    def check_alive(self) -> None: ...

    def post(self, function: Callable[[], None]) -> None:
        function()

    def detach(self, engine: Engine) -> None: ...


def ours(engine: Engine, rows: int, steps: int, number: int) -> float:
    """Seconds per decode step of `rows` rows, through the whole engine: scheduler, runner, sampling, sinks."""
    for i in range(rows):
        spec = RowSpec(f"{number}-{i}", (*PROMPT, 30 + i), RowSampling(temperature=0.0), 1)
        engine.submit(Request(spec, 2 * steps, frozenset()), lambda _: None)
    while any(r.num_scheduled < 4 for r in engine.state.requests.values()):
        engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    taken = time.perf_counter() - start
    for name in list(engine.state.requests):
        engine.cancel(name)
    while engine.step():
        pass
    return taken / steps


def mlx_lm_one(model: Any, steps: int) -> float:
    """Seconds per token of mlx-lm's generate_step."""
    from mlx_lm.generate import generate_step

    stream = generate_step(mx.array(PROMPT), model, max_tokens=steps + 4)
    for _ in range(3):
        next(stream)
    start = time.perf_counter()
    for _ in range(steps):
        next(stream)
    return (time.perf_counter() - start) / steps


def mlx_lm_batch(model: Any, rows: int, steps: int) -> float:
    """Seconds per step of mlx-lm's BatchGenerator with `rows` rows."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, max_tokens=4 * steps)
    generator.insert([[*PROMPT, 30 + i] for i in range(rows)])
    made = 0
    while made < rows * 3:
        made += len(generator.next_generated())
    start = time.perf_counter()
    for _ in range(steps):
        generator.next_generated()
    taken = (time.perf_counter() - start) / steps
    generator.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    model = tiny.build_model(tiny.config(num_hidden_layers=LAYERS))
    engine = Engine(
        _Here(),  # type: ignore[arg-type]
        Runner(model, 320),
        max_num_seqs=32,
        max_queue=64,
        prefill_chunk=512,
        prefix_bytes=0,
        memory=Governor(1 << 32),
    )
    found: dict[str, list[tuple[float, float]]] = {"1 row": [], "8 rows": []}
    for number in range(args.rounds):
        found["1 row"].append((ours(engine, 1, args.steps, 2 * number), mlx_lm_one(model, args.steps)))
        found["8 rows"].append((ours(engine, 8, args.steps, 2 * number + 1), mlx_lm_batch(model, 8, args.steps)))
    for name, pairs in found.items():
        ratios = [a / b for a, b in pairs]
        line = {
            "bench": "overhead",
            "rows": name,
            "layers": LAYERS,
            "ratio_median": round(statistics.median(ratios), 3),
            "ratios": [round(r, 2) for r in ratios],
            "ours_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 2),
            "mlx_lm_ms": round(statistics.median(b for _, b in pairs) * 1e3, 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
