"""The only file that imports mlx_lm. What the rest uses of it is listed here and held by tests/unit/test_upstream.py.

Reused: model classes, `sanitize`, quantized layers and cache classes. Not reused: its loop, its server, its trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import resource
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers

from mlxinfer.errors import MlxinferError, ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence


@contextlib.contextmanager
def _file_limit_kept() -> Iterator[None]:
    """mlx_lm lowers RLIMIT_NOFILE to 2048 when it is imported; a server with many clients needs its own limit."""
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original


with _file_limit_kept():
    import mlx_lm.tokenizer_utils as _tokenizer_utils
    import mlx_lm.utils as _utils
    from mlx_lm.models import activations as _activations
    from mlx_lm.models import base as _base
    from mlx_lm.models import cache as _cache

KVCache = _cache.KVCache
RotatingKVCache = _cache.RotatingKVCache
ArraysCache = _cache.ArraysCache
CacheList = _cache.CacheList
create_causal_mask = _base.create_causal_mask
mlx_lm_attention = _base.scaled_dot_product_attention
mlx_lm_swiglu = _activations.swiglu

MODELS = "mlx_lm.models."
PHI3SMALL_VOCABULARY = 100_352


def versions() -> dict[str, str]:
    """Versions of what this file stands on."""
    return {name: metadata.version(name) for name in ("mlx", "mlx-lm")}


def make_cache(model: nn.Module) -> list[Any]:
    """One mlx-lm cache per layer, empty: the model's own `make_cache`, else a KVCache for each layer."""
    return _cache.make_prompt_cache(model)


def install_attention(attention: Callable[..., mx.array]) -> None:
    """Put `attention` where every loaded mlx_lm model module looks `scaled_dot_product_attention` up.

    Models bind the name at import and borrow each other's attention, so every module is visited; call this after
    each model is built. `attention` hands what isn't its own to `mlx_lm_attention`.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(MODELS) and hasattr(module, "scaled_dot_product_attention"):
            vars(module)["scaled_dot_product_attention"] = attention


def route_attention(takes: Callable[[Any], bool], attention: Callable[..., mx.array]) -> None:
    """Hand calls whose cache `takes` accepts to `attention`, all others to what each loaded module had until now.

    `attention` takes (queries, keys, values, cache, scale=, mask=, sinks=) as mlx-lm's does. As install_attention:
    every module is visited, so call it again after a model is built or another attention is installed.
    """
    name = "scaled_dot_product_attention"
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(MODELS) or not hasattr(module, name):
            continue
        held: Any = vars(module)[name]
        while held is not None and getattr(held, "takes", None) is not takes:
            held = getattr(held, "before", None)
        if held is None:
            vars(module)[name] = _routed(takes, attention, vars(module)[name])


def _routed(
    takes: Callable[[Any], bool], attention: Callable[..., mx.array], before: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    def route(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, *args: Any, **kwargs: Any) -> mx.array:
        return (attention if takes(cache) else before)(queries, keys, values, cache, *args, **kwargs)

    vars(route).update(takes=takes, before=before)
    return route


def install_swiglu(swiglu: Callable[[mx.array, mx.array], mx.array]) -> None:
    """Put `swiglu(gate, x)`, silu(gate) * x, where every loaded mlx_lm model module looks it up.

    As install_attention: call it after each model is built.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(MODELS) and hasattr(module, "swiglu"):
            vars(module)["swiglu"] = swiglu


def model_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any]:
    """(Model, ModelArgs) for a config. Raises UnsupportedModelError for a model_type mlx-lm doesn't have."""
    model_type = config.get("model_type")
    # The name becomes part of a module path: only a plain name may.
    if not isinstance(model_type, str) or not model_type.replace("-", "_").replace(".", "_").isidentifier():
        raise UnsupportedModelError(f"config.json: model_type is {model_type!r:.80}; a model name is expected")
    with _file_errors(f"the architecture {model_type!r}"):
        if model_type == "phi3small" and config.get("vocab_size", 0) < PHI3SMALL_VOCABULARY:
            # Its head masks fixed token ids, and mlx writes wherever an index points to.
            raise UnsupportedModelError(
                f"config.json: vocab_size is {config.get('vocab_size')}; phi3small needs {PHI3SMALL_VOCABULARY}"
            )
        try:
            return _utils._get_classes(dict(config))
        except (ValueError, AttributeError) as error:
            # AttributeError: a module of mlx-lm's that holds no model, such as "cache".
            raise UnsupportedModelError(
                f"the architecture {model_type!r} is not in mlx-lm {metadata.version('mlx-lm')}"
            ) from error


