"""The config.json of architectures beside Llama, Qwen and Gemma. What files leave out is llama.cpp's own constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf.config import (
    MAX_CONTEXT,
    MAX_WIDTH,
    Config,
    base_config,
    require_full_rotation,
    rope_scaling,
)

if TYPE_CHECKING:
    from mlxinfer.formats.gguf.fields import Fields

MAX_EXPERTS = 4096
LAYER_NORM = ".attention.layer_norm_epsilon"
SLIDING, FULL = "sliding_attention", "full_attention"


def experts(f: Fields) -> tuple[int, int]:
    """(experts, experts for each token)."""
    count = f.integer(".expert_count", 1, MAX_EXPERTS)
    return count, f.integer(".expert_used_count", 1, count)


def require_own_width(f: Fields, config: Config) -> None:
    """mlx-lm's class has no head size of its own."""
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise f.fail(".attention.key_length", f"times the heads must equal the width in {config['model_type']}")


def require_plain_rope(f: Fields, config: Config) -> None:
    if rope_scaling(f, config):
        raise UnsupportedModelError(f"{f.file.path}: a rope scaling is not supported in {config['model_type']}")


def require_no_factor(f: Fields, name: str, value: float) -> None:
    """A number that mlx-lm's class takes to be `value`."""
    found = f.number(name, -1e6, 1e6, value)
    if abs(found - value) > 1e-6 * max(1.0, abs(value)):
        raise UnsupportedModelError(f"{f.file.path}: {f.key(name)} is {found}; only {value} is supported")


def rotated_part(f: Fields, config: Config) -> float:
    """The share of a head's dimensions that rope turns."""
    head_dim = config["head_dim"]
    return f.integer(".rope.dimension_count", 2, head_dim, head_dim) / head_dim


def mixtral_config(f: Fields) -> Config:
    config = base_config(f, "mixtral")
    require_full_rotation(f, config)
    require_own_width(f, config)
    count, used = experts(f)
    return config | {"num_local_experts": count, "num_experts_per_tok": used, **rope_scaling(f, config)}


def qwen2moe_config(f: Fields) -> Config:
    config = base_config(f, "qwen2_moe")
    require_full_rotation(f, config)
    require_own_width(f, config)
    count, used = experts(f)
    scaling = rope_scaling(f, config).get("rope_scaling")
    if scaling is not None and scaling["rope_type"] != "linear":
        raise UnsupportedModelError(f"{f.file.path}: a rope scaling of type {scaling['rope_type']} in qwen2moe")
    return config | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": f.integer(".expert_feed_forward_length", 1, MAX_WIDTH),
        "shared_expert_intermediate_size": f.integer(".expert_shared_feed_forward_length", 1, MAX_WIDTH),
        **({"rope_scaling": {"type": "linear", "factor": scaling["factor"]}} if scaling else {}),
    }


def qwen3moe_config(f: Fields) -> Config:
    config = base_config(f, "qwen3_moe")
    require_full_rotation(f, config)
    count, used = experts(f)
    return config | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": f.integer(".expert_feed_forward_length", 1, MAX_WIDTH),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        **rope_scaling(f, config),
    }


def gpt_oss_config(f: Fields) -> Config:
    config = base_config(f, "gpt_oss")
    require_full_rotation(f, config)
    count, used = experts(f)
    inner = f.integer(".expert_feed_forward_length", 1, MAX_WIDTH)
    if config["tie_word_embeddings"]:
        raise ModelFileError(f"{f.file.path}: the tensor output.weight is missing")
    return config | {
        "intermediate_size": inner,
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "sliding_window": f.integer(".attention.sliding_window", 1, MAX_CONTEXT),
        "layer_types": [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])],
        **rope_scaling(f, config),
    }


def mistral3_config(f: Fields) -> Config:
    config = base_config(f, "ministral3")
    require_full_rotation(f, config)
    scaling = rope_scaling(f, config).get("rope_scaling", {"rope_type": "default"})
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    return config | {
        "rope_parameters": {
            **scaling,
            "rope_theta": config["rope_theta"],
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": f.number(".attention.temperature_scale", 0.0, 100.0, 0.0),
        }
    }


def starcoder2_config(f: Fields) -> Config:
    config = base_config(f, "starcoder2", norm=LAYER_NORM)
    require_full_rotation(f, config)
    require_own_width(f, config)
    require_plain_rope(f, config)
    return config | {"norm_epsilon": config["layer_norm_eps"]}


