"""What a plan has to know of a model: bytes of each layer, heads, and which ways of splitting its code has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer.distributed.groups import PretendGroup
from mlxinfer.distributed.ways import by_heads, no_pipeline, no_tensor
from mlxinfer.engine.blank import blank, hidden_size, num_layers
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes in bytes, of weights as they are loaded."""

    name: str
    layer_bytes: tuple[int, ...]
    rest_bytes: int
    """Embedding, head and the last norm."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    kv_bytes_per_token: int
    """In one layer."""
    activation_bytes: int
    """Of a number that goes between ranks."""
    parameters: int
    no_tensor: str
    """Why its code can't be split by heads; "" where it can."""
    no_pipeline: str
    """Why its code can't be split by layers; "" where it can."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.layer_bytes) + self.rest_bytes

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)


def facts_of(config: Mapping[str, Any], name: str = "") -> ModelFacts:
    """Of a config.json; nothing is loaded. Raises UnsupportedModelError or ModelFileError."""
    model = blank(config, keep_packed=True)
    text = config.get("text_config") or config
    layers, rest, parameters = [0] * num_layers(config), 0, 0
    arrays: Any = tree_flatten(model.parameters())
    for path, array in arrays:
        found = _LAYER.search(path)
        if found and int(found[1]) < len(layers):
            layers[int(found[1])] += array.nbytes
        else:
            rest += array.nbytes
        parameters += array.size
    mx.eval(mx.random.state)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    hidden = hidden_size(config) or 1
    head_dim = int(text.get("head_dim") or hidden // heads)
    width = next(array.dtype.size for _, array in arrays if mx.issubdtype(array.dtype, mx.floating))
    return ModelFacts(
        name=name or str(config.get("model_type")),
        layer_bytes=tuple(layers),
        rest_bytes=rest,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        kv_bytes_per_token=2 * kv_heads * head_dim * width,
        activation_bytes=width,
        parameters=parameters,
        no_tensor=no_tensor(model),
        no_pipeline=no_pipeline(model),
    )


def tensor_shards(config: Mapping[str, Any], facts: ModelFacts, size: int) -> list[int]:
    """Bytes that each of `size` ranks of a split by heads holds; nothing is loaded.

    Raises InvalidRequestError with the numbers where there is no such split.
    """
    if facts.no_tensor:
        raise InvalidRequestError(facts.no_tensor)
    for what, value in (("heads", facts.num_heads), ("key-value heads", facts.num_kv_heads)):
        if value % size:
            near = [n for n in range(2, value + 1) if facts.num_heads % n == facts.num_kv_heads % n == 0]
            ways = f"; {', '.join(map(str, near))} ranks would do" if near else "; no number of ranks would do"
            raise InvalidRequestError(f"{value} {what} can't be shared by {size} ranks{ways}")
    return [_shard_bytes(config, rank, size) for rank in range(size)]


def _shard_bytes(config: Mapping[str, Any], rank: int, size: int) -> int:
    model: Any = blank(config, keep_packed=True)
    try:
        # Splits shapes, and with them the groups of packed weights.
        by_heads(model, PretendGroup(rank, size))
    except (ValueError, IndexError, TypeError, ZeroDivisionError, AssertionError) as error:
        raise InvalidRequestError(f"its weights can't be cut for {size} ranks: {error}") from error
    arrays: Any = tree_flatten(model.parameters())
    mx.eval(mx.random.state)
    return sum(array.nbytes for _, array in arrays)
