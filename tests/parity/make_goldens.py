# ruff: noqa: RUF001
"""Make the golden files of tests/parity from references that share no code with mlxinfer.

Logits come from transformers with torch in float32 reading the same GGUF, token ids from llama.cpp. Neither belongs
into this project's environment; make one beside it:

    python3 -m venv /tmp/reference
    /tmp/reference/bin/pip install torch transformers gguf accelerate xllamacpp
    PYTHONPATH=. /tmp/reference/bin/python tests/parity/make_goldens.py smollm2 PATH/SmolLM2-135M-Instruct.Q4_1.gguf
    PYTHONPATH=. /tmp/reference/bin/python tests/parity/make_goldens.py gemma3 PATH/gemma-3-270m-q4_k_m.gguf

    PYTHONPATH=. /tmp/reference/bin/python tests/parity/make_goldens.py tiny
    PYTHONPATH=. /tmp/reference/bin/python tests/parity/make_goldens.py pre PATH/SmolLM2-135M-Instruct.Q4_1.gguf

Writes tests/fixtures/NAME_logits.npz and tests/fixtures/NAME_tokens.json. The logits file holds, for each prompt, the
ids, the logits of the last positions for every STRIDE-th token, and the best TOP of the last position.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.llamacpp import tokenizer_of
from tests.unit.formats.gguf_files import auto, tiny_model

FIXTURES = Path(__file__).parent.parent / "fixtures"
POSITIONS, STRIDE, TOP = 3, 64, 64

TINY = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
TINY_IDS = [1, 40, 7, 99, 263, 12, 8, 8, 150, 201, 33, 64, 90, 17, 2, 270]
PRE = ("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "stablelm2")

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)",
    "Once upon a time, in a village of 1234 people, there lived a miller who had three sons. " * 12,
)

TEXTS = (
    "",
    " ",
    "  ",
    "   leading",
    "trailing   ",
    "a",
    "A",
    "Hello, world!",
    "Hello  world",
    "hello\nworld",
    "\n",
    "\n\n",
    "\n\n\n\n",
    "\r\n",
    "a\r\n\r\nb",
    "\t",
    "\t\ttabs\t",
    " \n \n ",
    "x = 1\n\n\n    y = 2",
    "12",
    "1234567890",
    "3.14159",
    "1,000,000",
    "2024-11-29T15:48:12Z",
    "0x1F",
    "½ ² Ⅳ ١٢٣",
    "don't",
    "DON'T we'll I'd they're",
    "it’s",
    "'s",
    "naïve café",
    "cafe\u0301",
    "Straße",
    "Привет, мир!",
    "你好，世界",
    "こんにちは世界",
    "안녕하세요",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "😀",
    "👩‍👩‍👧‍👦 family",
    "🇫🇷🇩🇪",
    "a\u200bb",
    "\ufeffbom",
    "a\u00a0b",
    "𝔹𝕠𝕝𝕕",
    "\x00\x01",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    "def f(x):\n\treturn x**2  # square",
    "<html><body>&amp;</body></html>",
    '{"key": [1, 2.5, null, true]}',
    "SELECT * FROM t WHERE a='b';",
    "C:\\path\\to\\file",
    "https://example.org/a?b=c&d=%20",
    "user@example.org",
    "...",
    "!!!???",
    "---",
    "====",
    "$100 + €50 <= ¥9^2",
    "((((()))))",
    "a_b_c__d",
    "CamelCaseWord",
    "ALLCAPS",
    "antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "e" * 33,
    "a b c d e f g",
    "▁ ▁▁",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<bos>",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<|endoftext|>",
    "<s></s>",
    "<unk>",
    "<0x0A>",
    " <|im_end|> ",
    "text<|im_end|>text",
    "𠀀𠀁 rare",
    "ﷺ",
    "Ω≈ç√∫˜µ≤≥÷",
    "x" + " " * 17 + "y",
    "1 " * 9,
)


def reference_model(path: Path) -> Any:
    """transformers' model in float32, made to read what its GGUF reader leaves at a default."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    fields = GGUFReader(path).fields
    config.pad_token_id = None
    key_length = fields.get(f"{fields['general.architecture'].contents()}.attention.key_length")
    if key_length is not None:
        config.head_dim = int(key_length.contents())
    if config.model_type.startswith("gemma"):
        config.query_pre_attn_scalar = config.head_dim
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    if config.model_type.startswith("gemma3"):
        # Trained with this factor rounded to bfloat16, which mlx-lm keeps; transformers in float32 does not round it.
        scale = model.get_input_embeddings().embed_scale
        scale.copy_(scale.to(torch.bfloat16).to(scale.dtype))
    return model


def make_logits(name: str, path: Path) -> None:
    golden = json.loads((FIXTURES / f"{name}_tokens.json").read_text(encoding="utf-8"))
    arrays: dict[str, np.ndarray] = {"sha256": np.frombuffer(digest(path), dtype=np.uint8)}
    model = reference_model(path)
    for index, ids in enumerate(golden["prompts"]):
        logits = forward(model, ids)
        best = np.argsort(-logits[-1])[:TOP]
        arrays |= {
            f"ids{index}": np.array(ids, dtype=np.int32),
            f"strided{index}": logits[-POSITIONS:, ::STRIDE],
            f"top_ids{index}": best.astype(np.int32),
            f"top{index}": logits[-1, best],
        }
    np.savez_compressed(FIXTURES / f"{name}_logits.npz", **arrays)


def forward(model: Any, ids: list[int]) -> np.ndarray:
    """Logits float32 (tokens, vocabulary)."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy().astype(np.float32)


def make_tiny() -> None:
    """Random models of every architecture: the file's digest and the logits of TINY_IDS."""
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch in TINY:
            path = tiny_model(arch).write(Path(folder) / f"{arch}.gguf")
            arrays |= {
                f"{arch}_sha256": np.frombuffer(digest(path), dtype=np.uint8),
                arch: forward(reference_model(path), TINY_IDS)[:, ::4],
            }
    np.savez_compressed(FIXTURES / "tiny_logits.npz", **arrays)


def make_pre(path: Path) -> None:
    """Ids of TEXTS by llama.cpp for the vocabulary of `path` under each pre-tokenizer."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    keys = ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    vocabulary = {f"tokenizer.ggml.{key}": fields[f"tokenizer.ggml.{key}"].contents() for key in keys}
    golden: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE:
            plan = tiny_model("llama", rows=len(vocabulary["tokenizer.ggml.tokens"]))
            for key, value in {**vocabulary, "tokenizer.ggml.pre": pre}.items():
                plan.set(key, auto(value))
            tokenize = tokenizer_of(plan.write(Path(folder) / f"{pre}.gguf"))
            golden[pre] = [tokenize(text, False) for text in TEXTS]
    (FIXTURES / "pre_tokens.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")


def make_tokens(name: str, path: Path) -> None:
    import xllamacpp

    tokenize = tokenizer_of(path)
    golden = {
        "sha256": digest(path).hex(),
        "reference": f"llama.cpp of xllamacpp {getattr(xllamacpp, '__version__', '')}".strip(),
        "texts": [{"text": text, "ids": tokenize(text, False)} for text in TEXTS],
        "prompts": [tokenize(text, True) for text in PROMPTS],
    }
    (FIXTURES / f"{name}_tokens.json").write_text(json.dumps(golden, indent=0) + "\n", encoding="utf-8")


def digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "tiny":
        make_tiny()
    elif what == "pre":
        make_pre(Path(sys.argv[2]))
    else:
        make_tokens(what, Path(sys.argv[2]))
        make_logits(what, Path(sys.argv[2]))
