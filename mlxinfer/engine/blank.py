"""A model that is all shapes: what a config.json stands for, in the packing and dtype it would be loaded in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxinfer import runtime, upstream
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def num_layers(config: Mapping[str, Any]) -> int:
    """Of a config.json. Raises UnsupportedModelError."""
    text = config.get("text_config") or config
    found = next((text[key] for key in LAYER_KEYS if isinstance(text.get(key), int)), None)
    if found is None:
        raise UnsupportedModelError(f"config.json names no number of layers ({', '.join(LAYER_KEYS)})")
    return found


def hidden_size(config: Mapping[str, Any]) -> int:
    """Of a config.json; 0 where it names none."""
    text = config.get("text_config") or config
    return int(text.get("hidden_size") or text.get("n_embd") or 0)


def shallow(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config of a model with the first `layers` layers."""
    if isinstance(text := config.get("text_config"), dict):
        return {**config, "text_config": shallow(text, layers)}
    whole = num_layers(config)
    cut = {
        key: value[:layers] if isinstance(value, list) and len(value) == whole else value
        for key, value in config.items()
    }
    return cut | {key: layers for key in LAYER_KEYS if isinstance(config.get(key), int)}


def blank(config: Mapping[str, Any], *, keep_packed: bool) -> nn.Module:
    """A model whose arrays are not computed, in the dtype that a run computes in; packed as the config says, or not."""
    model = upstream.empty_model(config)
    if keep_packed and (how := config.get("quantization")):

        def packed(path: str, module: Any) -> bool | dict[str, Any]:
            fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % how["group_size"] == 0
            return fits and how.get(path, True)

        nn.quantize(model, how["group_size"], how["bits"], mode=how.get("mode", "affine"), class_predicate=packed)
    kind = runtime.compute_dtype("auto", dtype_of(config))
    model.update(tree_map(lambda a: a.astype(kind) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters()))
    return model


def dtype_of(config: Mapping[str, Any]) -> mx.Dtype:
    """What config.json says the weights are in; bfloat16 where it says nothing."""
    text = config.get("text_config") or {}
    name = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or text.get("dtype")
    return {"float32": mx.float32, "float16": mx.float16}.get(str(name), mx.bfloat16)


def weights_bytes(config: Mapping[str, Any], *, keep_packed: bool) -> int:
    """Of the whole base once it is loaded; nothing is computed."""
    arrays: Any = tree_flatten(blank(config, keep_packed=keep_packed).parameters())
    mx.eval(mx.random.state)
    return sum(array.nbytes for _, array in arrays)
