"""Tiny random models of every family that is exported, as folders of mlx-lm, packed or not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from mlxinfer import upstream
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma": GEMMA,
    "gemma2": {
        **GEMMA,
        "query_pre_attn_scalar": 32,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **GEMMA,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 5000.0,
    },
    "phi3": {"head_dim": None, "pad_token_id": 0, "sliding_window": None},
    "mixtral": {**MOE, "intermediate_size": 32, "head_dim": None, "sliding_window": None},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_moe": {**MOE, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "head_dim": 32},
    "olmoe": {**MOE, "intermediate_size": 32, "num_key_value_heads": 4, "norm_topk_prob": False},
    "gpt_oss": {
        **MOE,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
        },
    },
}
"""By model_type: what differs from BASE."""


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    values = {"model_type": model_type, **BASE, **FAMILIES[model_type], **changes}
    return {key: value for key, value in values.items() if key == "sliding_window" or value is not None}


def build(cfg: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """A random model whose output depends on its context; norms and biases are random too."""
    rng = np.random.default_rng(seed)
    model, _ = upstream.blank_model(cfg)

    def value(name: str, w: mx.array) -> mx.array:
        noise = rng.standard_normal(w.shape).astype(np.float32)
        if w.ndim > 1:
            return mx.array(1.5 * noise / w.shape[-1] ** 0.5)
        return mx.array(0.3 * noise + name.endswith("norm.weight"))

    model.update(tree_map_with_path(value, model.parameters()))
    mx.eval(model.parameters())
    return model


def write(
    folder: Path,
    model_type: str,
    *,
    dtype: mx.Dtype = mx.float32,
    quantization: Mapping[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """The whole folder; with `quantization` ({"bits", "group_size", "mode"}) its matrices are packed."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = config(model_type, **changes)
    model = build(cfg, seed)
    model.set_dtype(dtype)
    if quantization:
        nn.quantize(model, **quantization)
        cfg["quantization"] = dict(quantization)
    if model_type == "gemma3_text":
        model.pop("lm_head", None)
    flat: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(flat), metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(cfg))
    tiny.build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": tiny.CHATML})
    )
    return folder


def load(folder: Path) -> nn.Module:
    from mlxinfer.formats.safetensors import shard_files

    model, _ = upstream.load_folder(folder, shard_files(folder))
    return model
