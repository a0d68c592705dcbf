"""What all tiny configs share. mlx-lm's ModelArgs ignore the keys they do not know, so one base serves them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOW = 8  # sliding windows and attention chunks; prompts are longer
VOCAB = 160

# Head size 16 is not hidden_size / heads on purpose: a model that mixes them up breaks here.
BASE: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "sliding_window": WINDOW,
}

# Experts: enough that two tokens of one batch seldom choose the same pair.
MOE: dict[str, object] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 2,
    "topk_group": 1,
}

# Latent attention: three different head sizes, so that a swap of key and value shows.
MLA: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}

FULL, SLIDING = "full_attention", "sliding_attention"
# A local layer first and last, and two full ones: every kind sees the output of the other.
LOCAL_GLOBAL = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL]}

YARN: dict[str, object] = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny(*parts: Mapping[str, object], **own: object) -> dict[str, object]:
    """BASE, overlaid with each of `parts` and then with `own`."""
    config = dict(BASE)
    for part in parts:
        config.update(part)
    return config | own
