"""What mlx-lm's `sanitize` did to the names and layouts that transformers publishes, family by family."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Experts:
    """A stack over all experts of a layer that transformers publishes as one matrix per expert."""

    stack: str
    """In a layer, without the projection: "mlp.switch_mlp"."""
    single: str
    """With {e} for the expert: "mlp.experts.{e}"."""
    projections: Mapping[str, str]
    """mlx-lm's name to the published one."""


_PLAIN = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
_SWITCH_MLP = Experts("mlp.switch_mlp", "mlp.experts.{e}", _PLAIN)
_MIXTRAL = Experts(
    "block_sparse_moe.switch_mlp",
    "block_sparse_moe.experts.{e}",
    {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
)


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` as transformers wants it; names that nothing here mentions are the same on both sides."""

    architecture: str
    """The class that config.json names."""
    experts: Experts | None = None
    fused_experts: bool = False
    """gpt-oss: gate and up interleaved in one tensor, columns before rows."""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "gemma": Family("GemmaForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM"),
    "gemma3_text": Family("Gemma3ForCausalLM"),
    "phi3": Family("Phi3ForCausalLM"),
    "mixtral": Family("MixtralForCausalLM", _MIXTRAL),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _SWITCH_MLP),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _SWITCH_MLP),
    "olmoe": Family("OlmoeForCausalLM", _SWITCH_MLP),
    "gpt_oss": Family("GptOssForCausalLM", fused_experts=True),
}
"""Each is held against transformers: every name, and the logits."""

_STACKED = re.compile(r"(?P<layer>model\.layers\.\d+)\.(?P<stack>.+)\.(?P<projection>[a-z_]+)\.weight")


def family_of(model_type: str, where: str) -> Family:
    """Raises UnsupportedModelError for a family whose published names can't be told from mlx-lm's."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"{where}: the architecture {model_type!r:.60} can't be exported to transformers: what mlx-lm did to its "
            f"names and layouts is not known here; known: {', '.join(sorted(FAMILIES))}"
        )
    return family


def expert_name(name: str, experts: Experts) -> str | None:
    """The published name of a stack's experts, with {e} for the number; None for what is no such stack."""
    match = _STACKED.fullmatch(name)
    if match is None or match["stack"] != experts.stack or match["projection"] not in experts.projections:
        return None
    return f"{match['layer']}.{experts.single}.{experts.projections[match['projection']]}.weight"
