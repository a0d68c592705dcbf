"""Mixtures of experts over ordinary attention."""

from __future__ import annotations

from tests.conformance.configs.base import FULL, LOCAL_GLOBAL, MOE, SLIDING, WINDOW, YARN, tiny

EXPERTS: dict[str, dict[str, object]] = {
    "Klear": tiny(MOE),
    "afmoe": tiny(MOE, LOCAL_GLOBAL, num_dense_layers=1),
    "bailing_moe": tiny(MOE, use_qk_norm=True, moe_router_enable_expert_bias=True, score_function="sigmoid"),
    "dbrx": tiny(
        d_model=32,
        n_layers=3,
        n_heads=4,
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    ),
    "deepseek": tiny(MOE),
    "dots1": tiny(MOE),
    "ernie4_5_moe": tiny(
        MOE, use_bias=True, moe_num_experts=8, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1
    ),
    "exaone_moe": tiny(MOE, LOCAL_GLOBAL, is_moe_layer=[False, True, True, True]),
    "glm4_moe": tiny(MOE, attention_bias=True, use_qk_norm=True),
    "gpt_oss": tiny(MOE, LOCAL_GLOBAL, rope_scaling=YARN),
    "granitemoe": tiny(
        MOE, logits_scaling=0.5, attention_multiplier=0.3, embedding_multiplier=1.5, residual_multiplier=0.8
    ),
    "hunyuan": tiny(
        MOE,
        num_hidden_layers=4,
        moe_topk=2,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    ),
    "laguna": tiny(
        MOE,
        LOCAL_GLOBAL,
        num_attention_heads_per_layer=[4, 6, 4, 6],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "llama4": tiny(
        text_config=tiny(
            MOE,
            model_type="llama4_text",
            num_hidden_layers=4,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=48,
            intermediate_size=16,
            num_experts_per_tok=1,
            use_qk_norm=True,
            floor_scale=16,
        )
    ),
    "llama4_text": tiny(num_hidden_layers=4, intermediate_size_mlp=48, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True),
    "mellum": tiny(
        MOE,
        LOCAL_GLOBAL,
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 10000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "mimo_v2_flash": tiny(
        MOE,
        num_hidden_layers=4,
        hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        layernorm_epsilon=1e-5,
        swa_rope_theta=1000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=1,
        v_head_dim=12,
        swa_head_dim=16,
        swa_v_head_dim=12,
        attention_value_scale=0.7,
    ),
    "minimax": tiny(MOE, shared_intermediate_size=16, rotary_dim=8),
    "minimax_m3_vl": tiny(
        text_config=tiny(
            MOE,
            num_hidden_layers=3,
            dense_intermediate_size=48,
            shared_intermediate_size=16,
            intermediate_size=16,
            mlp_layer_types=["dense", "sparse", "sparse"],
            layer_types=[FULL, "sparse_attention", "sparse_attention"],
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=4,
            index_topk_blocks=3,
            index_local_blocks=1,
        )
    ),
    "mixtral": tiny(MOE),
    "muse_spark": tiny(
        text_config=tiny(
            MOE,
            LOCAL_GLOBAL,
            post_norm_eps=1e-6,
            rope_parameters={"rope_theta": 10000.0},
            layer_rope_theta=[1000.0, 10000.0, 1000.0, 0.0],
            final_logit_softcapping=20.0,
            output_multiplier=0.5,
            num_shared_experts=0,
            moe_hidden_size=32,
            qk_scale_factor=2.0,
        )
    ),
    "olmoe": tiny(MOE),
    "phimoe": tiny(
        MOE,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.2, 2.4, 2.6],
            "short_mscale": 1.0,
            "long_mscale": 1.1,
        },
        original_max_position_embeddings=64,
    ),
    "phixtral": tiny(num_vocab=160, model_dim=32, num_heads=4, num_layers=3, rotary_dim=4, num_local_experts=4),
    "qwen2_moe": tiny(MOE),
    "qwen3_moe": tiny(MOE, mlp_only_layers=[0]),
    "solar_open": tiny(MOE, use_qk_norm=True),
    "step3p5": tiny(
        num_hidden_layers=4,
        layer_types=[FULL, SLIDING, SLIDING, FULL],
        num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2},
        moe_num_experts=8,
        moe_top_k=2,
        moe_intermediate_size=16,
        share_expert_dim=16,
        moe_layers_enum="1,2,3",
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
        swiglu_limits=[0, 0, 7, 7],
        swiglu_limits_shared=[0, 0, 0, 7],
    ),
}
