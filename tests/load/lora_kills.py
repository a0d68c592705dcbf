"""Kill a training run at random moments, resume it, and compare the final weights with those of a whole run.

By hand: python -m tests.load.lora_kills --times 100
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = """
import sys
from pathlib import Path
from mlxinfer.lora import TrainConfig, train
from tests.unit.lora.rows import model, rows
config = TrainConfig(updates=30, dropout=0.1, grad_accumulation_steps=2, save_every=1, eval_every=3,
                     schedule="cosine", warmup_updates=3, learning_rate=3e-3)
print("begin", flush=True)
history = train(model(), None, rows(9), rows(3, seed=1), config, folder=Path(sys.argv[1]), resume=True)
print(history.digest, len(history.losses), flush=True)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """A run in a process of its own; returns when it begins to train."""
    process = subprocess.Popen([sys.executable, "-c", TRAIN, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    return process


def finish(folder: Path) -> tuple[str, float]:
    """What a run that nobody kills prints, and its seconds."""
    began = time.monotonic()
    process = start(folder)
    began = time.monotonic()
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a run that was resumed ended with {process.returncode}")
    return out, time.monotonic() - began


def kills(times: int, seed: int = 0, say: bool = False) -> tuple[int, int]:
    """(kills that hit, those of them in the middle of a save). Raises SystemExit where the weights differ."""
    rng = random.Random(seed)
    hits = mid_save = 0
    with tempfile.TemporaryDirectory() as base:
        wanted, seconds = finish(Path(base) / "whole")
        number = 0
        while hits < times:
            folder = Path(base) / f"run-{number}"
            number += 1
            for _ in range(min(3, times - hits)):
                process = start(folder)
                time.sleep(rng.uniform(0, seconds))
                process.send_signal(signal.SIGKILL)
                process.communicate()
                if process.returncode != -signal.SIGKILL:
                    break  # it was done before
                hits += 1
                mid_save += any((folder / "checkpoints").glob(".new-*"))
            got, _ = finish(folder)
            if got != wanted:
                raise SystemExit(f"after {hits} kills: {got!r} is not {wanted!r}")
            if say:
                print(f"{hits} kills, {mid_save} in a save: equal", flush=True)
    return hits, mid_save


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kills(arguments.times, arguments.seed, say=True)
