"""Which GGUF architectures are read, and what becomes of each of their tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.formats.gguf import config as configs
from mlxinfer.formats.gguf import families, special
from mlxinfer.formats.gguf.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np

    from mlxinfer.formats.gguf.parameters import Parameter
    from mlxinfer.formats.gguf.reader import GGUFFile

Shape = tuple[int, ...]

# mlx-lm's name of each tensor of a block, without ".weight" or ".bias".
_NORM = {"attn_norm": "input_layernorm"}
_QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_ATTENTION = {**_NORM, **_QKV, "attn_output": "self_attn.o_proj"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SECOND_NORM = {"ffn_norm": "post_attention_layernorm"}
_LLAMA = {**_ATTENTION, **_MLP, **_SECOND_NORM}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA2 = {**_ATTENTION, **_MLP, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_PHI3 = {
    **_NORM,
    **_SECOND_NORM,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLM4 = {
    **_ATTENTION,
    **_SECOND_NORM,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXAONE = {
    "attn_norm": "ln_1",
    "attn_q": "attn.attention.q_proj",
    "attn_k": "attn.attention.k_proj",
    "attn_v": "attn.attention.v_proj",
    "attn_output": "attn.attention.out_proj",
    "ffn_norm": "ln_2",
    "ffn_gate": "mlp.c_fc_0",
    "ffn_up": "mlp.c_fc_1",
    "ffn_down": "mlp.c_proj",
}
_INTERNLM2 = {
    "attn_norm": "attention_norm",
    "attn_output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_PHI2 = {
    "attn_norm": "input_layernorm",
    **_QKV,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _experts(path: str, router: str) -> dict[str, str]:
    stacked = {f"ffn_{kind}_exps": f"{path}.{kind}_proj" for kind in ("gate", "up", "down")}
    return {"ffn_gate_inp": router, **stacked}


def _shared(path: str) -> dict[str, str]:
    return {f"ffn_{kind}_shexp": f"{path}.{kind}_proj" for kind in ("gate", "up", "down")}


_MOE = {**_ATTENTION, **_SECOND_NORM, **_experts("mlp.switch_mlp", "mlp.gate")}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_HEAD_OPTIONAL = frozenset({"output"})
_QKV_BIASES = frozenset(_QKV)
_ALL_ATTENTION = _QKV_BIASES | {"attn_output"}


def _everywhere(_: configs.Config) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one `general.architecture` map onto an mlx-lm model class."""

    config: Callable[[Fields], configs.Config]
    block: Mapping[str, str]
    """GGUF's name of a tensor inside a block to mlx-lm's, both without .weight or .bias."""
    biases: frozenset[str] = field(default=frozenset())
    """Tensors that may have a bias."""
    optional: frozenset[str] = _HEAD_OPTIONAL
    """Tensors that not every file, or not every block, has."""
    interleaved: bool = False
    """The rows of q and k alternate between the halves that rope pairs; mlx-lm wants the halves one after the other."""
    rotated: Callable[[configs.Config], int | None] = _everywhere
    """Rows of a head that were moved so, where it isn't all of them."""
    shifted_norms: bool = False
    """Norm weights are stored with the 1 added that mlx-lm's class adds itself."""
    layers: str = "model.layers"
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    """Tensors outside the blocks."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a block whose name has another ending in mlx-lm, both names whole."""
    shapes: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    functions: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    special: Callable[[GGUFFile, configs.Config], Iterable[Parameter]] | None = None
    """Parameters that are made of several tensors, or of a part of one."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Patterns of names that nothing is made of, and why."""


def _one_row(shape: Shape) -> Shape:
    return (1, *shape) if len(shape) == 1 else shape