def build_model(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> nn.Module:
    """A model from a config and weights under mlx-lm's own parameter names.

    Layers for which `<path>.scales` is among the weights are quantized as config["quantization"] says, with the
    bits and group size that the packed shapes imply. Raises ModelFileError for a missing, extra or misshapen tensor.
    """
    model_class: Any
    model_class, args_class = model_classes(config)
    with _file_errors(f"config of {config.get('model_type')}"):
        model = model_class(args_class.from_dict(dict(config)))
    with _file_errors("the weights don't match the architecture"):
        # Sanitizing sanitized weights changes nothing, but some models leave a tied head out only here.
        held = model.sanitize(dict(weights)) if hasattr(model, "sanitize") else dict(weights)
        if quantization := config.get("quantization"):
            _quantize(model, quantization, held)
        model.eval()
        model.load_weights(list(held.items()), strict=True)
    return model


def blank_model(config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """An unquantized model of a config, none of its arrays computed, and the arguments that mlx-lm took or assumed."""
    model_class: Any
    model_class, args_class = model_classes(config)
    with _file_errors(f"config of {config.get('model_type')}"):
        arguments = args_class.from_dict(_utils._decode_tagged_floats(dict(config)))
        model = model_class(arguments)
    # The parameters are draws that nobody looks at; mlx's key would hold on to the graph of them all.
    mx.eval(mx.random.state)
    return model, dict(vars(arguments))


def _quantize(model: nn.Module, quantization: Mapping[str, Any], weights: dict[str, mx.array]) -> None:
    """Make the layers for which `<path>.scales` is among the weights packed ones."""

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return _utils.infer_quant_config(path, module, weights)

    nn.quantize(
        model,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=packed,
    )


def empty_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config. Its parameters are drawn at random if they are ever looked at, and take nothing before.

    Raises UnsupportedModelError or ModelFileError.
    """
    return blank_model(config)[0]


def sanitized(model: nn.Module, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """What the model's own `sanitize` makes of published tensors, for `load_weights`. Raises ModelFileError."""
    sanitize: Any = getattr(model, "sanitize", dict)
    with _file_errors("the tensors don't match the architecture"):
        return sanitize(dict(weights))


def quantizable(model: nn.Module) -> dict[str, bool | dict[str, Any]]:
    """Every module that can hold packed weights, by path, and what the model says to it when it is quantized.

    True: as the whole; False: leave it in floats; a dict: arguments of its own. Modules that know one way of packing
    only (afm7's fused ones) are left out: they couldn't be loaded again.
    """
    predicate: Any = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    with _file_errors("the model's quant_predicate"):
        return {
            path: answer if isinstance(answer := predicate(path, module), dict) else bool(answer)
            for path, module in model.named_modules()
            if "weight" in module and "mode" in _arguments(getattr(module, "to_quantized", None))
        }


def _arguments(function: Callable[..., Any] | None) -> Collection[str]:
    return inspect.signature(function).parameters if function else ()


def keeps_dtype(model: nn.Module) -> Callable[[str], bool]:
    """Whether a parameter of that name keeps the dtype it was published in, whatever the others get."""
    casts: Any = getattr(model, "cast_predicate", None) or (lambda name: True)
    return lambda name: not casts(name)


def published_config(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A config as mlx-lm saves it: valid JSON, and without the part for images where the model leaves them out."""
    left_out = {"_name_or_path"}
    if "vision_tower" not in getattr(model, "model", {}):
        left_out.add("vision_config")
    kept = {key: value for key, value in config.items() if key not in left_out}
    return dict(sorted(_utils._encode_tagged_floats(kept).items()))


def load_folder(folder: Path, shards: Sequence[Path]) -> tuple[nn.Module, dict[str, Any]]:
    """Load a folder in the Hugging Face or mlx layout, lazily. `shards` are the checked safetensors files to read.

    Returns the model and its config.json. A custom `model_file` is never run.
    """
    with tempfile.TemporaryDirectory() as view:
        # mlx-lm reads whatever lies there; a view with the checked files alone makes the index win.
        for number, shard in enumerate(shards):
            (Path(view) / f"model-{number:05d}.safetensors").symlink_to(shard.resolve())
        for name in ("config.json", "generation_config.json", "hf_quant_config.json"):
            if (folder / name).is_file():
                (Path(view) / name).symlink_to((folder / name).resolve())
        with _file_errors(str(folder)):
            return _utils.load_model(Path(view), lazy=True, strict=True, trust_remote_code=False)


@contextlib.contextmanager
def _file_errors(what: str) -> Iterator[None]:
    """Map whatever a model's own code raises over values from its files. Nothing there can be trusted to be sane."""
    try:
        yield
    except (MlxinferError, MemoryError):
        raise
    except SystemExit as error:
        # olmo asks for another package by ending the process.
        raise UnsupportedModelError(f"{what}: the architecture needs a package that isn't installed") from error
    except Exception as error:
        if isinstance(error, ValueError) and "not supported" in str(error):
            raise UnsupportedModelError(f"{what}: {error}") from error
        raise ModelFileError(f"{what}: {type(error).__name__}: {_first_lines(error)}") from error


def _first_lines(error: Exception, limit: int = 600) -> str:
    text = str(error)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text)} characters)"


