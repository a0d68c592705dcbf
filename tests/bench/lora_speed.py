"""`python -m tests.bench.lora_speed MODEL`: tokens a second of training, against mlx-lm's trainer.

The same base in float32, the same rows of random tokens (lengths log-normal, median 180, at most 2048), the same
adapters, AdamW and batch size; every row once. A process for each run, ours and theirs in turn. Only tokens of rows
count, padding doesn't; the time is that of the updates, without loading and evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 2048
RANK, RATE = 8, 1e-4


def lengths(count: int, seed: int = 0) -> list[int]:
    """Log-normal, median 180, sigma 0.9, at most LONGEST: its quantiles, so that few rows stand for many."""
    middles = [(number + 0.5) / count for number in range(count)]
    drawn = [180 * math.exp(0.9 * statistics.NormalDist().inv_cdf(part)) for part in middles]
    shuffled = np.random.default_rng(seed).permutation(np.array(drawn))
    return [int(min(max(length, 8), LONGEST)) for length in shuffled]


def token_rows(count: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(10, vocab_size, length).tolist() for length in lengths(count)]


def ours(folder: str, count: int, batch_size: int) -> dict[str, float]:
    from mlxinfer import zoo
    from mlxinfer.config import load_settings
    from mlxinfer.lora import TrainConfig, train
    from mlxinfer.lora.base import open_base
    from mlxinfer.lora.job import Rows
    from mlxinfer.lora.types import Example

    base = open_base(zoo.resolve(folder, load_settings()))
    rows = token_rows(count, base.config["vocab_size"])
    items = [Example(tuple(ids), (False, *[True] * (len(ids) - 1)), f"row {n}") for n, ids in enumerate(rows)]
    config = TrainConfig(epochs=1, micro_batch_size=batch_size, rank=RANK, alpha=2.0 * RANK, learning_rate=RATE)
    model = base.load(keep_packed=False)
    history = train(model, None, Rows(tuple(items)), None, config, model_config=base.config)
    updates = [record for record in history.records if record["kind"] == "update"]
    tokens = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *updates], updates, strict=False)]
    seconds = sum(n / record["tokens_per_second"] for n, record in zip(tokens, updates, strict=True))
    return {"tokens": sum(tokens), "seconds": seconds, "peak_bytes": updates[-1]["peak_memory_bytes"]}


def theirs(folder: str, count: int, batch_size: int) -> dict[str, float]:
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.datasets import CacheDataset
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load

    # On a CPU mlx compiles each new shape with the C++ compiler, for many seconds: left out, to their advantage.
    mx.disable_compile()
    model, _ = load(folder)
    model.set_dtype(mx.float32)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": 2.0, "dropout": 0.0})

    class Data:
        rows = token_rows(count, model.args.vocab_size)

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"tokens": self.rows[index]}

        def __len__(self) -> int:
            return len(self.rows)

        def process(self, row: dict[str, list[int]]) -> tuple[list[int], int]:
            return row["tokens"], 0

    seen: list[dict[str, Any]] = []

    class Report(TrainingCallback):
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            seen.append(train_info)

    updates = count // batch_size
    arguments = trainer.TrainingArgs(
        batch_size=batch_size, iters=updates, val_batches=1, steps_per_report=updates, steps_per_eval=10**9,
        steps_per_save=10**9, max_seq_length=LONGEST, adapter_file=f"{tempfile.mkdtemp()}/adapters.safetensors",
    )  # fmt: skip
    data = CacheDataset(Data())
    trainer.train(model, optim.AdamW(RATE), data, None, arguments, training_callback=Report())
    tokens = sum(len(row) for row in Data.rows)
    seconds = updates / seen[-1]["iterations_per_second"]
    return {"tokens": tokens, "seconds": seconds, "peak_bytes": mx.get_peak_memory()}


def measured(side: str, arguments: argparse.Namespace) -> float:
    command = [sys.executable, "-m", __spec__.name, arguments.model, "--side", side]
    command += ["--rows", str(arguments.rows), "--batch-size", str(arguments.batch_size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"side": side, **found}), flush=True)
    return found["tokens"] / found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=48, help="a multiple of the batch size")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "theirs"))
    arguments = parser.parse_args()
    if arguments.side:
        run = ours if arguments.side == "ours" else theirs
        print(json.dumps(run(str(Path(arguments.model)), arguments.rows, arguments.batch_size)))
        return
    ratios: list[float] = []
    for number in range(arguments.pairs):
        sides = ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours")
        speed = {side: measured(side, arguments) for side in sides}
        ratios.append(speed["ours"] / speed["theirs"])
    print(json.dumps({"ratio": statistics.median(ratios), "of": [round(ratio, 3) for ratio in ratios]}))


if __name__ == "__main__":
    main()
