"""Plans of made-up runs against the peaks of these runs, each measured in a process of its own.

By hand: python -m tests.load.lora_plan --seed 4711 --count 30
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from mlxinfer.engine.blank import weights_bytes
from mlxinfer.lora.planner import items_of, plan
from tests.load.lora_measured import Setup, config_of, measured

LARGE = 100 << 20
"""Bytes of a rough peak from which a setup counts: below, what is fixed outweighs what grows."""
LIMIT = 0.15
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
METHODS = ("lora", "lora", "lora", "rslora", "dora", "qlora", "full")


def draw(rng: random.Random) -> Setup:
    """A model, options and rows."""
    head_dim = rng.choice([32, 64])
    kv = rng.choice([1, 2, 4])
    heads = kv * rng.choice([1, 2, 3])
    hidden = 64 * rng.randint(2, 5)
    model: dict[str, Any] = {
        "model_type": rng.choice(["llama", "llama", "qwen2", "qwen3"]),
        "hidden_size": hidden,
        "num_hidden_layers": rng.randint(5, 14),
        "intermediate_size": 64 * rng.randint(hidden // 64, 4 * hidden // 64),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "vocab_size": rng.choice([1024, 4096, 16384]),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if model["model_type"] == "qwen2":
        model["hidden_size"] = heads * 64
    train: dict[str, Any] = {"method": rng.choice(METHODS), "updates": 2, "packing": "off"}
    if train["method"] == "qlora":
        model["quantization"] = {"group_size": 64, "bits": rng.choice([4, 8])}
    if train["method"] != "full":
        train |= {"rank": rng.choice([4, 8, 16, 64])}
        if rng.random() < 0.4:
            train["targets"] = rng.choice([["q_proj", "v_proj"], ATTENTION, ["*_proj"]])
    if rng.random() < 0.2:
        train["num_layers"] = rng.randint(1, model["num_hidden_layers"])
    if rng.random() < 0.2 and train["method"] != "full":
        train["loss"] = rng.choice(["dpo", "orpo", "simpo", "kto"])
    train["optimizer"] = rng.choice(["adamw", "adamw", "sgd", "adafactor"])
    train["grad_checkpointing"] = rng.random() < 0.4
    train["micro_batch_size"] = rng.choice([1, 2, 4])
    train["grad_accumulation_steps"] = rng.choice([1, 1, 2])
    longest = train["max_tokens"] = rng.choice([128, 256, 512])
    if rng.random() < 0.25 and train.get("loss") != "kto":
        train |= {"packing": "on", "micro_batch_size": 6, "grad_accumulation_steps": 1}
    # One update holds every row, so that the largest micro-batch meets the optimizer's state.
    count = train["micro_batch_size"] * train["grad_accumulation_steps"]
    if train.get("loss") == "kto":
        count = max(2, count)
    lengths = [longest, *(rng.randint(longest // 2, longest) for _ in range(count - 1))]
    if train["packing"] == "on":
        lengths = [length // 3 for length in lengths]
    return Setup(model, train, lengths, rng.choice([0.0, 0.3, 0.9]))


def roughly(setup: Setup) -> int:
    """Bytes: the base's weights, and what its layers keep. For choosing setups, before any is planned or run."""
    model, options = setup.model, config_of(setup)
    rows = options.micro_batch_size * (2 if options.loss in ("dpo", "orpo", "simpo") else 1)
    layers = min(2, model["num_hidden_layers"]) if options.grad_checkpointing else options.num_layers
    kept = 5 * (model["hidden_size"] + model["intermediate_size"]) * (layers or model["num_hidden_layers"])
    tokens = max(setup.lengths) * (1 if options.packing == "on" else rows)
    return weights_bytes(model, keep_packed=options.method == "qlora") + 4 * tokens * kept


def predicted(setup: Setup) -> tuple[int, tuple[float, float]]:
    """Bytes at the peak, seconds of an update."""
    config = config_of(setup)
    need = plan(setup.model, config, items_of(setup.lengths, config.loss, setup.prompt), 1 << 40).need
    return need.peak, (need.seconds[0] / need.updates, need.seconds[1] / need.updates)


def said(setup: Setup) -> str:
    """A setup in a few words."""
    m, t = setup.model, setup.train
    size = f"{m['model_type']} {m['num_hidden_layers']}x{m['hidden_size']}/{m['intermediate_size']} v{m['vocab_size']}"
    rank = f" r{t['rank']}" if "rank" in t else ""
    rows = f"{t['micro_batch_size']}x{t['max_tokens']}{' packed' if t['packing'] == 'on' else ''}"
    extras = [*(["ckpt"] if t["grad_checkpointing"] else []), *([t["loss"]] if "loss" in t else [])]
    extras += [f"last {t['num_layers']}"] if "num_layers" in t else []
    return f"{size}, {t['method']}{rank}, {rows}, {' '.join([*extras, t['optimizer']])}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=4711)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--first", type=int, default=1, help="go on with this one")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rng, done = random.Random(asked.seed), 0
    lines = []
    while done < asked.count:
        setup = draw(rng)
        if roughly(setup) < LARGE:
            continue
        done += 1
        if done < asked.first:
            continue
        peak, seconds = predicted(setup)
        real, took = measured(setup)
        off = peak / real - 1
        verdict = "" if 0 <= off <= LIMIT else "  MISSED"
        lines.append([said(setup), peak, real, off, *seconds, took])
        print(f"| {said(setup)} | {real / 2**20:.0f} | {peak / 2**20:.0f} | {off:+.1%}{verdict} | "
              f"{seconds[0]:.2f} to {seconds[1]:.2f} | {took:.2f} |", flush=True)  # fmt: skip
        if asked.out:
            asked.out.write_text(json.dumps(lines))
    offs = [line[3] for line in lines]
    print(f"{min(offs):+.1%} to {max(offs):+.1%} over {len(offs)} setups")


if __name__ == "__main__":
    main()