def dequantize(model: nn.Module) -> nn.Module:
    """Replace quantized linear, embedding and expert layers by plain ones, in place, in the dtype of their scales."""
    return _utils.dequantize_model(model)


def num_parameters(model: nn.Module) -> int:
    """Parameters of a model, packed ones counted as what they stand for."""
    return int(_utils.get_total_parameters(model))


def lora_layers(
    model: nn.Module, *, num_layers: int, rank: int, scale: float, keys: Sequence[str] | None, dora: bool
) -> dict[str, nn.Module]:
    """What mlx-lm's loader of adapters would put in the model's place, by path; the model itself stays as it is.

    Each new layer holds the model's own one, no copy of its weights. Raises ModelFileError for layers that it can't
    adapt.
    """
    with _file_limit_kept():
        from mlx_lm.tuner import utils as tuner
    before = list(child_slots(model))
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    found: dict[str, nn.Module] = {}
    try:
        with _file_errors("the adapter doesn't go with this model"):
            tuner.linear_to_lora_layers(model, num_layers, parameters, use_dora=dora)
    finally:
        for path, container, key, module in before:
            if container[key] is not module:
                found[path] = container[key]
                container[key] = module
    return found


def lora_layer(module: nn.Module, *, rank: int, scale: float, dora: bool) -> nn.Module:
    """mlx-lm's layer around this one, by what it is; also around the forms that mlx shares out over ranks, whose
    `lora_a` and `lora_b` are still to be given their shapes. Raises ModelFileError for what can't be adapted."""
    with _file_limit_kept():
        from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
        from mlx_lm.tuner import dora as doras
        from mlx_lm.tuner import lora as loras
    made: Any = module
    with _file_errors("the adapter doesn't go with this model"):
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            kind: Any = loras.LoRASwitchLinear
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            kind = doras.DoRAEmbedding if dora else loras.LoRAEmbedding
        else:
            kind = doras.DoRALinear if dora else loras.LoRALinear
        return kind.from_base(made, r=rank, scale=scale, dropout=0.0)


def child_slots(module: nn.Module) -> Iterator[tuple[str, Any, Any, nn.Module]]:
    """Where each module below this one hangs: (path, the module, list or dict that holds it, its key there, it)."""

    def walk(container: Any, prefix: str) -> Iterator[tuple[str, Any, Any, nn.Module]]:
        items = enumerate(container) if isinstance(container, list) else list(container.items())
        for key, value in items:
            path = f"{prefix}{key}"
            if isinstance(value, nn.Module):
                yield path, container, key, value
            if isinstance(value, nn.Module | list | dict):
                yield from walk(value, f"{path}.")

    return walk(module, "")


class _TokenizerFacts:
    """What mlx-lm's inference looks at in a tokenizer: the chat template, and which tokens there are."""

    def __init__(self, chat_template: str, tokens: Collection[str]) -> None:
        self.chat_template = chat_template
        self._vocabulary = dict.fromkeys(tokens, 0)

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        return []


def tool_parser_name(chat_template: str, tokens: Collection[str]) -> str | None:
    """The module of mlx_lm.tool_parsers that reads this model's calls, as mlx-lm guesses it; None when none does."""
    return _tokenizer_utils._infer_tool_parser(_TokenizerFacts(chat_template, tokens))


