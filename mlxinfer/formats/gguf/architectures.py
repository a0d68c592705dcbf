"""Which GGUF architectures are read, and what becomes of each of their tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import config as configs
from mlxinfer.formats.gguf.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlxinfer.formats.gguf.reader import GGUFFile, GGUFTensor

# mlx-lm's name of each tensor of a block, without ".weight" or ".bias".
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})

# Dropped on purpose: the rope tables are read into the config, the others are made anew by the model.
DROPPED = re.compile(r"rope_freqs\.weight|rope_factors_(short|long)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([a-z0-9_]+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(token_embd|output_norm|output)\.(weight)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one `general.architecture` map onto an mlx-lm model class."""

    config: Callable[[Fields], configs.Config]
    block: Mapping[str, str]
    """GGUF's name of a tensor inside a block to mlx-lm's."""
    biases: frozenset[str] = field(default=frozenset())
    """Tensors of a block that may have a bias."""
    interleaved: bool = False
    """The rows of q and k alternate between the halves that rope pairs; mlx-lm wants the halves one after the other."""
    shifted_norms: bool = False
    """Norm weights are stored with the 1 added that mlx-lm's class adds itself."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(configs.llama_config, _LLAMA, biases=_QKV, interleaved=True),
    "qwen2": Architecture(configs.qwen2_config, _LLAMA, biases=_QKV),
    "qwen3": Architecture(configs.qwen3_config, {**_LLAMA, **_HEAD_NORMS}),
    "gemma": Architecture(configs.gemma_config, _LLAMA, shifted_norms=True),
    "gemma2": Architecture(configs.gemma2_config, _GEMMA2, shifted_norms=True),
    "gemma3": Architecture(configs.gemma3_config, {**_GEMMA2, **_HEAD_NORMS}, shifted_norms=True),
    "phi3": Architecture(configs.phi3_config, _PHI3),
}


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModelError for an architecture that is not in the table."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{file.path}: the architecture {file.architecture!r:.60} cannot be loaded from GGUF; supported: {known}. "
            "The same model in safetensors may work."
        )
    return found


def model_config(file: GGUFFile) -> configs.Config:
    """The config.json that mlx-lm's model class of this file takes, without "quantization"."""
    return architecture_of(file).config(Fields(file))


def parameter_names(file: GGUFFile, architecture: Architecture, config: configs.Config) -> dict[str, str]:
    """GGUF tensor name to mlx-lm parameter name, for every tensor that is kept.

    Raises ModelFileError for a tensor that is missing or of another shape than the config says, and
    UnsupportedModelError for one that nothing here consumes.
    """
    layers = config["num_hidden_layers"]
    names: dict[str, str] = {}
    for name, tensor in file.tensors.items():
        if DROPPED.fullmatch(name):
            continue
        target = _target(name, architecture, layers)
        if target is None:
            raise UnsupportedModelError(f"{file.path}: nothing consumes the tensor {name!r} of {file.architecture}")
        names[name] = target
        _check_shape(tensor, config)
    required = ["token_embd.weight", "output_norm.weight"]
    required += [f"blk.{i}.{stem}.weight" for i in range(layers) for stem in architecture.block]
    for name in required:
        if name not in names:
            raise ModelFileError(f"{file.path}: the tensor {name} is missing")
    return names


def _target(name: str, architecture: Architecture, layers: int) -> str | None:
    if match := _OUTSIDE.fullmatch(name):
        return f"{_TOP[match[1]]}.{match[2]}"
    match = _BLOCK.fullmatch(name)
    if match is None or int(match[1]) >= layers:
        return None
    index, stem, kind = match.groups()
    if stem not in architecture.block or (kind == "bias" and stem not in architecture.biases):
        return None
    return f"model.layers.{index}.{architecture.block[stem]}.{kind}"


def _check_shape(tensor: GGUFTensor, config: configs.Config) -> None:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    fused = config["model_type"] == "phi3"
    matrices = {
        "token_embd": (config["vocab_size"], hidden),
        "output": (config["vocab_size"], hidden),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_qkv": (q + 2 * kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (2 * ffn if fused else ffn, hidden),
        "ffn_down": (hidden, ffn),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
    }
    stem, kind = tensor.name.rsplit(".", 2)[-2:]
    wanted = matrices.get(stem, (hidden,))
    wanted = wanted[:1] if kind == "bias" else wanted
    if tensor.shape != wanted:
        raise ModelFileError(
            f"{tensor.path}: the tensor {tensor.name} has shape {tensor.shape}; its metadata ask for {wanted}"
        )
