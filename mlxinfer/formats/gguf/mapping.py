"""From the tensors of a file to a model's parameters: each is used once, dropped for a reason, or an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf.parameters import Parameter, halves_apart

if TYPE_CHECKING:
    from mlxinfer.formats.gguf.architectures import Architecture
    from mlxinfer.formats.gguf.config import Config
    from mlxinfer.formats.gguf.reader import GGUFFile, GGUFTensor

DROPPED = {
    r"rope_freqs\.weight": "its factors are in the config",
    r"rope_factors_(short|long)\.weight": "its factors are in the config",
    r"blk\.\d+\.(attn_rot_embd|attn\.rot_embd)(\.weight)?": "the model makes its table of angles anew",
    r"blk\.\d+\.rope_freqs\.weight": "its factors are in the config",
    r".*\.input_scale": "for activations in low precision, which are not used",
}
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(.+)")


def dropped_tensors(file: GGUFFile, architecture: Architecture, config: Config) -> dict[str, str]:
    """Names of the tensors that nothing is made of, and why."""
    dropped: dict[str, str] = {}
    extra = config.get("num_nextn_predict_layers") or 0
    for name in file.tensors:
        for pattern, reason in (DROPPED | dict(architecture.dropped)).items():
            if re.fullmatch(pattern, name):
                dropped[name] = reason
        match = _BLOCK.fullmatch(name)
        layer = int(match[1]) - config["num_hidden_layers"] if match else -1
        if 0 <= layer < extra:
            dropped[name] = "part of a layer that predicts several tokens at once, which mlx-lm leaves out"
    return dropped


def parameters_of(file: GGUFFile, architecture: Architecture, config: Config) -> tuple[list[Parameter], dict[str, str]]:
    """(parameters, dropped tensors with reasons).

    Raises ModelFileError for a tensor that is missing or of another shape than the config says, and
    UnsupportedModelError for one that nothing here consumes.
    """
    dropped = dropped_tensors(file, architecture, config)
    found = list(architecture.special(file, config)) if architecture.special is not None else []
    used = dropped.keys() | {t.name for p in found for t in (*p.tensors, *((p.factor,) if p.factor else ()))}
    scales = {name for name in file.tensors if name.endswith(".scale") and name[:-5] + "weight" in file.tensors}
    for name, tensor in file.tensors.items():
        if name in used or name in scales:
            continue
        target = _target(name, architecture, config["num_hidden_layers"])
        if target is None:
            raise UnsupportedModelError(f"{file.path}: nothing consumes the tensor {name!r} of {file.architecture}")
        stem, kind = _stem(name)
        _check_shape(tensor, stem, kind, config)
        factor = file.tensors.get(name[:-6] + "scale") if kind == "weight" else None
        found.append(_parameter(target, tensor, stem, architecture, config, factor))
    _require(file, architecture, config, {t.name for p in found for t in p.tensors})
    return found, dropped


def _stem(name: str) -> tuple[str, str]:
    """ "blk.3.attn_q.weight" to ("attn_q", "weight"); what has no ending has an empty one."""
    match = _BLOCK.fullmatch(name)
    stem, _, kind = (match[2] if match else name).rpartition(".")
    return (stem, kind) if stem and kind in ("weight", "bias") else (match[2] if match else name, "")


def _target(name: str, architecture: Architecture, layers: int) -> str | None:
    stem, kind = _stem(name)
    match = _BLOCK.fullmatch(name)
    if match is None:
        path = architecture.top.get(stem)
        return f"{path}.{kind}" if path and (kind == "weight" or stem in architecture.biases) else None
    if int(match[1]) >= layers:
        return None
    prefix = f"{architecture.layers}.{match[1]}"
    whole = architecture.whole.get(match[2])
    if whole is not None:
        return f"{prefix}.{whole}"
    if stem not in architecture.block or not kind or (kind == "bias" and stem not in architecture.biases):
        return None
    return f"{prefix}.{architecture.block[stem]}.{kind}"


def _parameter(
    target: str, tensor: GGUFTensor, stem: str, architecture: Architecture, config: Config, factor: GGUFTensor | None
) -> Parameter:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    order, function, note = None, architecture.functions.get(stem), ""
    if architecture.interleaved and stem in heads:
        order, note = halves_apart(heads[stem], architecture.rotated(config)), "rows put back in their order"
    if architecture.shifted_norms and stem.endswith("_norm"):
        function, note = _less_one, "1 taken off"
    shape = architecture.shapes[stem](tensor.shape) if stem in architecture.shapes else tensor.shape
    return Parameter(target, shape, (tensor,), order, function, factor, note)


def _less_one(values: np.ndarray) -> np.ndarray:
    # A damaged file may hold NaN; that is its own value.
    with np.errstate(all="ignore"):
        return values - 1


def _require(file: GGUFFile, architecture: Architecture, config: Config, used: set[str]) -> None:
    required = [f"{stem}.weight" for stem in architecture.top if stem not in architecture.optional]
    for i in range(config["num_hidden_layers"]):
        required += [f"blk.{i}.{stem}.weight" for stem in architecture.block if stem not in architecture.optional]
        required += [f"blk.{i}.{name}" for name in architecture.whole if name not in architecture.optional]
        if "first_k_dense_replace" in config:
            kind = _DENSE if i < config["first_k_dense_replace"] else _EXPERTS
            required += [f"blk.{i}.{stem}.weight" for stem in kind]
    for name in required:
        if name not in used:
            raise ModelFileError(f"{file.path}: the tensor {name} is missing")


def _check_shape(tensor: GGUFTensor, stem: str, kind: str, config: Config) -> None:
    """Of the tensors that have the same meaning everywhere; the others are checked against the model's own."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim, experts = (
        config["head_dim"],
        next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config), None),
    )
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    inner, vocabulary = config.get("moe_intermediate_size") or ffn, config["vocab_size"]
    fused = config["model_type"] in ("phi3", "glm4")
    matrices: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary, hidden),
        "output": (vocabulary, hidden),
        "output_norm": (hidden,),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_qkv": (q + 2 * kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (2 * ffn if fused else ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    if experts:
        matrices |= {
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, inner, hidden),
            "ffn_up_exps": (experts, inner, hidden),
            "ffn_down_exps": (experts, hidden, inner),
        }
    wanted = matrices.get(stem)
    # With latent attention the heads' widths are others.
    if wanted is None or (stem == "attn_output" and "kv_lora_rank" in config):
        return
    wanted = wanted[:-1] if kind == "bias" and len(wanted) > 1 else wanted
    if tensor.shape != wanted:
        raise ModelFileError(
            f"{tensor.path}: the tensor {tensor.name} has shape {tensor.shape}; its metadata ask for {wanted}"
        )
