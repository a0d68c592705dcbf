"""A GGUF file as an mlx-lm config, its weights and a tokenizer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.formats.gguf.architectures import architecture_of, model_config, parameter_names
from mlxinfer.formats.gguf.blocks import GROUP_SIZE, Packed, narrowed, read_in_slices
from mlxinfer.formats.gguf.reader import GGUFFile, read_gguf
from mlxinfer.formats.gguf.vocab import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from mlxinfer.formats.gguf.architectures import Architecture
    from mlxinfer.formats.gguf.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """Everything a file says, in the form the engine takes."""

    config: dict[str, Any]
    """config.json of the mlx-lm `model_type`, with "quantization" when a layer is packed."""
    weights: dict[str, mx.array]
    """By mlx-lm parameter name, evaluated; a packed layer has .weight (uint32), .scales and .biases."""
    tokenizer_json: dict[str, Any]
    """tokenizer.json of the `tokenizers` package; its post-processor adds BOS where `add_bos_token` is true."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    """End of sequence, of turn and of message."""
    add_bos_token: bool
    generation_config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GGUFPlan:
    """What a file's header says; no array has been made."""

    file: GGUFFile
    architecture: Architecture
    config: dict[str, Any]
    """As in GGUFModel, without "quantization"."""
    names: dict[str, str]
    """mlx-lm parameter name of each tensor."""
    vocabulary: Vocabulary


def plan_gguf(path: Path) -> GGUFPlan:
    """Read and check the header of `path`. On any thread. Raises ModelFileError or UnsupportedModelError."""
    file = read_gguf(path)
    architecture = architecture_of(file)
    config = model_config(file)
    names = parameter_names(file, architecture, config)
    vocabulary = read_vocabulary(file, config["vocab_size"])
    config["bos_token_id"] = vocabulary.bos_token_id
    config["eos_token_id"] = list(vocabulary.eos_token_ids)
    return GGUFPlan(file, architecture, config, names, vocabulary)


def load_gguf(path: Path, *, dtype: mx.Dtype | None) -> GGUFModel:
    """Read `path` (of a split model, the first part) whole.

    `dtype` is that of the float tensors and of the scales: with float32 the packed layers equal the reference
    dequantizer bit for bit. None takes `file_dtype`. At most one tensor is held twice at a time.
    Raises ModelFileError or UnsupportedModelError.
    """
    plan = plan_gguf(path)
    reading = read_weights(plan, dtype=dtype)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            weights, config = done.value
            break
    vocabulary = plan.vocabulary
    return GGUFModel(
        config=config,
        weights=weights,
        tokenizer_json=vocabulary.tokenizer_json,
        chat_template=vocabulary.chat_template,
        bos_token=vocabulary.bos_token,
        eos_token=vocabulary.eos_token,
        eos_token_ids=vocabulary.eos_token_ids,
        add_bos_token=vocabulary.add_bos_token,
        generation_config=vocabulary.generation_config,
    )


def read_weights(
    plan: GGUFPlan, *, dtype: mx.Dtype | None, narrow: bool = False
) -> Generator[None, None, tuple[dict[str, mx.array], dict[str, Any]]]:
    """Read the tensors; yields after each and, of a large one, after each slice → (weights, config) of GGUFModel.

    With `narrow`, matrices and scales that half precision holds exactly come in it, whatever `dtype` is.
    Raises ModelFileError or UnsupportedModelError.
    """
    weights, bits = yield from _read_weights(plan, dtype or file_dtype(plan.file), narrow)
    return weights, plan.config | ({"quantization": _quantization(bits)} if bits else {})


def file_dtype(file: GGUFFile) -> mx.Dtype:
    """float16, as ggml's own block scales; bfloat16 for files that hold it and for Gemma, which overflows float16."""
    kinds = Counter(t.type.name for t in file.tensors.values())
    return mx.bfloat16 if kinds["BF16"] or file.architecture.startswith("gemma") else mx.float16


def _read_weights(
    plan: GGUFPlan, dtype: mx.Dtype, narrow: bool
) -> Generator[None, None, tuple[dict[str, mx.array], dict[str, int]]]:
    """(weights, bits of each packed layer by its path)."""
    architecture, config = plan.architecture, plan.config
    weights: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, target in plan.names.items():
        tensor = plan.file.tensors[name]
        stem = name.rsplit(".", 2)[-2]
        if architecture.shifted_norms and stem.endswith("_norm"):
            value = yield from read_in_slices(tensor, mx.float32)
            assert isinstance(value, mx.array)
            value = (value - 1.0).astype(dtype)
        else:
            value = yield from read_in_slices(tensor, dtype)
            value = narrowed(value) if narrow else value
        parts = {"weight": value} if isinstance(value, mx.array) else _parts(value)
        if architecture.interleaved and stem in heads:
            parts = {part: halves_apart(array, heads[stem]) for part, array in parts.items()}
        path, kind = target.rsplit(".", 1)
        if isinstance(value, Packed):
            bits[path] = value.bits
        else:
            parts = {kind: parts["weight"]}
        mx.eval(*parts.values())
        weights |= {f"{path}.{part}": array for part, array in parts.items()}
        yield
    return weights, bits


def _parts(packed: Packed) -> dict[str, mx.array]:
    return {"weight": packed.weight, "scales": packed.scales, "biases": packed.biases}


def halves_apart(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's row order of q and k: within a head, rows 0, 2, 4, … first, then 1, 3, 5, …

    Whole rows move, so it holds for packed words, scales and biases (rows, …) as for floats.
    """
    per_head = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """mlx-lm's "quantization": the commonest width, and the layers that differ."""
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {path: {"group_size": GROUP_SIZE, "bits": b} for path, b in bits.items() if b != usual}
    return {"group_size": GROUP_SIZE, "bits": usual, "mode": "affine", **others}
