"""`python -m tests.bench [decode|prefill|kv-quality] [--model NAME] [--pairs N]`: interleaved ratios, as JSON lines."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import mlxinfer
from mlxinfer import zoo
from mlxinfer.config import load_settings

PROMPT = "Write a long story about a lighthouse keeper who finds a map. " * 3


def decode(name: str, pairs: int, tokens: int) -> dict[str, object]:
    """Single-stream decode against mlx_lm.stream_generate: both on the same weights, greedy, end token ignored."""
    import mlx.core as mx
    from mlx_lm.generate import stream_generate
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    from mlxinfer.engine.loading import load_model

    settings = load_settings()
    files = zoo.resolve(name, settings)
    ours = mlxinfer.load(name, settings=settings)
    ids = ours.prompt_ids(PROMPT)
    theirs = load_model(files.kind, files.path, dtype=settings.dtype)
    # The same tokenizer under mlx-lm's wrapper, with no end token, so that both make exactly `tokens`.
    backend = PreTrainedTokenizerFast(tokenizer_object=ours.tokenizer._backend)
    wrapper = TokenizerWrapper(backend, NaiveStreamingDetokenizer, eos_token_ids=[])
    wrapper.eos_token_ids = []

    def run_ours() -> tuple[float, list[int]]:
        generated: list[int] = []
        start = last = 0.0
        # Plain greedy, whatever the model's own defaults are.
        params = mlxinfer.SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=tokens, ignore_eos=True)
        for delta in ours.submit(ids, params):
            last = time.perf_counter()
            start = start or last
            generated += delta.token_ids
        return (len(generated) - 1) / (last - start), generated

    def run_theirs() -> tuple[float, list[int]]:
        generated: list[int] = []
        start = last = 0.0
        for response in stream_generate(theirs.model, wrapper, ids, max_tokens=tokens):
            last = time.perf_counter()
            start = start or last
            generated.append(response.token)
        return (len(generated) - 1) / (last - start), generated

    run_ours(), run_theirs()
    ratios, rates = [], []
    for pair in range(pairs):
        order = (run_ours, run_theirs) if pair % 2 == 0 else (run_theirs, run_ours)
        results = {run.__name__: run() for run in order}
        (a, tokens_a), (b, tokens_b) = results["run_ours"], results["run_theirs"]
        assert tokens_a[: len(tokens_b)] == tokens_b[: len(tokens_a)], "the two must make the same tokens"
        ratios.append(a / b)
        rates.append((a, b))
    ours.unload()
    return {
        "bench": "decode",
        "model": name,
        "device": str(mx.default_device()),
        "pairs": pairs,
        "tokens": tokens,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "ratios": [round(r, 3) for r in ratios],
        "ours_tok_s": round(statistics.median(r[0] for r in rates), 2),
        "mlx_lm_tok_s": round(statistics.median(r[1] for r in rates), 2),
    }


PREFILL_SNIPPET = """
import sys, time, mlxinfer
llm = mlxinfer.load(sys.argv[1])
ids = (llm.prompt_ids("the quick brown fox jumps over the lazy dog " * 60) * 2)[:600]
params = mlxinfer.SamplingParams(temperature=0.0, max_tokens=1)
llm.submit(ids[:64], params).result()
best = min(llm.submit(ids, params).result().timings.ttft_s for _ in range(2))
print(mlxinfer.runtime.blas()[0], len(ids) / best)
"""


def prefill(name: str, pairs: int) -> dict[str, object]:
    """Prefill tokens/s with a fast BLAS preloaded against without, each in its own process."""

    def run(blas: str) -> tuple[str, float]:
        env = os.environ | {"MLXINFER_BLAS": blas}
        command = [sys.executable, "-c", PREFILL_SNIPPET, name]
        out = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        library, rate = out.stdout.split()
        return library, float(rate)

    rows = []
    for _ in range(pairs):
        (library, fast), (_, slow) = run(""), run("off")
        rows.append((library, fast, slow))
    return {
        "bench": "prefill",
        "model": name,
        "blas": Path(rows[0][0]).name,
        "pairs": pairs,
        "ratio_median": round(statistics.median(f / s for _, f, s in rows), 2),
        "with_tok_s": round(statistics.median(f for _, f, _ in rows), 1),
        "without_tok_s": round(statistics.median(s for _, _, s in rows), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument(
        "which", nargs="*", default=["decode", "prefill"], choices=["decode", "prefill", "kv-quality", []]
    )
    parser.add_argument("--model", default=zoo.DEMO)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    if "decode" in args.which:
        print(json.dumps(decode(args.model, args.pairs, args.tokens)), flush=True)
    if "prefill" in args.which and sys.platform.startswith("linux"):
        print(json.dumps(prefill(args.model, max(1, args.pairs // 3))), flush=True)
    if "kv-quality" in args.which:
        from tests.bench.kv_quality import kv_quality

        print(json.dumps(kv_quality(args.model)), flush=True)


if __name__ == "__main__":
    main()
