"""GGUF files out of tiny mlx-lm models, written as llama.cpp's converter writes them.

Names come from the tensor maps of the `gguf` package and the rules below from llama.cpp's converter, so that nothing is
shared with the reader. llama.cpp itself confirms the files: tests/parity/make_architectures.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from gguf.constants import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten

from tests.conformance import weights
from tests.conformance.configs.base import MLA, MOE, tiny
from tests.unit.formats.gguf_files import VOCABULARY, Blueprint, auto, bpe_vocabulary, tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.nn as nn

Arrays = dict[str, np.ndarray]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Case:
    """One architecture: mlx-lm's module, its config, and what the file holds beyond the usual."""

    arch: str
    module: str
    config: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    """Without the architecture's name: ".expert_count"."""
    names: dict[str, str] = field(default_factory=dict)
    """Replaced in mlx-lm's names before the tensor map is asked."""
    interleaved: bool = False
    norms_shifted: bool = False
    rewrite: Callable[[Arrays, dict[str, Any]], Arrays] | None = None
    """Anything else that the converter does to the arrays, under GGUF's names."""
    llama_cpp: bool = True
    """It loads the file: some sizes it knows by the number of layers only."""


def own(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A tiny config of 64 columns: blocks of 32 fit into every matrix."""
    base = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    return tiny(base, {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}, *parts, **changes)


EXPERTS = {".expert_count": 8, ".expert_used_count": 2}
INNER = {**EXPERTS, ".expert_feed_forward_length": 32}
MOE_CONFIG: dict[str, Any] = {**MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
SWITCH = {"mlp.switch_mlp": "mlp.experts"}
NARROW = {"head_dim": 16}


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `permute`: a head's two halves take turns."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _split_internlm(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    out: Arrays = {}
    for name, value in arrays.items():
        if "attn_q." not in name:
            out[name] = value
            continue
        groups = value.reshape(kv, heads // kv + 2, -1, value.shape[-1])
        width = value.shape[-1]
        out[name.replace("attn_q", "attn_q")] = _interleave(groups[:, :-2].reshape(-1, width), heads)
        out[name.replace("attn_q", "attn_k")] = _interleave(groups[:, -2].reshape(-1, width), kv)
        out[name.replace("attn_q", "attn_v")] = groups[:, -1].reshape(-1, width)
    return out


def _flat_gate(arrays: Arrays, _: dict[str, Any]) -> Arrays:
    return {n: v.reshape(-1) if "ffn_gate_inp_shexp" in n else v for n, v in arrays.items()}


def _rope_freqs(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    """The table that the converter makes of Llama 3's rule."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    freqs = config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = (scaling["original_max_position_embeddings"] / scaling[f"{k}_freq_factor"] for k in ("low", "high"))
    table = []
    for length in 2 * np.pi * freqs:
        smooth = (scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        table.append(
            1
            if length < high
            else scaling["factor"]
            if length > low
            else 1 / ((1 - smooth) / scaling["factor"] + smooth)
        )
    return {"rope_freqs.weight": np.array(table, dtype=np.float32), **arrays}


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN_KEYS = {
    ".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".rope.scaling.original_context_length": 64,
}  # fmt: skip
PLAIN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, Case] = {
    "llama": Case("llama", "llama", own(rope_theta=500000.0), interleaved=True),
    "llama/llama3": Case(
        "llama", "llama", own(rope_scaling=LLAMA3, rope_theta=500000.0), interleaved=True, rewrite=_rope_freqs
    ),
    "llama/tied": Case("llama", "llama", own(tie_word_embeddings=True), interleaved=True),
    "mixtral": Case(
        "llama", "mixtral", own(MOE_CONFIG), EXPERTS,
        {"block_sparse_moe.switch_mlp": "mlp.experts"}, interleaved=True,
    ),
    "qwen2": Case("qwen2", "qwen2", own()),
    "qwen2/yarn": Case("qwen2", "qwen2", own(rope_scaling=PLAIN_YARN), YARN_KEYS),
    "qwen3": Case("qwen3", "qwen3", own()),
    "qwen2moe": Case(
        "qwen2moe", "qwen2_moe", own(MOE_CONFIG), {**INNER, ".expert_shared_feed_forward_length": 32}, SWITCH,
        rewrite=_flat_gate,
    ),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", own(MOE_CONFIG), INNER, SWITCH),
    "gemma": Case("gemma", "gemma", own(tie_word_embeddings=True), norms_shifted=True),
    "gemma2": Case(
        "gemma2", "gemma2", own(query_pre_attn_scalar=16.0),
        {".attention.sliding_window": 4096, ".attn_logit_softcapping": 50.0, ".final_logit_softcapping": 30.0},
        norms_shifted=True,
    ),
    "gemma3": Case(
        "gemma3", "gemma3_text", own(num_hidden_layers=6, sliding_window_pattern=6, query_pre_attn_scalar=16.0,
            rope_local_base_freq=10000.0, rope_theta=1000000.0, tie_word_embeddings=True),
        {".attention.sliding_window": 8}, norms_shifted=True,
    ),
    "phi3": Case("phi3", "phi3", own(partial_rotary_factor=1.0), llama_cpp=False),
    "gpt-oss": Case(
        "gpt-oss", "gpt_oss",
        own(MOE_CONFIG, rope_scaling=PLAIN_YARN, intermediate_size=32, num_hidden_layers=4,
            layer_types=[SLIDING, FULL, SLIDING, FULL], sliding_window=8),
        {**INNER, **YARN_KEYS, ".attention.sliding_window": 8, ".feed_forward_length": 32},
    ),
    "mistral3": Case(
        "mistral3", "ministral3",
        own(tie_word_embeddings=False, rope_parameters={
            **PLAIN_YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
            }),
        {**YARN_KEYS, ".attention.temperature_scale": 0.1, ".rope.scaling.yarn_log_multiplier": 1.0},
        interleaved=True,
    ),
    "starcoder2": Case("starcoder2", "starcoder2", own(norm_epsilon=1e-5, tie_word_embeddings=False)),
    "olmo2": Case("olmo2", "olmo2", own(num_key_value_heads=2)),
    "olmo3": Case(
        "olmo2", "olmo3", own(num_hidden_layers=4, layer_types=[SLIDING, SLIDING, SLIDING, FULL]),
        {".attention.sliding_window": 8, ".attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "olmoe": Case(
        "olmoe", "olmoe", own(MOE_CONFIG, norm_topk_prob=False, intermediate_size=32, num_key_value_heads=4),
        EXPERTS, SWITCH,
    ),
    "granite": Case(
        "granite", "granite",
        own(logits_scaling=0.5, attention_multiplier=0.3, embedding_multiplier=1.5, residual_multiplier=0.8),
        {".logit_scale": 0.5, ".attention.scale": 0.3, ".embedding_scale": 1.5, ".residual_scale": 0.8},
        interleaved=True,
    ),
    "granitemoe": Case(
        "granitemoe", "granitemoe",
        own(MOE_CONFIG, logits_scaling=0.5, attention_multiplier=0.3, embedding_multiplier=1.5,
            residual_multiplier=0.8, intermediate_size=32),
        {**EXPERTS, ".logit_scale": 0.5, ".attention.scale": 0.3, ".embedding_scale": 1.5, ".residual_scale": 0.8},
        {"block_sparse_moe.switch_mlp": "mlp.experts"}, interleaved=True,
    ),
    "command-r": Case("command-r", "cohere", own(logit_scale=1.0, use_qk_norm=False), {".logit_scale": 1.0}),
    "command-r/norms": Case("command-r", "cohere", own(logit_scale=1.0, use_qk_norm=True), {".logit_scale": 1.0},
        llama_cpp=False),
    "cohere2": Case(
        "cohere2", "cohere2", own(logit_scale=1.0, num_hidden_layers=4, sliding_window_pattern=4),
        {".logit_scale": 1.0, ".attention.sliding_window": 8},
    ),
    "glm4": Case("glm4", "glm4", own(attention_bias=True), {".rope.dimension_count": 8}),
    "smollm3": Case("smollm3", "smollm3", own(num_hidden_layers=4, no_rope_layer_interval=4), interleaved=True),
    "stablelm": Case("stablelm", "stablelm", own(use_qkv_bias=True), {".rope.dimension_count": 8}),
    "stablelm/parallel": Case(
        "stablelm", "stablelm", own(use_qkv_bias=False, use_parallel_residual=True), {".rope.dimension_count": 8}
    ),
    "exaone": Case(
        "exaone", "exaone", own(num_layers=3, rope_scaling=LLAMA3, rope_theta=1000000.0),
        rewrite=_rope_freqs,
    ),
    "exaone4": Case("exaone4", "exaone4", own(sliding_window=None, sliding_window_pattern=None)),
    "internlm2": Case(
        "internlm2", "internlm2", own(bias=False), names={"attention.wqkv": "attention.wq"},
        rewrite=_split_internlm,
    ),
    "phi2": Case("phi2", "phi", own(), {".rope.dimension_count": 8}),
    "seed_oss": Case("seed_oss", "seed_oss", own(attention_bias=True, attention_out_bias=False)),
    "ernie4_5": Case("ernie4_5", "ernie4_5", own(use_bias=False)),
}  # fmt: skip


SIGMOID = {
    **INNER, ".expert_shared_count": 1, ".expert_weights_scale": 1.5, ".expert_weights_norm": True,
    ".leading_dense_block_count": 1, ".expert_gating_func": 2,
}  # fmt: skip
ONE_GROUP = {"n_group": 1, "topk_group": 1}
CORRECTION = {**SWITCH, "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction.bias"}
CASES |= {
    "glm4moe": Case(
        "glm4moe", "glm4_moe", own(MOE_CONFIG, ONE_GROUP, attention_bias=True, use_qk_norm=True),
        {**SIGMOID, ".rope.dimension_count": 8}, CORRECTION,
    ),
    "dots1": Case("dots1", "dots1", own(MOE_CONFIG, ONE_GROUP, num_key_value_heads=4), SIGMOID, CORRECTION),
    "deepseek2": Case(
        "deepseek2", "deepseek_v3",
        own(MOE_CONFIG, ONE_GROUP, MLA, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=32, v_head_dim=32,
            rope_scaling={**PLAIN_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
        {**SIGMOID, **YARN_KEYS, ".rope.scaling.yarn_log_multiplier": 0.1, ".rope.dimension_count": 8,
         ".attention.head_count_kv": 1, ".attention.key_length": 40, ".attention.value_length": 32,
         ".attention.key_length_mla": 40, ".attention.value_length_mla": 32, ".attention.q_lora_rank": 32,
         ".attention.kv_lora_rank": 32},
        {**CORRECTION, "self_attn.embed_q": "self_attn.k_b_proj", "self_attn.unembed_out": "self_attn.v_b_proj"},
    ),
}  # fmt: skip


def build(case: Case, seed: int = 0) -> nn.Module:
    return weights.build(case.module, case.config, seed=seed)


def blueprint(case: Case, model: nn.Module, kind: Kind = Kind.F32) -> Blueprint:
    """The file of `model`; matrices of type `kind`."""
    config, arch = case.config, case.arch
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    arrays: Arrays = {}
    pairs: list[tuple[str, Any]] = tree_flatten(model.parameters())  # pyright: ignore
    for path, value in pairs:
        name = path
        for old, new in case.names.items():
            name = name.replace(old, new)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise KeyError(f"the tensor map of {arch} has no {name}")
        if not found.endswith((".weight", ".bias")):
            found += ".weight"
        arrays[found] = _converted(case, found, np.array(value))
    if case.rewrite is not None:
        arrays = case.rewrite(arrays, config)
    plan = Blueprint([(key, auto(value)) for key, value in metadata(case).items()])
    for name, value in arrays.items():
        small = value.ndim == 1 or "norm" in name or "gate_inp" in name or name.endswith("bias")
        plan.tensors.append(tensor(name, value, Kind.F32 if small else kind))
    return plan


def _converted(case: Case, name: str, value: np.ndarray) -> np.ndarray:
    stem = name.rsplit(".", 2)[-2]
    heads = {"attn_q": case.config["num_attention_heads"], "attn_k": case.config["num_key_value_heads"]}
    if case.interleaved and stem in heads:
        return _interleave(value, heads[stem])
    return value + 1 if case.norms_shifted and stem.endswith("_norm") else value


def metadata(case: Case) -> dict[str, Any]:
    config, arch = case.config, case.arch
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    values = {
        ".block_count": config["num_hidden_layers"],
        ".context_length": 512,
        ".vocab_size": VOCABULARY,
        ".embedding_length": hidden,
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": heads,
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".attention.layer_norm_epsilon": 1e-5,
        ".rope.freq_base": config["rope_theta"],
        ".rope.dimension_count": head_dim,
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
        **case.metadata,
    }
    general = {"general.architecture": arch, "general.name": f"tiny {arch}"}
    vocabulary = bpe_vocabulary()
    # llama.cpp wants a token for every row.
    spare = VOCABULARY - len(vocabulary["tokenizer.ggml.tokens"])
    vocabulary["tokenizer.ggml.tokens"] += [f"[PAD{i}]" for i in range(spare)]
    vocabulary["tokenizer.ggml.token_type"] += [5] * spare
    return general | {f"{arch}{key}": value for key, value in values.items()} | vocabulary
