"""Recurrent and hybrid models. State and head sizes are multiples of 32: mlx-lm's Metal kernels ask for that."""

from __future__ import annotations

from tests.conformance.configs.base import FULL, MLA, MOE, SLIDING, WINDOW, tiny

DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
NEMOTRON_H = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, 100.0],
}
QWEN3_5 = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
GRANITE = {"logits_scaling": 0.5, "attention_multiplier": 0.3, "embedding_multiplier": 1.5, "residual_multiplier": 0.8}

HYBRID: dict[str, dict[str, object]] = {
    "baichuan_m1": tiny(
        num_hidden_layers=4,
        sliding_window_layers=[0, 2],
        conv_window=2,
        num_swa_attention_heads=4,
        num_swa_key_value_heads=2,
    ),
    "bailing_hybrid": tiny(MLA, MOE, num_hidden_layers=4, layer_group_size=2, group_norm_size=2, num_attention_heads=4),
    "bailing_moe_linear": tiny(MOE, num_hidden_layers=4, layer_group_size=2, group_norm_size=2, use_qk_norm=True),
    "bailing_moe_v3": tiny(
        MLA, MOE, num_hidden_layers=4, layer_group_size=2, head_dim=32, moe_shared_expert_intermediate_size=16
    ),
    "falcon_h1": tiny(
        MAMBA2,
        mamba_d_ssm=64,
        mamba_chunk_size=16,
        mamba_expand=2,
        mamba_rms_norm=True,
        key_multiplier=1.0,
        lm_head_multiplier=1.0,
        ssm_out_multiplier=1.0,
        ssm_in_multiplier=1.0,
        attention_out_multiplier=1.0,
        embedding_multiplier=1.0,
        ssm_multipliers=[1.0] * 5,
        mlp_multipliers=[1.0, 1.0],
    ),
    "gear": tiny(
        num_hidden_layers=4, layer_types=["conv_mixer", SLIDING, "conv_mixer", FULL], tie_word_embeddings=True
    ),
    "granitemoehybrid": tiny(
        MOE,
        MAMBA2,
        GRANITE,
        num_hidden_layers=4,
        shared_intermediate_size=16,
        layer_types=["mamba", "attention", "mamba", "attention"],
    ),
    "granitemoehybrid/dense": tiny(
        MAMBA2,
        GRANITE,
        num_hidden_layers=4,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention", "mamba", "attention"],
        position_embedding_type="nope",
    ),
    "jamba": tiny(
        MOE,
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=8,
        mamba_expand=2,
    ),
    "kimi_linear": tiny(
        MLA,
        MOE,
        num_hidden_layers=4,
        linear_attn_config=KDA,
        model_max_length=512,
        num_experts_per_token=2,
        use_grouped_topk=True,
        q_lora_rank=None,
        mla_use_nope=True,
    ),
    "kimi_k3": tiny(
        text_config=tiny(
            MLA,
            MOE,
            num_hidden_layers=4,
            linear_attn_config={**KDA, "gate_lower_bound": -5.0},
            num_experts_per_token=2,
            attn_res_block_size=2,
            mla_use_output_gate=True,
            activation_situ_beta=1.0,
            activation_situ_linear_beta=1.0,
        )
    ),
    "lfm2": tiny(
        num_hidden_layers=4,
        conv_bias=True,
        conv_L_cache=3,
        block_dim=32,
        block_ff_dim=48,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", FULL, "conv", FULL],
    ),
    "lfm2_moe": tiny(
        MOE,
        num_hidden_layers=4,
        use_expert_bias=True,
        num_dense_layers=1,
        conv_bias=True,
        conv_L_cache=3,
        layer_types=["conv", FULL, "conv", FULL],
    ),
    "lfm2-vl": tiny(
        text_config=tiny(
            model_type="lfm2",
            num_hidden_layers=4,
            conv_bias=True,
            conv_L_cache=3,
            block_dim=32,
            block_ff_dim=48,
            block_multiple_of=8,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", FULL, "conv", FULL],
        )
    ),
    "mamba": tiny(
        state_size=8, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4, intermediate_size=64
    ),
    "mamba/falcon": tiny(
        state_size=8,
        conv_kernel=4,
        use_bias=True,
        use_conv_bias=True,
        time_step_rank=4,
        intermediate_size=64,
        use_bcdt_rms=True,
    ),
    "mamba2": tiny(
        num_heads=4,
        head_dim=16,
        state_size=32,
        conv_kernel=4,
        n_groups=2,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=[0.0, 100.0],
        time_step_rank="auto",
        intermediate_size=64,
    ),
    "nemotron_h": tiny(NEMOTRON_H, hybrid_override_pattern="M*-M*", num_hidden_layers=5),
    "nemotron_h/moe": tiny(
        MOE, NEMOTRON_H, hybrid_override_pattern="M*EM*E", num_hidden_layers=6, moe_shared_expert_intermediate_size=16
    ),
    "olmo_hybrid": tiny(
        DELTA,
        num_hidden_layers=4,
        linear_num_key_heads=4,
        linear_allow_neg_eigval=True,
        layer_types=["linear_attention", FULL, "linear_attention", FULL],
    ),
    "plamo2": tiny(
        num_hidden_layers=4,
        hidden_size_per_head=16,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_num_heads=4,
        mamba_step=2,
        intermediate_size=48,
    ),
    "qwen3_next": tiny(DELTA, MOE, num_hidden_layers=4, full_attention_interval=2),
    "qwen3_5": tiny(text_config=tiny(DELTA, QWEN3_5, model_type="qwen3_5_text")),
    "qwen3_5_moe": tiny(text_config=tiny(DELTA, MOE, QWEN3_5, model_type="qwen3_5_moe_text")),
    "recurrent_gemma": tiny(
        num_hidden_layers=4,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        block_types=["recurrent", "attention"],
        num_key_value_heads=1,
        head_dim=8,
    ),
    "rwkv7": tiny(
        head_dim=32, hidden_size=64, a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8
    ),
}
