"""`python -m tests.bench.lora_memory`: peak memory of a loss with its gradient, against mlx-lm's trainer's.

What counts is the marginal peak: the allocator's peak less what weights and batch take. Each run is a process of its
own, ours and theirs in turn; the same weights, batch, adapters and flags. Prints JSON lines and the medians' ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

SHAPES = {
    "512x4": {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 32_768, "seq": 1024, "rows": 1},
    "256x2": {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 32_768, "seq": 1024, "rows": 1},
    "256x3-2048": {"hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 16_384, "seq": 2048, "rows": 1},
}


def measure(side: str, shape: str, checkpointing: bool, supervised: float) -> dict[str, object]:
    """One loss and gradient after a first one that isn't counted; `supervised` is the last part of each row."""
    import contextlib

    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from mlxinfer.lora.losses import SupervisedLoss
    from mlxinfer.lora.recompute import recomputed
    from mlxinfer.lora.types import Batch
    from tests import tiny

    facts = dict(SHAPES[shape])
    width, rows = facts.pop("seq"), facts.pop("rows")
    heads = facts["hidden_size"] // 64
    model: Any = tiny.build_model(
        tiny.config(
            **facts,
            intermediate_size=facts["hidden_size"] * 3,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=64,
        ),
        scale=1.0,
    )
    model.freeze()
    linear_to_lora_layers(model, facts["num_hidden_layers"], {"rank": 8, "scale": 2.0, "dropout": 0.0})
    model.train()
    ids = mx.random.randint(0, facts["vocab_size"], (rows, width + 1), key=mx.random.key(1))
    start = round(width * (1 - supervised))
    lengths = mx.array([[start + 1, width]] * rows)
    weights = mx.broadcast_to((mx.arange(width) >= start).astype(mx.float32), (rows, width))
    batch = Batch(
        inputs=ids[:, :-1],
        targets=ids[:, 1:],
        weights=weights,
        segments=mx.ones((rows, width), mx.int32),
        num_examples=rows,
        num_tokens=rows * width,
        num_targets=rows * (width - start),
    )
    loss = SupervisedLoss()

    def ours(model: nn.Module) -> mx.array:
        total, count = loss(model, batch)
        return total / count

    def theirs(model: nn.Module) -> mx.array:
        return trainer.default_loss(model, ids, lengths)[0]

    scope: Any = contextlib.nullcontext()
    if checkpointing and side == "ours":
        scope = recomputed(model)
    elif checkpointing:
        trainer.grad_checkpoint(model.layers[0])
    step = nn.value_and_grad(model, ours if side == "ours" else theirs)
    mx.eval(model.parameters(), ids, lengths, batch.inputs, batch.targets, batch.weights, batch.segments)
    with scope:
        for _ in range(2):
            mx.clear_cache()
            mx.reset_peak_memory()
            resident = mx.get_active_memory()
            began = time.perf_counter()
            value, slopes = step(model)
            mx.eval(value, slopes)
            taken = time.perf_counter() - began
            peak = mx.get_peak_memory() - resident
            size = sum(float(mx.square(slope).sum().item()) for _, slope in tree_flatten(slopes))
            facts_out = {"loss": float(value.item()), "gradient": size**0.5}
            del value, slopes
    return {"side": side, "marginal_mib": round(peak / 2**20, 1), "seconds": round(taken, 2), **facts_out}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lora_memory", description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--supervised", type=float, default=1.0, help="part of each row (default: all of it)")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--checkpointing", choices=["on", "off", "both"], default="both")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args.shape, args.checkpointing == "on", args.supervised)))
        return
    for shape in SHAPES if args.shape == "all" else [args.shape]:
        for checkpointing in ["on", "off"] if args.checkpointing == "both" else [args.checkpointing]:
            flags = ["--shape", shape, "--checkpointing", checkpointing, "--supervised", str(args.supervised)]
            found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
            for _ in range(args.pairs):
                for side in found:
                    command = [sys.executable, "-m", "tests.bench.lora_memory", *flags, "--side", side]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    found[side].append(json.loads(done.stdout.splitlines()[-1]))
            medians = {
                key: {side: statistics.median(run[key] for run in runs) for side, runs in found.items()}
                for key in ("marginal_mib", "seconds", "loss", "gradient")
            }
            ratios = {
                f"{k}_ratio": round(medians[k]["ours"] / medians[k]["theirs"], 3) for k in ("marginal_mib", "seconds")
            }
            print(json.dumps({"shape": shape, "checkpointing": checkpointing, **medians, **ratios}))


if __name__ == "__main__":
    main()
