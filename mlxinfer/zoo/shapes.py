"""What one sequence keeps in memory, read off a config: bytes of keys, values and recurrent state at a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.zoo.entries import CacheShape

if TYPE_CHECKING:
    from collections.abc import Mapping

FULL = frozenset({"full_attention", "attention", "global_attention"})
WINDOWED = frozenset({"sliding_attention", "chunked_attention", "local_attention"})


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

    A layer kind that is not known counts as full attention, so the figure errs on the large side.
    """
    text = config.get("text_config")
    c: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    layers = _int(c, "num_hidden_layers") or _int(c, "n_layers")
    heads = _int(c, "num_attention_heads")
    kv_heads = _int(c, "num_key_value_heads") or heads
    head_dim = _int(c, "head_dim") or (_int(c, "hidden_size") // heads if heads else 0)
    full, windowed = _layer_kinds(c, layers)
    if shared := _int(c, "num_kv_shared_layers"):
        full, windowed = _layer_kinds(c, layers, layers - shared)
    latent = _int(c, "kv_lora_rank")
    wide_dim, wide_heads = _int(c, "global_head_dim"), _int(c, "num_global_key_value_heads")
    return CacheShape(
        layers=full + windowed,
        kv_heads=wide_heads or kv_heads,
        head_dim=wide_dim or head_dim,
        window_layers=windowed,
        window=_int(c, "sliding_window") or _int(c, "attention_chunk_size") if windowed else 0,
        window_kv_heads=kv_heads if windowed and wide_heads else 0,
        window_head_dim=head_dim if windowed and wide_dim else 0,
        latent=latent + _int(c, "qk_rope_head_dim") if latent else 0,
        state_bytes=(layers - full - windowed) * _state_bytes(c) if not _int(c, "num_kv_shared_layers") else 0,
    )


def shape_from_gguf(architecture: str, metadata: Mapping[str, Any]) -> CacheShape:
    """The cache's shape out of GGUF metadata, whose keys start with the architecture."""
    m: dict[str, Any] = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items()}
    layers, heads = _int(m, "block_count"), _int(m, "attention.head_count")
    kv = m.get("attention.head_count_kv", heads)
    kv_heads = max((int(h) for h in kv), default=0) if isinstance(kv, list) else _int(m, "attention.head_count_kv")
    kv_heads = kv_heads or heads
    head_dim = _int(m, "attention.key_length") or (_int(m, "embedding_length") // heads if heads else 0)
    window = _int(m, "attention.sliding_window")
    # GGUF states the window but not which layers have it; these two are the models' own patterns.
    every = {"gemma3": 6, "gpt-oss": 2}.get(architecture, 0) if window else 0
    windowed = layers - layers // every if every else 0
    return CacheShape(layers, kv_heads, head_dim, windowed, window if windowed else 0)


def _layer_kinds(c: Mapping[str, Any], layers: int, first: int | None = None) -> tuple[int, int]:
    """(full, windowed) attention layers among the first ones; what is neither keeps a recurrent state."""
    kinds = c.get("layer_types") or c.get("layers_block_type")
    count = layers if first is None else first
    if isinstance(kinds, list) and kinds:
        head = kinds[:count]
        windowed = sum(k in WINDOWED for k in head)
        known = any(k in FULL or k in WINDOWED for k in kinds)
        return (sum(k in FULL for k in head) if known else len(head) - windowed), windowed
    if every := _int(c, "full_attention_interval"):
        return count // every, 0
    if isinstance(pattern := c.get("hybrid_override_pattern"), str):
        return pattern.count("*"), 0
    if (every := _int(c, "sliding_window_pattern")) and _int(c, "sliding_window"):
        return count // every, count - count // every
    if str(c.get("model_type", "")).startswith("gemma3") and _int(c, "sliding_window"):
        return count // 6, count - count // 6
    return count, 0


def _state_bytes(c: Mapping[str, Any]) -> int:
    """Recurrent state of one linear-attention or Mamba layer: float32 state, half-precision convolution tail."""
    if heads := _int(c, "linear_num_value_heads"):
        value, key = _int(c, "linear_value_head_dim"), _int(c, "linear_key_head_dim")
        channels = 2 * _int(c, "linear_num_key_heads") * key + heads * value
        return heads * value * key * 4 + channels * 3 * 2
    if heads := _int(c, "mamba_num_heads") or _int(c, "mamba_n_heads"):
        dim = _int(c, "mamba_head_dim") or _int(c, "mamba_d_head")
        return heads * dim * (_int(c, "ssm_state_size") or _int(c, "mamba_d_state")) * 4
    return 0


def _int(c: Mapping[str, Any], key: str) -> int:
    value = c.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else 0
