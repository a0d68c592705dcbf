"""From a model's folder to a network in memory. `prepare` reads and checks on any thread, `build` makes the arrays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.encoders import qwen3
from mlxinfer.encoders.decoder import DecoderModel, check_causal, decoder_weights
from mlxinfer.encoders.kinds import FAMILIES, is_qwen3
from mlxinfer.encoders.layers import EncoderModel
from mlxinfer.encoders.modules import DenseSpec, Recipe, read_recipe
from mlxinfer.encoders.names import joined, own_names
from mlxinfer.encoders.networks import CrossEncoder, EmbeddingNetwork, YesOrNo
from mlxinfer.encoders.pooling import Finish
from mlxinfer.encoders.shape import Shape, read_shape
from mlxinfer.encoders.texts import Framing, eos_framing
from mlxinfer.engine.dtypes import apply_dtype_policy, bytes_in_memory, is_quantized, weight_bytes
from mlxinfer.engine.governor import governor
from mlxinfer.engine.loading import check_layers, check_memory, context_length, describe_quantization, evaluate
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object
from mlxinfer.formats.safetensors import check_dtypes, check_safetensors, shard_files
from mlxinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from mlxinfer.encoders.kinds import EncoderKind
    from mlxinfer.encoders.runner import Network

MAX_LISTED = 5
"""Bad tensors that an error names."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Checked files and what they say; no array yet."""

    folder: Path
    kind: EncoderKind
    config: dict[str, Any]
    shape: Shape | None
    """None for a decoder."""
    recipe: Recipe
    tokenizer: Tokenizer
    framing: Framing
    answers: tuple[int, int] | None
    """The ids of "yes" and "no", of a decoder that reranks."""
    shards: list[Path]
    names: dict[str, str]
    """Published name → own name; of a decoder the same."""
    dtype: str
    max_tokens: int
    needed_bytes: int


@dataclass(slots=True)
class Loaded:
    """A network that is ready to run."""

    network: Network
    dimensions: int
    """0 for a reranker."""
    vocab_size: int
    dtype: str
    quantization: str
    num_parameters: int
    weight_bytes: int


def prepare(folder: Path, kind: EncoderKind, *names: str, dtype: str = "auto") -> Prepared:
    """Check a model's files and make its tokenizer; `names` are those it goes by.

    Raises ModelFileError, UnsupportedModelError or WontFitError.
    """
    where = str(folder / "config.json")
    config = read_json_object(folder / "config.json")
    if config is None:
        raise ModelFileError(f"{where} is missing")
    shards = shard_files(folder)
    tensors = {name: info for shard in shards for name, info in check_safetensors(shard).items()}
    check_dtypes(tensors, str(folder))
    check_layers(folder, config, len(tensors))
    _check_quantization(config, where)
    tokenizer = Tokenizer.from_folder(folder)
    recipe, framing, shape, answers = read_recipe(folder), Framing(special_tokens=True), None, None
    if config.get("model_type") in FAMILIES:
        shape = read_shape(config, where)
        own = own_names(list(tensors), shape.family, head=kind == "reranker", where=str(folder))
        longest = shape.max_tokens
        _check_labels({own[name]: info.shape for name, info in tensors.items() if name in own}, where)
    else:
        check_causal(config, where)
        upstream.model_classes(config)
        own = {name: name for name in tensors}
        longest = context_length(config)
        if is_qwen3(folder, *names):
            framing = qwen3.framing(tokenizer, kind, str(folder))
            answers = qwen3.yes_and_no(tokenizer, str(folder)) if kind == "reranker" else None
            recipe = qwen3.completed(recipe, has_modules=(folder / "modules.json").is_file())
        elif kind == "reranker":
            raise UnsupportedModelError(f"{folder}: of the decoders that rerank only Qwen3-Reranker is supported")
        else:
            framing = eos_framing(tokenizer, folder)
    needed = bytes_in_memory({name: tensors[name] for name in own}, dtype)
    check_memory(folder.name, needed)
    return Prepared(
        folder, kind, config, shape, recipe, tokenizer, framing, answers, shards, own, dtype,
        max_tokens=min(longest, recipe.max_tokens or _tokenizer_limit(folder) or longest),
        needed_bytes=needed,
    )  # fmt: skip


