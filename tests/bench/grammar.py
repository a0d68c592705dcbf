"""`python -m tests.bench.grammar`: what structured output costs, as JSON lines.

The mask of one row in microseconds, over a vocabulary of 128k tokens; and the throughput of a tiny model with a schema
in half of a batch of eight against none, in interleaved pairs.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import mlxinfer
from mlxinfer.engine.grammar import Grammars
from mlxinfer.engine.sampling import only_allowed
from mlxinfer.tokenizer import Tokenizer
from mlxinfer.types import Grammar, SamplingParams
from tests import tiny

VOCABULARY = 128_000
TOKENS = 400
PAIRS = 9
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def large_tokenizer() -> Tokenizer:
    """Bytes and random words of the alphabet: as many tokens as large models have."""
    drawn = random.Random(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "<eos>"]
    letters = [c for c in alphabet if c.isascii() and c.isprintable()] + ["\u0120"]
    seen = set(words)
    while len(words) < VOCABULARY:
        word = "".join(drawn.choices(letters, k=drawn.randint(2, 9)))
        if word not in seen:
            seen.add(word)
            words.append(word)
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.from_parts(tokenizer_json=json.loads(backend.to_str()), eos_token="<eos>", eos_token_ids=[256])


def masks() -> None:
    grammars = Grammars(large_tokenizer(), VOCABULARY)
    compiled = grammars.compile(Grammar("json_schema", json.dumps(SCHEMA)))
    words, drawn = VOCABULARY // 32, random.Random(2)
    times: list[float] = []
    applied: list[float] = []
    constraint = compiled.begin()
    logits = mx.random.normal((1, VOCABULARY))
    mx.eval(logits)
    for _ in range(TOKENS):
        if constraint.complete:
            constraint = compiled.begin()
        bits = constraint.allowed(words)
        start = time.perf_counter()
        mx.eval(only_allowed(logits, {0: bits}))
        applied.append(time.perf_counter() - start)
        choices = [8 * i + j for i, byte in enumerate(bits) if byte for j in range(8) if byte >> j & 1]
        token = drawn.choice(choices)
        start = time.perf_counter()
        constraint.advance([token])
        times.append(time.perf_counter() - start)
    ordered = sorted(times)
    report(
        what="mask of a row", vocabulary=VOCABULARY, p50_us=ordered[TOKENS // 2] * 1e6,
        p99_us=ordered[int(TOKENS * 0.99)] * 1e6, apply_p50_us=statistics.median(applied) * 1e6,
    )  # fmt: skip


def throughput() -> None:
    """Tokens per second of eight requests, half of them under a schema or none."""
    long = Grammar("json_schema", json.dumps({"type": "array", "items": SCHEMA, "minItems": 50}))
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_folder(Path(folder) / "tiny")
        with mlxinfer.load(str(Path(folder) / "tiny"), max_num_seqs=8) as llm:

            def run(constrained: int) -> float:
                start = time.perf_counter()
                running = [
                    llm.submit(
                        llm.prompt_ids(f"hello {i}"),
                        SamplingParams(
                            max_tokens=100, temperature=1, seed=i, ignore_eos=True,
                            grammar=long if i < constrained else None,
                        ),
                    )
                    for i in range(8)
                ]  # fmt: skip
                tokens = sum(g.result().usage.completion_tokens for g in running)
                return tokens / (time.perf_counter() - start)

            run(4), run(0)
            ratios = [run(4) / run(0) for _ in range(PAIRS)]
    report(what="half of a batch of 8 under a schema", pairs=PAIRS, throughput_ratio=statistics.median(ratios),
           lowest=min(ratios), highest=max(ratios))  # fmt: skip


def report(**figures: object) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == "__main__":
    masks()
    throughput()
