"""What one sequence keeps in memory, read off a config: bytes of keys, values and recurrent state at a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from mlxinfer.errors import ModelFileError
from mlxinfer.zoo.entries import CacheShape

if TYPE_CHECKING:
    from collections.abc import Mapping

FULL = frozenset({"full_attention", "attention", "global_attention"})
WINDOWED = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
MAX_COUNT = 2**31 - 1
"""The largest figure that is believed: tensors are indexed with 32 bits."""
MAX_LAYERS = 10_000


def cache_bytes(shape: CacheShape, context: int, *, bytes_per_element: int = 2) -> int:
    """Bytes one sequence of `context` tokens keeps: full layers grow, windowed ones stop at their window."""
    full = shape.layers - shape.window_layers
    wide = shape.latent or 2 * shape.kv_heads * shape.head_dim
    heads = shape.window_kv_heads or shape.kv_heads
    narrow = shape.latent or 2 * heads * (shape.window_head_dim or shape.head_dim)
    elements = full * wide * context + shape.window_layers * narrow * min(context, shape.window)
    return elements * bytes_per_element + shape.state_bytes


def largest_context(shape: CacheShape, budget: int, limit: int, *, bytes_per_element: int = 2) -> int:
    """The longest context up to `limit` whose cache takes at most `budget` bytes; 0 when none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if cache_bytes(shape, middle, bytes_per_element=bytes_per_element) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def shape_from_config(config: Mapping[str, Any]) -> CacheShape:
    """The cache's shape out of a config.json.

    A layer kind that is not known counts as full attention, so the figure errs on the large side. A figure that is
    missing is unknown; raises ModelFileError for one that can't be right, where a wrong one would look like a fit.
    """
    text = config.get("text_config")
    c: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    layers = _checked(c, "num_hidden_layers", MAX_LAYERS) or _checked(c, "n_layers", MAX_LAYERS)
    heads = _checked(c, "num_attention_heads")
    kv_heads = _checked(c, "num_key_value_heads") or heads
    hidden = _checked(c, "hidden_size")
    head_dim = _checked(c, "head_dim") or (hidden // heads if heads else 0)
    full, windowed = _layer_kinds(c, layers)
    shared = count_of(c, "num_kv_shared_layers")
    if shared:
        full, windowed = _layer_kinds(c, layers, max(0, layers - shared))
    latent = count_of(c, "kv_lora_rank")
    wide_dim, wide_heads = count_of(c, "global_head_dim"), count_of(c, "num_global_key_value_heads")
    return CacheShape(
        layers=full + windowed,
        kv_heads=wide_heads or kv_heads,
        head_dim=wide_dim or head_dim,
        window_layers=windowed,
        window=count_of(c, "sliding_window") or count_of(c, "attention_chunk_size") if windowed else 0,
        window_kv_heads=kv_heads if windowed and wide_heads else 0,
        window_head_dim=head_dim if windowed and wide_dim else 0,
        latent=latent + count_of(c, "qk_rope_head_dim") if latent else 0,
        state_bytes=max(0, layers - full - windowed) * _state_bytes(c) if not shared else 0,
    )


def shape_from_gguf(architecture: str, metadata: Mapping[str, Any]) -> CacheShape:
    """The cache's shape out of GGUF metadata, whose keys start with the architecture."""
    m: dict[str, Any] = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items()}
    layers, heads = _checked(m, "block_count", MAX_LAYERS), _checked(m, "attention.head_count")
    kv_heads = _checked(m, "attention.head_count_kv") or heads
    head_dim = count_of(m, "attention.key_length") or (count_of(m, "embedding_length") // heads if heads else 0)
    window = count_of(m, "attention.sliding_window")
    # GGUF states the window but not which layers have it; these two are the models' own patterns.
    every = {"gemma3": 6, "gpt-oss": 2}.get(architecture, 0) if window else 0
    windowed = layers - layers // every if every else 0
    return CacheShape(layers, kv_heads, head_dim, windowed, window if windowed else 0)


def _layer_kinds(c: Mapping[str, Any], layers: int, first: int | None = None) -> tuple[int, int]:
    """(full, windowed) attention layers among the first ones; what is neither keeps a recurrent state."""
    kinds = _words(c, "layer_types") or _words(c, "layers_block_type")
    count = layers if first is None else first
    if kinds:
        head = kinds[:count]
        windowed = sum(k in WINDOWED for k in head)
        known = any(k in FULL or k in WINDOWED for k in kinds)
        return (sum(k in FULL for k in head) if known else len(head) - windowed), windowed
    if every := count_of(c, "full_attention_interval"):
        return count // every, 0
    if isinstance(pattern := c.get("hybrid_override_pattern"), str):
        return pattern[:MAX_LAYERS].count("*"), 0
    if (every := count_of(c, "sliding_window_pattern")) and count_of(c, "sliding_window"):
        return count // every, count - count // every
    kind = c.get("model_type")
    if isinstance(kind, str) and kind.startswith("gemma3") and count_of(c, "sliding_window"):
        return count // 6, count - count // 6
    return count, 0


def _state_bytes(c: Mapping[str, Any]) -> int:
    """Recurrent state of one linear-attention or Mamba layer: float32 state, half-precision convolution tail."""
    if heads := count_of(c, "linear_num_value_heads"):
        value, key = count_of(c, "linear_value_head_dim"), count_of(c, "linear_key_head_dim")
        channels = 2 * count_of(c, "linear_num_key_heads") * key + heads * value
        return heads * value * key * 4 + channels * 3 * 2
    if heads := count_of(c, "mamba_num_heads") or count_of(c, "mamba_n_heads"):
        dim = count_of(c, "mamba_head_dim") or count_of(c, "mamba_d_head")
        return heads * dim * (count_of(c, "ssm_state_size") or count_of(c, "mamba_d_state")) * 4
    return 0


def context_of(config: Mapping[str, Any]) -> int:
    """Tokens of context that a config.json states; 0 when it states none."""
    text = config.get("text_config")
    return count_of(text if isinstance(text, dict) else config, "max_position_embeddings")


def count_of(c: Mapping[str, Any], key: str) -> int:
    """A positive figure below 2**31; 0, which means unknown, for anything else."""
    value = c.get(key)
    return value if _is_count(value) else 0


def _checked(c: Mapping[str, Any], key: str, limit: int = MAX_COUNT) -> int:
    """A figure, or the largest of a list with one for each layer. 0 when it is not stated; raises ModelFileError."""
    value = c.get(key)
    if value is None:
        return 0
    values: list[Any] = value if isinstance(value, list) and len(value) <= MAX_LAYERS else [value]
    if not all(_is_count(v) and v <= limit for v in values):
        raise ModelFileError(f"the model's {key} is {_shown(value)}; it must be an integer from 0 to {limit}")
    return max(values, default=0)


def _words(c: Mapping[str, Any], key: str) -> list[str]:
    value = c.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_LAYERS or not all(isinstance(v, str) for v in value):
        raise ModelFileError(f"the model's {key} is {_shown(value)}; it must be a list of at most {MAX_LAYERS} strings")
    return value


def _shown(value: object) -> str:
    """Short, and without going into what may be nested deeply."""
    return f"{value!r:.80}" if isinstance(value, int | float | str) else f"a {type(value).__name__} of something else"


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_COUNT