def think_tags(tokens: Collection[str]) -> tuple[str, str] | None:
    """What stands around the reasoning of a model with these tokens, as mlx-lm guesses it."""
    start, end, *_ = _tokenizer_utils._infer_thinking(_TokenizerFacts("", tokens))
    return (start, end) if start and end else None


def framing_markup(tokens: Collection[str]) -> tuple[str, ...]:
    """Markup of a model with these tokens that only frames text, as mlx-lm knows it."""
    return tuple(_tokenizer_utils._infer_structural_markers(_TokenizerFacts("", tokens)))


def parse_tool_call(parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The calls that a parser of mlx-lm finds in `text`, as it returns them; none when it fails.

    `parser` is one of ours to name, never a model's. The text is a model's and the tools are a client's, so the parser
    may raise anything.
    """
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    try:
        parsed = module.parse_tool_call(text, list(tools) or None)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ):
        return []
    return parsed if isinstance(parsed, list) else [parsed]


def gptq(model: nn.Module, rows: mx.array, *, bits: int, group_size: int, fallback_bits: int, batch_size: int) -> None:
    """mlx-lm's GPTQ, in place: linear layers at `bits`, what else can be packed at `fallback_bits`, groups alike.

    `rows`: token ids [rows, tokens]. Raises UnsupportedModelError where the model's layers don't take it.
    """
    module = importlib.import_module("mlx_lm.quant.gptq")
    with _quantizing("gptq"):
        module.gptq_quantize(model, rows, bits, group_size, fallback_bits, group_size, batch_size=batch_size)


def awq(
    model: nn.Module, model_type: str, rows: mx.array, *, bits: int, group_size: int, ends_bits: int, grid: int
) -> None:
    """mlx-lm's AWQ, in place; embeddings and head at `ends_bits`. `rows`: token ids [rows, tokens].

    Raises UnsupportedModelError for an architecture that mlx-lm has no AWQ for.
    """
    module = importlib.import_module("mlx_lm.quant.awq")
    known = module.AWQ_MODEL_CONFIGS
    if model_type not in known:
        raise UnsupportedModelError(f"mlx-lm has AWQ for {', '.join(sorted(known))} only, not for {model_type!r:.40}")
    with _quantizing("awq"):
        module.awq_quantize(
            model,
            rows,
            known[model_type],
            group_size=group_size,
            bits=bits,
            embed_group_size=group_size,
            embed_bits=ends_bits,
            n_grid=grid,
        )


def dwq(
    model: nn.Module,
    teacher: Callable[[mx.array], mx.array],
    rows: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    *,
    learning_rate: float,
    batch_size: int,
    dtype: mx.Dtype,
    seed: int,
) -> None:
    """mlx-lm's DWQ, in place: scales and biases of a packed model trained towards the logits of `teacher`, one pass.

    `dtype`: of the scales while they are trained. Raises UnsupportedModelError where there are no gradients.
    """
    module = importlib.import_module("mlx_lm.quant.dwq")
    length = max(len(row) for row in [*rows, *held_out])
    with _quantizing("dwq"):
        module.dwq_quantize(
            model,
            lambda batch, index, split: teacher(batch),
            optimizers.Adam(learning_rate=learning_rate, bias_correction=True),
            [(list(row), 0) for row in rows],
            [(list(row), 0) for row in held_out],
            batch_size=batch_size,
            max_seq_length=length,
            seed=seed,
            dtype=dtype,
        )
    model.eval()


@contextlib.contextmanager
def _quantizing(what: str) -> Iterator[None]:
    """mlx-lm writes what it is doing to stdout, which may be a pipe that expects JSON; it goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except (ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
            raise UnsupportedModelError(f"{what} can't work on this model: {_first_lines(error)}") from error


def adapter_layer(layer: nn.Module, *, dora: bool, rank: int, scale: float, dropout: float) -> nn.Module | None:
    """mlx-lm's LoRA or DoRA layer around a linear, expert or embedding layer, packed ones included; else None."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.tuner import dora as _dora
    from mlx_lm.tuner import lora as _lora

    made: Any = None
    if isinstance(layer, (nn.Linear, nn.QuantizedLinear)):
        made = _dora.DoRALinear if dora else _lora.LoRALinear
    elif isinstance(layer, (SwitchLinear, QuantizedSwitchLinear)):
        made = None if dora else _lora.LoRASwitchLinear
    elif isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding)):
        made = _dora.DoRAEmbedding if dora else _lora.LoRAEmbedding
    return None if made is None else made.from_base(layer, r=rank, scale=scale, dropout=dropout)
