"""Vision and other wrappers: the text part as mlx-lm loads it."""

from __future__ import annotations

from tests.conformance.configs.base import FULL, LOCAL_GLOBAL, MOE, SLIDING, VOCAB, tiny
from tests.conformance.configs.hybrid import DELTA, QWEN3_5

WRAPPED: dict[str, dict[str, object]] = {
    "gemma3": tiny(
        text_config=tiny(
            model_type="gemma3_text", num_hidden_layers=4, sliding_window_pattern=2, query_pre_attn_scalar=16
        )
    ),
    "gemma4": tiny(
        text_config=tiny(
            model_type="gemma4_text",
            num_hidden_layers=5,
            layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
            num_kv_shared_layers=2,
            global_head_dim=24,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
        )
    ),
    "mistral3": tiny(text_config=tiny(LOCAL_GLOBAL, model_type="llama")),
    "pixtral": tiny(text_config=tiny(model_type="llama")),
    "qwen2_vl": tiny(text_config=tiny(model_type="qwen2")),
    "qwen3_vl": tiny(text_config=tiny(model_type="qwen3")),
    "qwen3_vl_moe": tiny(text_config=tiny(MOE, model_type="qwen3_moe")),
    # A pack of 2-bit matrices with a Hadamard rotation; two of the sizes it knows, the rest left in float32.
    "prism_hadamard_qwen35": tiny(
        text_config=tiny(DELTA, QWEN3_5, model_type="qwen3_5_text", hidden_size=128, intermediate_size=512),
        schema_version=1,
        tensor_namespace="mlx-lm-text",
        quantization={"bits": 2, "group_size": 128, "mode": "affine"},
        modules=[
            {"path": "model.layers.0.mlp.down_proj", "block": 512, "embedding": False, "dtype": "float16"},
            {"path": "model.layers.1.mlp.up_proj", "block": 0, "embedding": False, "dtype": "float16"},
        ],
    ),
}
