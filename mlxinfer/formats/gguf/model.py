"""A GGUF file as an mlx-lm config, its weights and a tokenizer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.formats.gguf.arrays import Packed, narrowed, quantization, read_in_slices
from mlxinfer.formats.gguf.plan import GGUFPlan, plan_gguf

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from mlxinfer.formats.gguf.blocks import Layout
    from mlxinfer.formats.gguf.reader import GGUFFile


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """Everything a file says, in the form the engine takes."""

    config: dict[str, Any]
    """config.json of the mlx-lm `model_type`, with "quantization" when a layer is packed."""
    weights: dict[str, mx.array]
    """By mlx-lm parameter name, evaluated; a packed layer has .weight (uint32), .scales and in affine mode .biases."""
    tokenizer_json: dict[str, Any]
    """tokenizer.json of the `tokenizers` package; its post-processor adds BOS where `add_bos_token` is true."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    """End of sequence, of turn and of message."""
    add_bos_token: bool
    generation_config: dict[str, Any]


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
    weights, packed = yield from _read_weights(plan, dtype or file_dtype(plan.file), narrow)
    return weights, plan.config | ({"quantization": quantization(packed)} if packed else {})


def file_dtype(file: GGUFFile) -> mx.Dtype:
    """float16, as ggml's own block scales; bfloat16 for files that hold it and for Gemma, which overflows float16."""
    kinds = Counter(t.type.name for t in file.tensors.values())
    return mx.bfloat16 if kinds["BF16"] or file.architecture.startswith("gemma") else mx.float16


def _read_weights(
    plan: GGUFPlan, dtype: mx.Dtype, narrow: bool
) -> Generator[None, None, tuple[dict[str, mx.array], dict[str, Layout]]]:
    """(weights, layout of each packed layer by its path)."""
    weights: dict[str, mx.array] = {}
    packed: dict[str, Layout] = {}
    for parameter in plan.parameters:
        value = yield from read_in_slices(parameter, dtype)
        value = narrowed(value) if narrow and parameter.function is None else value
        if isinstance(value, Packed):
            path = parameter.name.removesuffix(".weight")
            packed[path] = value.layout
            weights |= {f"{path}.{part}": array for part, array in value.arrays().items()}
        else:
            weights[parameter.name] = value
        yield
    return weights, packed