def olmo2_config(f: Fields) -> Config:
    """Olmo 3 is an Olmo 2 with windows."""
    config = base_config(f, "olmo2")
    require_full_rotation(f, config)
    if not f.has(".attention.sliding_window"):
        return config | rope_scaling(f, config)
    window = f.integer(".attention.sliding_window", 1, MAX_CONTEXT)
    flags = f.file.metadata.get(f.key(".attention.sliding_window_pattern"), 4)
    layers = config["num_hidden_layers"]
    if not isinstance(flags, list):
        period = f.integer(".attention.sliding_window_pattern", 1, layers, 4)
        flags = [(i + 1) % period != 0 for i in range(layers)]
    if len(flags) != layers:
        raise f.fail(".attention.sliding_window_pattern", f"has {len(flags)} entries for {layers} layers")
    return config | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": [SLIDING if flag else FULL for flag in flags],
        **rope_scaling(f, config),
    }


def olmoe_config(f: Fields) -> Config:
    config = base_config(f, "olmoe")
    require_full_rotation(f, config)
    count, used = experts(f)
    return config | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "norm_topk_prob": False,
        **rope_scaling(f, config),
    }


def granite_config(f: Fields) -> Config:
    config = base_config(f, "granite")
    require_full_rotation(f, config)
    require_own_width(f, config)
    tensors = f.file.tensors
    return config | {
        "logits_scaling": f.number(".logit_scale", 1e-6, 1e6, 1.0),
        "attention_multiplier": f.number(".attention.scale", 1e-6, 1e6, config["head_dim"] ** -0.5),
        "embedding_multiplier": f.number(".embedding_scale", 1e-6, 1e6, 1.0),
        "residual_multiplier": f.number(".residual_scale", 1e-6, 1e6, 1.0),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        **rope_scaling(f, config),
    }


def granitemoe_config(f: Fields) -> Config:
    count, used = experts(f)
    return granite_config(f) | {"model_type": "granitemoe", "num_local_experts": count, "num_experts_per_tok": used}


def cohere_config(f: Fields) -> Config:
    config = base_config(f, "cohere", norm=LAYER_NORM)
    require_full_rotation(f, config)
    require_own_width(f, config)
    require_plain_rope(f, config)
    if not config["tie_word_embeddings"]:
        raise UnsupportedModelError(f"{f.file.path}: command-r with an output matrix of its own")
    return config | {
        "logit_scale": f.number(".logit_scale", 1e-6, 1e6),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in f.file.tensors,
    }


def cohere2_config(f: Fields) -> Config:
    config = base_config(f, "cohere2", norm=LAYER_NORM)
    require_full_rotation(f, config)
    require_plain_rope(f, config)
    if not config["tie_word_embeddings"]:
        raise UnsupportedModelError(f"{f.file.path}: cohere2 with an output matrix of its own")
    return config | {
        "logit_scale": f.number(".logit_scale", 1e-6, 1e6),
        "sliding_window": f.integer(".attention.sliding_window", 1, MAX_CONTEXT),
        "sliding_window_pattern": 4,
    }


def glm4_config(f: Fields) -> Config:
    config = base_config(f, "glm4")
    require_plain_rope(f, config)
    if config["tie_word_embeddings"]:
        raise ModelFileError(f"{f.file.path}: the tensor output.weight is missing")
    return config | {
        "attention_bias": "blk.0.attn_q.bias" in f.file.tensors,
        "partial_rotary_factor": rotated_part(f, config),
    }


def smollm3_config(f: Fields) -> Config:
    config = base_config(f, "smollm3")
    require_full_rotation(f, config)
    return config | {"no_rope_layer_interval": 4, **rope_scaling(f, config)}


def stablelm_config(f: Fields) -> Config:
    config = base_config(f, "stablelm", norm=LAYER_NORM)
    require_own_width(f, config)
    require_plain_rope(f, config)
    if config["tie_word_embeddings"]:
        raise ModelFileError(f"{f.file.path}: the tensor output.weight is missing")
    # llama.cpp too goes by the second norm: it is what a parallel residual doesn't have.
    parallel = "blk.0.ffn_norm.weight" not in f.file.tensors
    if parallel != f.boolean(".use_parallel_residual", parallel):
        raise f.fail(".use_parallel_residual", f"is {not parallel}, which the tensor blk.0.ffn_norm.weight contradicts")
    return config | {
        "use_qkv_bias": "blk.0.attn_q.bias" in f.file.tensors,
        "partial_rotary_factor": rotated_part(f, config),
        "use_parallel_residual": parallel,
        "qk_layernorm": False,
    }


