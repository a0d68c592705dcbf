"""From GGUF metadata to the config.json that mlx-lm's model class of the same architecture takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from mlxinfer.formats.gguf.fields import Fields
    from mlxinfer.formats.gguf.reader import GGUFTensor

Config = dict[str, Any]

MAX_WIDTH = 2**20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_CONTEXT = 2**31 - 1
MAX_VOCABULARY = 2**22

# Llama 3.x's published rope scaling, except for the factor, which the file's own table shows.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def base_config(
    f: Fields, model_type: str, *, norm: str = ".attention.layer_norm_rms_epsilon", latent: bool = False
) -> Config:
    """What every decoder of the llama kind has.

    `norm`: the key of the norms' epsilon. `latent`: keys and values of different widths, which are the caller's.
    """
    embedding = f.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{f.file.path}: the tensor token_embd.weight is missing or not a matrix")
    vocab_size, width = embedding.shape
    if vocab_size > MAX_VOCABULARY:
        raise ModelFileError(f"{f.file.path}: token_embd.weight has {vocab_size} rows; at most {MAX_VOCABULARY}")
    hidden = f.integer(".embedding_length", 1, MAX_WIDTH)
    if hidden != width:
        raise f.fail(".embedding_length", f"is {hidden}, but token_embd.weight has rows of {width}")
    heads = f.integer(".attention.head_count", 1, MAX_HEADS)
    kv_heads = f.integer(".attention.head_count_kv", 1, MAX_HEADS, heads)
    if heads % kv_heads:
        raise f.fail(".attention.head_count_kv", f"is {kv_heads}, which does not divide the {heads} heads")
    epsilon = f.number(norm, 1e-12, 1.0)
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": f.integer(".block_count", 1, MAX_LAYERS),
        "intermediate_size": f.integer(".feed_forward_length", 1, MAX_WIDTH),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _head_dim(f, hidden, heads, latent),
        ("rms_norm_eps" if "rms" in norm else "layer_norm_eps"): epsilon,
        "vocab_size": vocab_size,
        "max_position_embeddings": f.integer(".context_length", 1, MAX_CONTEXT),
        "rope_theta": f.number(".rope.freq_base", 1e-3, 1e12, 10000.0),
        "tie_word_embeddings": "output.weight" not in f.file.tensors,
    }


def _head_dim(f: Fields, hidden: int, heads: int, latent: bool) -> int:
    if not f.has(".attention.key_length") and hidden % heads:
        raise f.fail(".attention.head_count", f"is {heads}, which does not divide the width {hidden}")
    head_dim = f.integer(".attention.key_length", 1, MAX_WIDTH, hidden // heads)
    value_dim = f.integer(".attention.value_length", 1, MAX_WIDTH, head_dim)
    if value_dim != head_dim and not latent:
        raise UnsupportedModelError(f"{f.file.path}: keys of {head_dim} and values of {value_dim} are not supported")
    if head_dim % 2:
        raise f.fail(".attention.key_length", f"is {head_dim}; it must be even")
    return head_dim


def llama_config(f: Fields) -> Config:
    config = base_config(f, "llama")
    require_full_rotation(f, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in f.file.tensors
    return config | rope_scaling(f, config)


def qwen2_config(f: Fields) -> Config:
    config = base_config(f, "qwen2")
    require_full_rotation(f, config)
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise f.fail(".attention.key_length", "times the heads must equal the width in qwen2")
    return config | rope_scaling(f, config)


def qwen3_config(f: Fields) -> Config:
    config = base_config(f, "qwen3")
    require_full_rotation(f, config)
    return config | rope_scaling(f, config)


def gemma_config(f: Fields) -> Config:
    config = base_config(f, "gemma")
    require_full_rotation(f, config)
    _require_tied(f, config)
    return config


def gemma2_config(f: Fields) -> Config:
    config = base_config(f, "gemma2")
    require_full_rotation(f, config)
    _require_tied(f, config)
    return config | {
        "attn_logit_softcapping": f.number(".attn_logit_softcapping", 1e-3, 1e6, 50.0),
        "final_logit_softcapping": f.number(".final_logit_softcapping", 1e-3, 1e6, 30.0),
        # The 27B (46 layers) scales by width per head; the file doesn't say so and llama.cpp goes by the layer count.
        "query_pre_attn_scalar": _query_scalar(config, 46),
    }


def gemma3_config(f: Fields) -> Config:
    config = base_config(f, "gemma3_text")
    require_full_rotation(f, config)
    pattern = _sliding_pattern(f, config["num_hidden_layers"])
    return config | {
        "rope_local_base_freq": f.number(".rope.freq_base_swa", 1e-3, 1e12, 10000.0),
        "sliding_window": f.integer(".attention.sliding_window", 1, MAX_CONTEXT),
        "sliding_window_pattern": pattern,
        "query_pre_attn_scalar": _query_scalar(config, 62),
        **rope_scaling(f, config),
    }


def phi3_config(f: Fields) -> Config:
    config = base_config(f, "phi3")
    head_dim = config["head_dim"]
    if head_dim * config["num_attention_heads"] != config["hidden_size"]:
        raise f.fail(".attention.key_length", "times the heads must equal the width in phi3")
    rotated = f.integer(".rope.dimension_count", 2, head_dim, head_dim)
    original = f.integer(".rope.scaling.original_context_length", 1, MAX_CONTEXT, config["max_position_embeddings"])
    config |= {"partial_rotary_factor": rotated / head_dim, "original_max_position_embeddings": original}
    factors = {name: f.file.tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")}
    short, long = factors["short"], factors["long"]
    if (short is None) != (long is None):
        raise ModelFileError(f"{f.file.path}: only one of rope_factors_short and rope_factors_long is there")
    if short is not None and long is not None:
        config["rope_scaling"] = {
            "type": "longrope",
            "short_factor": _factors(short, rotated // 2),
            "long_factor": _factors(long, rotated // 2),
        }
    return config


def require_full_rotation(f: Fields, config: Config) -> None:
    rotated = f.integer(".rope.dimension_count", 1, MAX_WIDTH, config["head_dim"])
    if rotated != config["head_dim"]:
        raise UnsupportedModelError(
            f"{f.file.path}: {f.key('.rope.dimension_count')} is {rotated} of {config['head_dim']}; "
            "a partial rotation is not supported here"
        )


def _require_tied(f: Fields, config: Config) -> None:
    if not config["tie_word_embeddings"]:
        raise UnsupportedModelError(f"{f.file.path}: {f.file.architecture} with an output matrix of its own")


def _query_scalar(config: Config, large_layers: int) -> float:
    if config["num_hidden_layers"] == large_layers:
        return config["hidden_size"] / config["num_attention_heads"]
    return config["head_dim"]


def _sliding_pattern(f: Fields, layers: int) -> int:
    """Every how many layers one sees everything. A file may hold the number, or a bool per layer (True slides)."""
    value = f.file.metadata.get(f.key(".attention.sliding_window_pattern"), 6)
    if isinstance(value, list):
        flags = [bool(v) for v in value]
        period = flags.index(False) + 1 if False in flags else 0
        if len(flags) != layers or not period or flags != [(i + 1) % period != 0 for i in range(layers)]:
            raise UnsupportedModelError(f"{f.file.path}: the sliding layers do not follow a period: {flags}"[:300])
        return period
    # mlx-lm asks the cache of layer `pattern - 1` for the mask of the layers that see everything.
    period = f.integer(".attention.sliding_window_pattern", 1, MAX_LAYERS, 6)
    if period > layers:
        raise UnsupportedModelError(f"{f.file.path}: {layers} layers, but only every {period}th sees everything")
    return period


def rope_scaling(f: Fields, config: Config) -> Config:
    """`rope_scaling` as mlx-lm's initialize_rope takes it, or nothing."""
    table = f.file.tensors.get("rope_freqs.weight")
    if table is not None:
        return {"rope_scaling": _from_table(_factors(table, config["head_dim"] // 2), config)}
    kind = f.text(".rope.scaling.type", "none")
    if kind == "none":
        return {}
    factor = f.number(".rope.scaling.factor", 1e-3, 1e6, 1.0)
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        original = f.integer(".rope.scaling.original_context_length", 1, MAX_CONTEXT, config["max_position_embeddings"])
        return {"rope_scaling": _yarn(f, factor, original)}
    raise UnsupportedModelError(f"{f.file.path}: {f.key('.rope.scaling.type')} is {kind!r}; none, linear and yarn are")


def _yarn(f: Fields, factor: float, original: int) -> Config:
    scaling: Config = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if f.has(f".rope.scaling.yarn_{key}"):
            scaling[key] = f.number(f".rope.scaling.yarn_{key}", 1e-6, 1e6)
    if f.has(".rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": f.number(".rope.scaling.yarn_log_multiplier", 0.0, 100.0)}
    return scaling


def _factors(tensor: GGUFTensor, count: int) -> list[float]:
    if tensor.type.name != "F32" or tensor.shape != (count,):
        raise ModelFileError(f"{tensor.path}: {tensor.name} must be {count} float32 numbers, not {tensor.shape}")
    values = tensor.read().reshape(-1).view("<f4")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelFileError(f"{tensor.path}: {tensor.name} has a factor that is not a positive number")
    return [float(v) for v in values]


def _from_table(factors: list[float], config: Config) -> Config:
    """What each frequency is divided by, as Llama 3's rule where that gives the same, else as the table itself."""
    rule = {"rope_type": "llama3", "factor": max(factors), **LLAMA3_ROPE}
    head_dim, theta = config["head_dim"], config["rope_theta"]
    ruled = [_llama3_factor(theta ** (2 * i / head_dim), max(factors)) for i in range(head_dim // 2)]
    if all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(factors, ruled, strict=True)):
        return rule
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        # Equal to the context, so that no extra attention scale is applied.
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_factor(period: float, factor: float) -> float:
    """What Llama 3 divides the frequency of `period` / 2π by."""
    low, high, context = LLAMA3_ROPE.values()
    wavelength = 2 * math.pi * period
    if wavelength < context / high:
        return 1.0
    if wavelength > context / low:
        return factor
    smooth = (context / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
