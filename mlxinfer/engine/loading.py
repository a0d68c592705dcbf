"""From files to a model in memory, on the MLX thread: read, cast by the dtype policy, dequantize where that pays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxinfer import runtime, upstream
from mlxinfer.errors import ModelFileError, WontFitError
from mlxinfer.formats.gguf import load_gguf
from mlxinfer.formats.safetensors import check_safetensors, shard_files
from mlxinfer.tokenizer import Tokenizer
from mlxinfer.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEQUANTIZE_SHARE = 0.5
"""On a CPU a quantized model is dequantized at load when the result takes at most this share of the memory budget."""
MAX_JSON_BYTES = 64 * 2**20


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run, and what its files say about it."""

    model: nn.Module
    config: dict[str, Any]
    tokenizer: Tokenizer
    defaults: SamplingParams
    dtype: str
    quantization: str
    context_length: int
    vocab_size: int
    num_parameters: int
    weight_bytes: int


def load_model(kind: Literal["folder", "gguf"], path: Path, *, dtype: str = "auto") -> LoadedModel:
    """Load a model folder or a GGUF file. On the MLX thread: arrays belong to the thread that makes them.

    Raises ModelFileError, UnsupportedModelError or WontFitError.
    """
    _check_memory(path)
    if kind == "gguf":
        model, config, tokenizer, generation = _from_gguf(path, dtype)
    else:
        model, config, tokenizer, generation = _from_folder(path)
    quantization = describe_quantization(config)
    dtype_name = _apply_dtype_policy(model, config, dtype)
    if quantization != "none" and not _is_quantized(model):
        quantization += ", dequantized in memory"
    mx.eval(model.parameters())
    probe = model(mx.array([[0]]))
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=tokenizer,
        defaults=sampling_defaults(generation),
        dtype=dtype_name,
        quantization=quantization,
        context_length=context_length(config),
        # Lazy: only the shape is looked at, nothing is computed.
        vocab_size=int(probe.shape[-1]),
        num_parameters=upstream.num_parameters(model),
        weight_bytes=weight_bytes(model),
    )


def _from_gguf(path: Path, dtype: str) -> tuple[nn.Module, dict[str, Any], Tokenizer, dict[str, Any]]:
    # None lets the reader choose: float16 keeps GGUF's float16 scales exactly, but Gemma overflows it.
    wanted = None if dtype == "auto" and not runtime.on_cpu() else runtime.compute_dtype(dtype, mx.float16)
    gguf = load_gguf(path, dtype=wanted)
    model = upstream.build_model(gguf.config, gguf.weights)
    tokenizer = Tokenizer.from_parts(
        tokenizer_json=gguf.tokenizer_json,
        chat_template=gguf.chat_template,
        bos_token=gguf.bos_token,
        eos_token=gguf.eos_token,
        eos_token_ids=gguf.eos_token_ids,
        add_bos_token=gguf.add_bos_token,
    )
    return model, gguf.config, tokenizer, gguf.generation_config


def _from_folder(folder: Path) -> tuple[nn.Module, dict[str, Any], Tokenizer, dict[str, Any]]:
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelFileError(f"{folder} has no config.json; a model folder in the Hugging Face layout is expected")
    upstream.model_classes(config)
    tokenizer = Tokenizer.from_folder(folder)
    shards = shard_files(folder)
    for shard in shards:
        check_safetensors(shard)
    model, config = upstream.load_folder(folder, shards)
    return model, config, tokenizer, read_json(folder / "generation_config.json") or {}


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a model's file, or None when there is no such file. Raises ModelFileError otherwise."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelFileError(f"{path} holds a {type(data).__name__}; an object is expected")
    return data


def _check_memory(path: Path) -> None:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    size = sum(f.stat().st_size for f in files if f.exists())
    budget = runtime.memory().budget
    if size > budget:
        raise WontFitError(
            f"{path.name} has {size / 2**30:.1f} GiB of weights and this machine gives a model "
            f"{budget / 2**30:.1f} GiB; `mlxinfer fit` shows what would fit"
        )


def _is_quantized(model: nn.Module) -> bool:
    return any(isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding) for m in model.modules())


def _apply_dtype_policy(model: nn.Module, config: Mapping[str, Any], setting: str) -> str:
    """Cast every floating-point weight to one dtype (a stray float32 norm would promote everything)."""
    counts: dict[mx.Dtype, int] = {}
    for weight in parameters(model):
        if mx.issubdtype(weight.dtype, mx.floating):
            counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.size
    own = max(counts, key=lambda d: counts[d], default=mx.float32)
    target = runtime.compute_dtype(setting, own)
    if any(d != target for d in counts):
        model.set_dtype(target)
    if runtime.on_cpu() and _is_quantized(model):
        # mlx's CPU kernels for packed weights are far slower than a float32 product.
        plain = upstream.num_parameters(model) * target.size
        if plain <= runtime.memory().budget * DEQUANTIZE_SHARE:
            upstream.dequantize(model)
    return str(target).removeprefix("mlx.core.")


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(w.nbytes for w in parameters(model))


def parameters(model: nn.Module) -> list[mx.array]:
    """Every weight of a model."""
    flat: Any = tree_flatten(model.parameters())
    return [weight for _, weight in flat]


def describe_quantization(config: Mapping[str, Any]) -> str:
    """For example "affine 4-bit, group 32", or "none"."""
    q = config.get("quantization") or {}
    if not isinstance(q, dict) or "bits" not in q:
        return "none"
    return f"{q.get('mode', 'affine')} {q['bits']}-bit, group {q.get('group_size', '?')}"


def context_length(config: Mapping[str, Any]) -> int:
    """The context in tokens that the config states, looked for in the text part too; 4096 when it states none."""
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "model_max_length"):
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 4096


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters out of a generation_config.json; what is missing or malformed there stays None."""
    values: dict[str, Any] = {}
    for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            values[key] = int(value) if key == "top_k" else float(value)
    if generation.get("do_sample") is False and "temperature" not in values:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ModelFileError(f"generation_config.json: {error}") from error
