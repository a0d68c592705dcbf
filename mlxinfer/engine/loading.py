"""From files to a model in memory: read, cast by the dtype policy, dequantize where that pays.

`prepare` looks at the files and makes the tokenizer, on any thread: it makes no array. `build` makes the arrays on the
MLX thread, in short pieces, so that the streams of other models go on.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import runtime, upstream
from mlxinfer.engine.dtypes import (
    apply_dtype_policy,
    as_stored,
    bytes_in_memory,
    is_quantized,
    parameters,
    weight_bytes,
)
from mlxinfer.engine.governor import governor, wont_fit
from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import read_json_object
from mlxinfer.formats.gguf import plan_gguf, read_weights
from mlxinfer.formats.safetensors import check_dtypes, check_safetensors, shard_files
from mlxinfer.tokenizer import Tokenizer
from mlxinfer.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

T = TypeVar("T")

PIECE_BYTES = 16 << 20
"""Weights computed at a time while a model loads: some 5 to 50 ms, from disk or on a CPU."""


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


@dataclass(frozen=True, slots=True)
class Prepared:
    """Checked files and what they say; no array yet."""

    config: dict[str, Any]
    tokenizer: Tokenizer
    defaults: SamplingParams
    dtype: str
    """Settings.dtype."""
    pieces: Callable[[], Generator[None, None, tuple[nn.Module, dict[str, Any]]]]
    """Reads the weights → model and config, lazily where the format allows; on the MLX thread."""
    needed_bytes: int
    """What the weights take in memory, as far as the files tell."""


def load_model(kind: Literal["folder", "gguf"], path: Path, *, dtype: str = "auto") -> LoadedModel:
    """Load a model folder or a GGUF file in one go. On the MLX thread: arrays belong to the thread that makes them.

    Raises ModelFileError, UnsupportedModelError or WontFitError.
    """
    return drained(build(prepare(kind, path, dtype=dtype)))


def drained(pieces: Generator[None, None, T]) -> T:
    """The value of a generator, run to its end."""
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return done.value


def prepare(kind: Literal["folder", "gguf"], path: Path, *, dtype: str = "auto") -> Prepared:
    """Check the files of a model and make its tokenizer. On any thread.

    Raises ModelFileError, UnsupportedModelError or WontFitError.
    """
    return _prepare_gguf(path, dtype) if kind == "gguf" else _prepare_folder(path, dtype)


def build(prepared: Prepared) -> Generator[None, None, LoadedModel]:
    """Make the arrays, a piece of at most about PIECE_BYTES between two yields. On the MLX thread.

    Raises ModelFileError, UnsupportedModelError or WontFitError.
    """
    governor().reclaim(prepared.needed_bytes)
    model, config = yield from prepared.pieces()
    yield
    quantization = describe_quantization(config)
    dtype_name = apply_dtype_policy(model, prepared.dtype)
    if quantization != "none" and not is_quantized(model):
        quantization += ", dequantized in memory"
    yield
    yield from evaluate(model)
    vocab_size = _vocab_size(model)
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=prepared.tokenizer,
        defaults=prepared.defaults,
        dtype=dtype_name,
        quantization=quantization,
        context_length=context_length(config),
        vocab_size=vocab_size,
        num_parameters=upstream.num_parameters(model),
        weight_bytes=weight_bytes(model),
    )


def evaluate(model: nn.Module) -> Generator[None, None, None]:
    """Compute what the parameters still are on paper: reads, casts, dequantized layers. One parameter isn't cut."""
    batch: list[mx.array] = []
    for weight in parameters(model):
        batch.append(weight)
        if sum(w.nbytes for w in batch) >= PIECE_BYTES:
            mx.eval(batch)
            batch.clear()
            yield
    mx.eval(batch)


def _vocab_size(model: nn.Module) -> int:
    """The width of the logits. Lazy: only the shape is looked at, nothing is computed."""
    forward: Any = model
    try:
        return int(forward(mx.array([[0]])).shape[-1])
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelFileError(f"the model can't run with this config: {type(error).__name__}: {error}") from error


def _prepare_gguf(path: Path, dtype: str) -> Prepared:
    needed = path.stat().st_size
    check_memory(path.name, needed)
    # None lets the reader choose: float16 keeps GGUF's float16 scales exactly, but Gemma overflows it.
    wanted = None if dtype == "auto" and not runtime.on_cpu() else runtime.compute_dtype(dtype, mx.float16)
    plan = plan_gguf(path)
    vocabulary = plan.vocabulary
    tokenizer = Tokenizer.from_parts(
        tokenizer_json=vocabulary.tokenizer_json,
        chat_template=vocabulary.chat_template,
        bos_token=vocabulary.bos_token,
        eos_token=vocabulary.eos_token,
        eos_token_ids=vocabulary.eos_token_ids,
        add_bos_token=vocabulary.add_bos_token,
    )
    upstream.model_classes(plan.config)

    def pieces() -> Generator[None, None, tuple[nn.Module, dict[str, Any]]]:
        weights, config = yield from read_weights(plan, dtype=wanted, narrow=wanted == mx.float32 and as_stored())
        return upstream.build_model(config, weights), config

    return Prepared(plan.config, tokenizer, sampling_defaults(vocabulary.generation_config), dtype, pieces, needed)


def _prepare_folder(folder: Path, dtype: str) -> Prepared:
    config = read_json_object(folder / "config.json")
    if config is None:
        raise ModelFileError(f"{folder} has no config.json; a model folder in the Hugging Face layout is expected")
    upstream.model_classes(config)
    defaults = sampling_defaults(read_json_object(folder / "generation_config.json") or {})
    read_json_object(folder / "hf_quant_config.json")
    tokenizer = Tokenizer.from_folder(folder)
    shards = shard_files(folder)
    tensors = {name: info for shard in shards for name, info in check_safetensors(shard).items()}
    check_dtypes(tensors, str(folder))
    check_layers(folder, config, len(tensors))
    needed = bytes_in_memory(tensors, dtype)
    check_memory(folder.name, needed)

    def pieces() -> Generator[None, None, tuple[nn.Module, dict[str, Any]]]:
        yield
        return upstream.load_folder(folder, shards)

    return Prepared(config, tokenizer, defaults, dtype, pieces, needed)


def check_layers(folder: Path, config: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse a config that asks for more layers than there are weights: building them takes memory and minutes."""
    limit = num_tensors + 16
    for part in (config, config.get("text_config")):
        for key, value in part.items() if isinstance(part, dict) else ():
            count = len(value) if isinstance(value, list) else value
            if "layer" in key and "per_layer" not in key and isinstance(count, int) and count > limit:
                raise ModelFileError(f"{folder}/config.json: {key} is {count:.6g}, but there are {num_tensors} tensors")


def check_memory(name: str, needed: int) -> None:
    """Raise WontFitError when `needed` bytes of weights don't fit beside what this process holds already."""
    budget, held = governor().whole, governor().held_bytes()
    if needed > budget - held:
        beside = f", of which {held / 2**20:,.0f} MiB are in use by loaded models" if held > 2**20 else ""
        raise wont_fit(name, needed, budget, beside)


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
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return value
    return 4096


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters out of a generation_config.json; what is missing or out of range there stays None."""
    values: dict[str, Any] = {}
    for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                checked: dict[str, Any] = {key: int(value) if key == "top_k" else float(value)}
                SamplingParams(**checked)
                values |= checked
    if generation.get("do_sample") is False:
        # As transformers has it: without sampling the temperature isn't looked at.
        values["temperature"] = 0.0
    return SamplingParams(**values)