def exaone_config(f: Fields) -> Config:
    config = base_config(f, "exaone")
    require_full_rotation(f, config)
    return config | {
        "num_layers": config["num_hidden_layers"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        **rope_scaling(f, config),
    }


def exaone4_config(f: Fields) -> Config:
    config = base_config(f, "exaone4")
    require_full_rotation(f, config)
    window, pattern = None, None
    if f.has(".attention.sliding_window"):
        window, pattern = f.integer(".attention.sliding_window", 1, MAX_CONTEXT), "LLLG"
    return config | {
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "rope_scaling": None,
        **rope_scaling(f, config),
    }


def internlm2_config(f: Fields) -> Config:
    config = base_config(f, "internlm2")
    require_full_rotation(f, config)
    require_own_width(f, config)
    scaling = rope_scaling(f, config).get("rope_scaling")
    if scaling is not None and scaling["rope_type"] != "linear":
        raise UnsupportedModelError(f"{f.file.path}: a rope scaling of type {scaling['rope_type']} in internlm2")
    return config | {
        "bias": False,
        **({"rope_scaling": {"type": "linear", "factor": scaling["factor"]}} if scaling else {}),
    }


def phi2_config(f: Fields) -> Config:
    config = base_config(f, "phi", norm=LAYER_NORM)
    require_own_width(f, config)
    require_plain_rope(f, config)
    return config | {"partial_rotary_factor": rotated_part(f, config)}


def seed_oss_config(f: Fields) -> Config:
    config = base_config(f, "seed_oss")
    require_full_rotation(f, config)
    return config | {
        "attention_bias": "blk.0.attn_q.bias" in f.file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in f.file.tensors,
        **rope_scaling(f, config),
    }


def ernie4_5_config(f: Fields) -> Config:
    config = base_config(f, "ernie4_5")
    require_full_rotation(f, config)
    require_plain_rope(f, config)
    return config | {"use_bias": "blk.0.attn_q.bias" in f.file.tensors}


def _sigmoid_experts(f: Fields) -> Config:
    """Routing by sigmoid scores with a correction per expert, as DeepSeek V3 has it."""
    count, used = experts(f)
    # llama.cpp's numbers of the functions: 1 is softmax, 2 is sigmoid.
    gating = f.integer(".expert_gating_func", 0, 100, 2)
    if gating != 2:
        raise UnsupportedModelError(f"{f.file.path}: {f.key('.expert_gating_func')} is {gating}; only 2 is supported")
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": f.integer(".expert_feed_forward_length", 1, MAX_WIDTH),
        "n_shared_experts": f.integer(".expert_shared_count", 1, MAX_EXPERTS),
        "routed_scaling_factor": f.number(".expert_weights_scale", 1e-6, 1e6, 1.0),
        "norm_topk_prob": f.boolean(".expert_weights_norm", False),
        "first_k_dense_replace": f.integer(".leading_dense_block_count", 0, 1024, 0),
        "n_group": f.integer(".expert_group_count", 1, count, 1),
        "topk_group": f.integer(".expert_group_used_count", 1, count, 1),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _without_nextn(f: Fields, config: Config) -> None:
    """block_count counts the layers that predict several tokens at once, too."""
    extra = f.integer(".nextn_predict_layers", 0, config["num_hidden_layers"] - 1, 0)
    config["num_hidden_layers"] -= extra
    config["num_nextn_predict_layers"] = extra


def glm4moe_config(f: Fields) -> Config:
    config = base_config(f, "glm4_moe")
    require_plain_rope(f, config)
    _without_nextn(f, config)
    if config["tie_word_embeddings"]:
        raise ModelFileError(f"{f.file.path}: the tensor output.weight is missing")
    return config | {
        **_sigmoid_experts(f),
        "rope_scaling": None,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in f.file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in f.file.tensors,
        "partial_rotary_factor": rotated_part(f, config),
    }


def dots1_config(f: Fields) -> Config:
    config = base_config(f, "dots1")
    require_full_rotation(f, config)
    return config | _sigmoid_experts(f) | rope_scaling(f, config)


def deepseek2_config(f: Fields) -> Config:
    """DeepSeek V3 and what is built like it; the keys' and values' widths are those after the compression."""
    config = base_config(f, "deepseek_v3", latent=True)
    _without_nextn(f, config)
    if not f.has(".attention.key_length_mla"):
        raise UnsupportedModelError(
            f"{f.file.path}: {f.key('.attention.key_length_mla')} is missing: files from before April 2025 keep "
            "attn_kv_b in one piece, which is not supported; convert the model anew"
        )
    rotated = f.integer(".rope.dimension_count", 2, MAX_WIDTH)
    key = f.integer(".attention.key_length_mla", rotated + 1, MAX_WIDTH)
    scaling = rope_scaling(f, config | {"head_dim": rotated})
    if "rope_scaling" in scaling and "mscale_all_dim" in scaling["rope_scaling"]:
        # llama.cpp stores a tenth of it.
        mscale = 10 * scaling["rope_scaling"]["mscale_all_dim"]
        scaling["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}
    return config | {
        **_sigmoid_experts(f),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": f.integer(".attention.q_lora_rank", 1, MAX_WIDTH),
        "kv_lora_rank": f.integer(".attention.kv_lora_rank", 1, MAX_WIDTH),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": f.integer(".attention.value_length_mla", 1, MAX_WIDTH),
        "rope_scaling": None,
        **scaling,
    }
