"""Latent attention (MLA), with and without an index that picks which keys are read."""

from __future__ import annotations

from tests.conformance.configs.base import MLA, MOE, YARN, tiny

INDEX = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 12}
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

LATENT: dict[str, dict[str, object]] = {
    "deepseek_v2": tiny(MLA, MOE, rope_scaling=YARN, topk_method="group_limited_greedy"),
    "deepseek_v2/lite": tiny(MLA, MOE, rope_scaling=YARN, q_lora_rank=None, topk_method="greedy", n_group=1),
    "deepseek_v3": tiny(MLA, MOE, NOAUX, rope_scaling=YARN),
    "deepseek_v32": tiny(MLA, MOE, NOAUX, INDEX),
    "deepseek_v41": tiny(
        MOE,
        num_hidden_layers=4,
        head_dim=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        compress_ratios=[0, 4, 4, 4],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        rms_norm_eps=1e-6,
        rope_scaling=YARN,
    ),
    "glm4_moe_lite": tiny(MLA, MOE, NOAUX),
    "glm_moe_dsa": tiny(MLA, MOE, NOAUX, INDEX, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}),
    "kimi_k25": tiny(text_config=tiny(MLA, MOE, NOAUX, model_type="deepseek_v3")),
    "kimi_vl": tiny(text_config=tiny(MLA, MOE, NOAUX, model_type="deepseek_v3")),
    "longcat_flash": tiny(
        MLA,
        MOE,
        num_layers=2,
        attention_method="MLA",
        zero_expert_type="identity",
        zero_expert_num=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        moe_topk=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
    ),
    "longcat_flash_ngram": tiny(
        MLA,
        MOE,
        num_layers=2,
        zero_expert_type="identity",
        zero_expert_num=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        moe_topk=2,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        ngram_vocab_size_ratio=2,
        emb_neighbor_num=3,
        emb_split_num=2,
    ),
    "minicpm3": tiny(
        MLA,
        head_dim=8,
        dim_model_base=16,
        scale_depth=1.4,
        scale_emb=2.0,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.2, 2.4, 2.6],
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral4": tiny(
        MLA,
        MOE,
        rope_parameters={**YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    ),
    "youtu_llm": tiny(MLA),
}