def _check_labels(shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """A reranker gives one number; a classifier gives one for each label."""
    labels = shapes.get("head.out.weight", (1,))[:1]
    if labels != (1,):
        raise UnsupportedModelError(f"{where}: a classifier of {labels[0] if labels else 0} labels; one of 1 reranks")


def _tokenizer_limit(folder: Path) -> int | None:
    """model_max_length, unless it is the 10^30 that transformers writes for none."""
    value = (read_json_object(folder / "tokenizer_config.json") or {}).get("model_max_length")
    return int(value) if isinstance(value, int | float) and 1 <= value < 2**31 else None


def build(prepared: Prepared) -> Generator[None, None, Loaded]:
    """Make the arrays, a short piece of work between two yields. On the MLX thread.

    Raises ModelFileError, UnsupportedModelError or WontFitError.
    """
    governor().reclaim(prepared.needed_bytes)
    weights: dict[str, mx.array] = {}
    for shard in prepared.shards:
        read: Any = mx.load(str(shard))
        weights |= {prepared.names[name]: array for name, array in read.items() if name in prepared.names}
    yield
    decoder = None
    if prepared.shape is None:
        config, weights = decoder_weights(prepared.config, weights, scores=prepared.kind == "reranker")
        model = upstream.build_model(config, weights)
        decoder = DecoderModel(model)
        hidden, vocab_size = _width(decoder), int(config.get("vocab_size") or prepared.tokenizer.vocab_size)
    else:
        model = _encoder_model(prepared, joined(weights, lambda parts: mx.concatenate(parts, axis=0)))
        hidden, vocab_size = prepared.shape.hidden_size, prepared.shape.vocab_size
    weights.clear()
    recipe = prepared.recipe if prepared.kind == "embedding" else Recipe()
    dimensions = recipe.dimensions(hidden)
    finish = Finish(recipe.steps)
    _load_dense(prepared.folder, recipe, finish)
    quantization = describe_quantization(prepared.config)
    yield
    dtype = apply_dtype_policy(model, prepared.dtype)
    if quantization != "none" and not is_quantized(model):
        quantization += ", dequantized in memory"
    yield
    yield from evaluate(model)
    yield from evaluate(finish)
    return Loaded(
        network=_network(prepared, decoder or model, finish),
        dimensions=dimensions if prepared.kind == "embedding" else 0,
        vocab_size=vocab_size,
        dtype=dtype,
        quantization=quantization,
        num_parameters=upstream.num_parameters(model),
        weight_bytes=weight_bytes(model) + weight_bytes(finish),
    )


def _network(prepared: Prepared, model: Any, finish: Finish) -> Network:
    if prepared.kind == "embedding":
        return EmbeddingNetwork(model, prepared.recipe.pooling, finish)
    if prepared.answers is not None:
        return YesOrNo(model, *prepared.answers)
    return CrossEncoder(model)


def _width(decoder: DecoderModel) -> int:
    """The size of the hidden states. Lazy: nothing is computed."""
    try:
        return int(decoder.stack.embed_tokens(mx.array([[0]])).shape[-1])
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelFileError(f"the model can't run with this config: {type(error).__name__}: {error}") from error


def _encoder_model(prepared: Prepared, weights: Mapping[str, mx.array]) -> EncoderModel:
    assert prepared.shape is not None
    model = EncoderModel(prepared.shape, scores=prepared.kind == "reranker")
    if quantization := prepared.config.get("quantization"):
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
        )
    _check_weights(model, weights, str(prepared.folder))
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    return model


def _check_weights(model: nn.Module, weights: Mapping[str, mx.array], where: str) -> None:
    """Name every tensor that is missing, too many or of another shape."""
    flat: Any = tree_flatten(model.parameters())
    wanted = {name: tuple(array.shape) for name, array in flat}
    bad = [f"{name} is missing" for name in wanted if name not in weights]
    bad += [f"{name} has no place" for name in weights if name not in wanted]
    bad += [
        f"{name} is {tuple(weights[name].shape)}, not {shape}"
        for name, shape in wanted.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if bad:
        more = f"; and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        raise ModelFileError(f"{where}: the weights don't match config.json: {'; '.join(bad[:MAX_LISTED])}{more}")


def _load_dense(folder: Path, recipe: Recipe, finish: Finish) -> None:
    """The weights of dense layers, each in a folder of its own."""
    specs = [step for step in recipe.steps if isinstance(step, DenseSpec)]
    for spec, layer in zip(specs, finish.dense, strict=True):
        path = folder / spec.folder / "model.safetensors"
        check_dtypes(check_safetensors(path), str(path))
        read: Any = mx.load(str(path))
        weights = {name.removeprefix("linear."): array.astype(mx.float32) for name, array in read.items()}
        _check_weights(layer, weights, str(path))
        layer.load_weights(list(weights.items()), strict=True)


def _check_quantization(config: Mapping[str, Any], where: str) -> None:
    packed, foreign = config.get("quantization"), config.get("quantization_config")
    if packed is None and foreign is not None:
        raise UnsupportedModelError(f"{where}: weights quantized as {str(foreign)[:80]} aren't supported; mlx's are")
    if packed is None:
        return
    figures = [packed.get("bits"), packed.get("group_size")] if isinstance(packed, dict) else []
    if not figures or any(type(f) is not int for f in figures):
        raise ModelFileError(f"{where}: quantization is {packed!r:.80}; bits and group_size are expected")


def with_limit(prepared: Prepared, limit: int | None) -> Prepared:
    """The same with a lower limit of tokens, the user's own."""
    return prepared if limit is None else dataclasses.replace(prepared, max_tokens=min(limit, prepared.max_tokens))
