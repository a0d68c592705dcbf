"""GGUF files for tests, written byte by byte so that any field can be wrong. Needs numpy and `gguf` only."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize

if TYPE_CHECKING:
    from pathlib import Path

U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(kind: int, value: Any) -> bytes:
    """A value with its type number before it. A list is an array of `kind`."""
    if isinstance(value, list):
        items = b"".join(typed(kind, v)[4:] for v in value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + items
    body = text(value) if kind == STRING else struct.pack(f"<{CODES[kind]}", value)
    return struct.pack("<I", kind) + body


def auto(value: Any) -> bytes:
    """`typed` with the type a writer would choose."""
    sample = value[0] if isinstance(value, list) else value
    kinds = {bool: BOOL, int: 5 if isinstance(value, list) else U32, float: F32, str: STRING}
    return typed(kinds[type(sample)], value)


@dataclass
class Tensor:
    """`shape` in row-major order, as numpy has it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None


def tensor(name: str, values: np.ndarray, kind: Kind = Kind.F32) -> Tensor:
    if kind in (Kind.F32, Kind.F16):
        raw = values.astype(np.float32 if kind == Kind.F32 else np.float16)
    else:
        raw = quantize(values.astype(np.float32), kind)
    return Tensor(name, values.shape, int(kind), raw.tobytes())


@dataclass
class Blueprint:
    """A GGUF file to be; `metadata` values are encoded with their type."""

    metadata: list[tuple[str, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    tensor_count: int | None = None
    metadata_count: int | None = None

    def set(self, key: str, encoded: bytes) -> None:
        self.metadata = [(k, v) for k, v in self.metadata if k != key] + [(key, encoded)]

    def header(self) -> bytes:
        """Everything before the padding."""
        counts = (
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.metadata) if self.metadata_count is None else self.metadata_count,
        )
        out = self.magic + struct.pack("<IQQ", self.version, *counts)
        out += b"".join(text(key) + value for key, value in self.metadata)
        at = 0
        for t in self.tensors:
            offset = at if t.offset is None else t.offset
            dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape[::-1])
            out += text(t.name) + dims + struct.pack("<IQ", t.kind, offset)
            at += -(-len(t.data) // self.alignment) * self.alignment
        return out

    def build(self) -> bytes:
        out = self.header()
        out += b"\0" * (-len(out) % self.alignment)
        for t in self.tensors:
            out += t.data + b"\0" * (-len(t.data) % self.alignment)
        return out

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as (GPT-2, 2019); printable ones stand for themselves."""
    keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(moved)) for b in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]


def bpe_vocabulary(pre: str | None = "gpt-2") -> dict[str, Any]:
    """Three control tokens, the bytes, MERGES' results and one user-defined token: 269 in all."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    tokens += [m.replace(" ", "") for m in MERGES] + ["<tool>"]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 4) + [4]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return values if pre is None else values | {"tokenizer.ggml.pre": pre}


VOCABULARY = 272
_ROWS = {"attn_q": "q", "attn_k": "kv", "attn_v": "kv", "attn_output": "d", "ffn_gate": "f", "ffn_up": "f"}
_EXTRA_NORMS = {
    "gemma2": ["post_attention_norm", "post_ffw_norm"],
    "gemma3": ["post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"],
    "qwen3": ["attn_q_norm", "attn_k_norm"],
}


def tiny_model(
    arch: str = "llama", kind: Kind = Kind.F32, *, seed: int = 0, pre: str = "gpt-2", rows: int = VOCABULARY
) -> Blueprint:
    """A random model of `arch`: width 64, 4 heads and 2 for keys, 2 layers (Gemma 3: 6), matrices of type `kind`."""
    layers, d, f, heads, kv_heads, head_dim = (6 if arch == "gemma3" else 2), 64, 96, 4, 2, 16
    if arch in ("qwen3", "gemma2", "gemma3"):
        head_dim = 32
    rng = np.random.default_rng(seed)
    sizes = {"d": d, "f": f, "q": heads * head_dim, "kv": kv_heads * head_dim}
    values = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.context_length": 512,
        f"{arch}.vocab_size": rows,
        f"{arch}.embedding_length": d,
        f"{arch}.feed_forward_length": f,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": head_dim,
        **bpe_vocabulary(pre),
    }
    if head_dim * heads != d:
        values |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
    if arch.startswith("gemma"):
        values[f"{arch}.attention.sliding_window"] = 8 if arch == "gemma3" else 4096
    if arch == "gemma2":
        values |= {f"{arch}.attn_logit_softcapping": 50.0, f"{arch}.final_logit_softcapping": 30.0}

    def matrix(name: str, rows: int, columns: int, scale: float = 2.0) -> Tensor:
        return tensor(name, rng.standard_normal((rows, columns)) * scale / columns**0.5, kind)

    def norm(name: str, size: int = d) -> Tensor:
        return tensor(name, 1 + 0.3 * rng.standard_normal(size))

    plan = Blueprint([(key, auto(value)) for key, value in values.items()])
    plan.tensors = [matrix("token_embd.weight", rows, d, 4.0), norm("output_norm.weight")]
    if arch in ("llama", "phi3"):
        plan.tensors.append(matrix("output.weight", rows, d))
    for i in range(layers):
        block = f"blk.{i}."
        stems = dict(_ROWS)
        if arch == "phi3":
            qkv, gate_up = sizes["q"] + 2 * sizes["kv"], 2 * f
            plan.tensors += [matrix(f"{block}attn_qkv.weight", qkv, d), matrix(f"{block}ffn_up.weight", gate_up, d)]
            stems = {"attn_output": "d"}
        for stem, size in stems.items():
            plan.tensors.append(
                matrix(f"{block}{stem}.weight", sizes[size], sizes["q"] if stem == "attn_output" else d)
            )
        plan.tensors.append(matrix(f"{block}ffn_down.weight", d, f))
        for stem in ("attn_norm", "ffn_norm", *_EXTRA_NORMS.get(arch, [])):
            plan.tensors.append(norm(f"{block}{stem}.weight", head_dim if stem.endswith(("q_norm", "k_norm")) else d))
        if arch == "qwen2":
            plan.tensors += [
                tensor(f"{block}attn_{p}.bias", rng.standard_normal(sizes["q" if p == "q" else "kv"])) for p in "qkv"
            ]
    return plan