_SHARED_GATE = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(configs.llama_config, _LLAMA, biases=_QKV_BIASES, interleaved=True),
    "qwen2": Architecture(configs.qwen2_config, _LLAMA, biases=_QKV_BIASES),
    "qwen3": Architecture(configs.qwen3_config, {**_LLAMA, **_HEAD_NORMS}),
    "gemma": Architecture(configs.gemma_config, _LLAMA, shifted_norms=True),
    "gemma2": Architecture(configs.gemma2_config, _GEMMA2, shifted_norms=True),
    "gemma3": Architecture(configs.gemma3_config, {**_GEMMA2, **_HEAD_NORMS}, shifted_norms=True),
    "phi3": Architecture(configs.phi3_config, _PHI3),
    "qwen2moe": Architecture(
        families.qwen2moe_config,
        {**_MOE, **_shared("mlp.shared_expert"), **_SHARED_GATE},
        biases=_QKV_BIASES,
        shapes={"ffn_gate_inp_shexp": _one_row},
    ),
    "qwen3moe": Architecture(families.qwen3moe_config, {**_MOE, **_HEAD_NORMS}),
    "gpt-oss": Architecture(
        families.gpt_oss_config,
        {
            **_ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            **_experts("mlp.experts", "mlp.router"),
        },
        biases=_ALL_ATTENTION | {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
        whole={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "mistral3": Architecture(families.mistral3_config, _LLAMA, interleaved=True),
    "starcoder2": Architecture(
        families.starcoder2_config,
        {**_ATTENTION, **_SECOND_NORM, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases=_ALL_ATTENTION | {"attn_norm", "ffn_norm", "output_norm", "ffn_up", "ffn_down"},
    ),
    "olmo2": Architecture(
        families.olmo2_config, {**_QKV, **_HEAD_NORMS, **_POST_NORMS, **_MLP, "attn_output": "self_attn.o_proj"}
    ),
    "olmoe": Architecture(families.olmoe_config, {**_MOE, **_HEAD_NORMS}),
    "granite": Architecture(families.granite_config, _LLAMA, biases=_ALL_ATTENTION | set(_MLP), interleaved=True),
    "granitemoe": Architecture(
        families.granitemoe_config,
        {
            **_ATTENTION,
            **_SECOND_NORM,
            **_experts("block_sparse_moe.switch_mlp", "block_sparse_moe.router.layer"),
        },
        biases=_ALL_ATTENTION,
        interleaved=True,
    ),
    "command-r": Architecture(
        families.cohere_config,
        {**_ATTENTION, **_MLP, **_HEAD_NORMS},
        optional=_HEAD_OPTIONAL | {"attn_q_norm", "attn_k_norm"},
    ),
    "cohere2": Architecture(families.cohere2_config, {**_ATTENTION, **_MLP}),
    "glm4": Architecture(families.glm4_config, _GLM4, biases=_QKV_BIASES),
    "smollm3": Architecture(families.smollm3_config, _LLAMA, interleaved=True),
    "stablelm": Architecture(
        families.stablelm_config,
        _LLAMA,
        biases=_QKV_BIASES | {"attn_norm", "ffn_norm", "output_norm"},
        optional=_HEAD_OPTIONAL | {"ffn_norm"},
    ),
    "exaone": Architecture(
        families.exaone_config,
        _EXAONE,
        layers="transformer.h",
        top={"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"},
    ),
    "exaone4": Architecture(
        families.exaone4_config,
        {**_QKV, **_HEAD_NORMS, **_POST_NORMS, **_MLP, "attn_output": "self_attn.o_proj"},
    ),
    "internlm2": Architecture(
        families.internlm2_config,
        _INTERNLM2,
        special=special.internlm2_parameters,
        top={"token_embd": "model.tok_embeddings", "output_norm": "model.norm", "output": "output"},
    ),
    "phi2": Architecture(
        families.phi2_config,
        _PHI2,
        biases=_ALL_ATTENTION | {"attn_norm", "output_norm", "ffn_up", "ffn_down", "output"},
        optional=frozenset({*_QKV}),
        special=special.phi2_parameters,
        top={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
    ),
    "seed_oss": Architecture(
        families.seed_oss_config,
        {**_ATTENTION, **_MLP, "post_attention_norm": "post_attention_layernorm"},
        biases=_ALL_ATTENTION,
    ),
    "ernie4_5": Architecture(families.ernie4_5_config, _LLAMA, biases=_ALL_ATTENTION | set(_MLP)),
}
_DENSE_OR_EXPERTS = frozenset(
    {*_MLP, "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
    | {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "exp_probs_b.bias"}
)
"""The first layers are dense, the others have experts."""
_SIGMOID_MOE = {**_MLP, **_experts("mlp.switch_mlp", "mlp.gate"), **_shared("mlp.shared_experts")}
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
ARCHITECTURES |= {
    "glm4moe": Architecture(
        families.glm4moe_config,
        {**_ATTENTION, **_HEAD_NORMS, **_SIGMOID_MOE, "post_attention_norm": "post_attention_layernorm"},
        biases=_QKV_BIASES,
        optional=_HEAD_OPTIONAL | _DENSE_OR_EXPERTS | set(_HEAD_NORMS),
        whole=_CORRECTION,
    ),
    "dots1": Architecture(
        families.dots1_config,
        {
            **_ATTENTION,
            **_HEAD_NORMS,
            **_SECOND_NORM,
            **_MLP,
            **_experts("mlp.experts", "mlp.gate"),
            **_shared("mlp.shared_experts"),
        },
        optional=_HEAD_OPTIONAL | _DENSE_OR_EXPERTS,
        whole=_CORRECTION,
    ),
    "deepseek2": Architecture(
        families.deepseek2_config,
        {
            **_NORM,
            **_SECOND_NORM,
            **_SIGMOID_MOE,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_k_b": "self_attn.embed_q",
            "attn_v_b": "self_attn.unembed_out",
            "attn_output": "self_attn.o_proj",
        },
        optional=_HEAD_OPTIONAL | _DENSE_OR_EXPERTS,
        whole=_CORRECTION,
    ),
}
_MIXTRAL = Architecture(
    families.mixtral_config,
    {
        **_ATTENTION,
        **_SECOND_NORM,
        **_experts("block_sparse_moe.switch_mlp", "block_sparse_moe.gate"),
    },
    interleaved=True,
)


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModelError for an architecture that is not in the table."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{file.path}: the architecture {file.architecture!r:.60} cannot be loaded from GGUF; supported: {known}. "
            "The same model in safetensors may work."
        )
    if file.architecture == "llama" and Fields(file).integer(".expert_count", 0, 2**16, 0):
        return _MIXTRAL
    return found


def model_config(file: GGUFFile) -> configs.Config:
    """The config.json that mlx-lm's model class of this file takes, without "quantization"."""
    return architecture_of(file).config(Fields(file))
