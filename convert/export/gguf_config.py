"""GGUF metadata of a model of mlx-lm, and a refusal where llama.cpp would compute something else from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH as ARCH

from mlxinfer.convert.export.gguf_file import Value, f32, string, u32
from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.convert.export.folder import MLXFolder

Metadata = dict[str, Value]
MAX_NUMBER = 3e38
SMALL = 1e-6
YARN_CONTEXT = 4096
"""What mlx-lm takes where the scaling doesn't say its original_max_position_embeddings."""


class Config:
    """config.json, and what mlx-lm assumed where it is silent."""

    def __init__(self, folder: MLXFolder) -> None:
        self.path = folder.path / "config.json"
        known = {k: v for k, v in folder.config.items() if v is not None}
        self.values: dict[str, Any] = {k: v for k, v in folder.arguments.items() if v is not None} | known
        self.tensors = folder.parameters.keys()

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there."""
        value = next((self.values[n] for n in names if n in self.values), default)
        if type(value) is not int or not 0 <= value < 2**32:
            raise ModelFileError(f"{self.path}: {names[0]} is {value!r:.40}; a whole number is expected")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        return self.checked(next((self.values[n] for n in names if n in self.values), default), names[0])

    def checked(self, value: object, name: str, low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> float:
        """A number that float32 holds, from `low` to `high`."""
        # The comparison is false for NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ModelFileError(f"{self.path}: {name} is {value!r:.40}; a number from {low:g} to {high:g} is expected")
        return float(value)

    def unlike(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: {what}; llama.cpp would compute something else, so it isn't exported"
        )

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", default=self.integer("hidden_size") // max(1, self.heads))

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", default=self.heads)

    def rope(self) -> tuple[float, dict[str, Any]]:
        """The base, and the scaling with its "rope_type"."""
        parameters = self.get("rope_parameters") or {}
        if not isinstance(parameters, dict):
            raise ModelFileError(f"{self.path}: rope_parameters is {parameters!r:.60}; an object is expected")
        own = parameters.get("full_attention", parameters)
        scaling = self.get("rope_scaling") or own
        if not isinstance(scaling, dict) or not isinstance(own, dict):
            raise ModelFileError(f"{self.path}: rope_scaling is {scaling!r:.60}; an object is expected")
        theta = self.checked(own.get("rope_theta", self.get("rope_theta") or 10000.0), "rope_theta", SMALL)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        return theta, {**scaling, "rope_type": kind}


@dataclass(frozen=True, slots=True)
class Target:
    """One `model_type` as llama.cpp knows it."""

    arch: ARCH
    extra: Callable[[Config], Metadata]
    """Metadata beyond what all have, by their keys after the architecture. Raises for what llama.cpp lacks."""
    interleaved: bool = False
    """Rows of q and k alternate between the halves that rope pairs."""
    shifted_norms: bool = False
    """Norm weights are stored with the 1 added that mlx-lm's class adds itself."""


def base_metadata(c: Config) -> Metadata:
    """What every decoder has."""
    theta, _ = c.rope()
    return {
        "block_count": u32(c.integer("num_hidden_layers")),
        "context_length": u32(c.integer("max_position_embeddings")),
        "embedding_length": u32(c.integer("hidden_size")),
        "feed_forward_length": u32(c.integer("intermediate_size")),
        "attention.head_count": u32(c.heads),
        "attention.head_count_kv": u32(c.kv_heads),
        "attention.key_length": u32(c.head_dim),
        "attention.value_length": u32(c.head_dim),
        "attention.layer_norm_rms_epsilon": f32(c.number("rms_norm_eps")),
        "rope.freq_base": f32(theta),
        "rope.dimension_count": u32(c.head_dim),
        "vocab_size": u32(c.integer("vocab_size")),
    }


def _llama(c: Config) -> Metadata:
    if c.get("rope_traditional"):
        raise c.unlike("rope_traditional is set")
    if any(kind != "full_attention" for kind in c.get("layer_types") or ()):
        raise c.unlike("some layers attend to a window")
    return {}


def _mixtral(c: Config) -> Metadata:
    return _llama(c) | _experts(c)


def _experts(c: Config) -> Metadata:
    return {
        "expert_count": u32(c.integer("num_experts", "num_local_experts")),
        "expert_used_count": u32(c.integer("num_experts_per_tok")),
    }


def _sparse(c: Config, *, normalized: bool) -> Metadata:
    """Experts in every layer, whose weights are normalized or not as llama.cpp's architecture does it."""
    if c.get("mlp_only_layers") or c.integer("decoder_sparse_step", default=1) != 1:
        raise c.unlike("some layers have no experts")
    if bool(c.get("norm_topk_prob")) != normalized:
        raise c.unlike(f"norm_topk_prob is {bool(c.get('norm_topk_prob'))}")
    return _experts(c)


def _qwen2_moe(c: Config) -> Metadata:
    return _sparse(c, normalized=False) | {
        "expert_feed_forward_length": u32(c.integer("moe_intermediate_size")),
        "expert_shared_feed_forward_length": u32(c.integer("shared_expert_intermediate_size")),
    }


def _qwen3_moe(c: Config) -> Metadata:
    return _sparse(c, normalized=True) | {"expert_feed_forward_length": u32(c.integer("moe_intermediate_size"))}


def _olmoe(c: Config) -> Metadata:
    return _sparse(c, normalized=False)


def _gpt_oss(c: Config) -> Metadata:
    layers = c.integer("num_hidden_layers")
    turns = ["sliding_attention", "full_attention"] * layers
    if (c.get("layer_types") or turns[:layers]) != turns[:layers]:
        raise c.unlike("its layers don't alternate between a window and everything")
    return _experts(c) | {
        "expert_feed_forward_length": u32(c.integer("intermediate_size")),
        "attention.sliding_window": u32(c.integer("sliding_window")),
    }


def _nothing(_: Config) -> Metadata:
    return {}


def _check_query_scale(c: Config, large_layers: int) -> None:
    """llama.cpp scales by the size of a head, in the largest model of a family by the width per head."""
    large = c.integer("num_hidden_layers") == large_layers
    expected = c.integer("hidden_size") / c.heads if large else c.head_dim
    if c.number("query_pre_attn_scalar", default=expected) != expected:
        raise c.unlike(f"query_pre_attn_scalar is {c.get('query_pre_attn_scalar')}, not {expected}")


def _gemma2(c: Config) -> Metadata:
    _check_query_scale(c, 46)
    return {
        "attention.sliding_window": u32(c.integer("sliding_window", default=4096)),
        "attn_logit_softcapping": f32(c.number("attn_logit_softcapping")),
        "final_logit_softcapping": f32(c.number("final_logit_softcapping")),
    }


def _gemma3(c: Config) -> Metadata:
    _check_query_scale(c, 62)
    metadata = {
        "attention.sliding_window": u32(c.integer("sliding_window")),
        "rope.freq_base_swa": f32(c.number("rope_local_base_freq")),
    }
    pattern = c.integer("sliding_window_pattern")
    return metadata | ({} if pattern == 6 else {"attention.sliding_window_pattern": u32(pattern)})


def _phi3(c: Config) -> Metadata:
    rotated = int(c.head_dim * c.number("partial_rotary_factor", default=1.0))
    if not 0 < rotated <= c.head_dim:
        raise ModelFileError(f"{c.path}: partial_rotary_factor is {c.get('partial_rotary_factor')!r:.40}")
    return {"rope.dimension_count": u32(rotated)}


TARGETS: dict[str, Target] = {
    "llama": Target(ARCH.LLAMA, _llama, interleaved=True),
    "mistral": Target(ARCH.LLAMA, _llama, interleaved=True),
    "mixtral": Target(ARCH.LLAMA, _mixtral, interleaved=True),
    "qwen2": Target(ARCH.QWEN2, _nothing),
    "qwen3": Target(ARCH.QWEN3, _nothing),
    "qwen2_moe": Target(ARCH.QWEN2MOE, _qwen2_moe),
    "qwen3_moe": Target(ARCH.QWEN3MOE, _qwen3_moe),
    "olmoe": Target(ARCH.OLMOE, _olmoe),
    "gemma": Target(ARCH.GEMMA, _nothing, shifted_norms=True),
    "gemma2": Target(ARCH.GEMMA2, _gemma2, shifted_norms=True),
    "gemma3_text": Target(ARCH.GEMMA3, _gemma3, shifted_norms=True),
    "phi3": Target(ARCH.PHI3, _phi3),
    "gpt_oss": Target(ARCH.GPT_OSS, _gpt_oss),
}


def target_of(model_type: str, where: str) -> Target:
    """Raises UnsupportedModelError for an architecture that isn't written as GGUF."""
    target = TARGETS.get(model_type)
    if target is None:
        raise UnsupportedModelError(
            f"{where}: the architecture {model_type!r:.60} can't be exported to GGUF; "
            f"known: {', '.join(sorted(TARGETS))}"
        )
    return target


def rope_scaling(c: Config) -> tuple[Metadata, dict[str, list[float]]]:
    """Metadata after the architecture, and the tables of factors that become tensors."""
    theta, scaling = c.rope()
    kind = scaling["rope_type"]

    def number(name: str, default: float | None = None) -> float:
        return c.checked(scaling.get(name, default), f"rope_scaling.{name}", SMALL, 2**31)

    if kind == "default":
        return {}, {}
    if kind == "llama3":
        return {}, {"rope_freqs.weight": _llama3_factors(theta, c.head_dim, number)}
    if kind == "linear":
        return {"rope.scaling.type": string("linear"), "rope.scaling.factor": f32(number("factor"))}, {}
    if kind == "yarn":
        original = number("original_max_position_embeddings", YARN_CONTEXT)
        _check_yarn_scale(c, scaling, number("factor"))
        return {
            "rope.scaling.type": string("yarn"),
            "rope.scaling.factor": f32(number("factor")),
            "rope.scaling.original_context_length": u32(int(original)),
            "rope.scaling.yarn_beta_fast": f32(number("beta_fast", 32.0)),
            "rope.scaling.yarn_beta_slow": f32(number("beta_slow", 1.0)),
        }, {}
    if kind in ("longrope", "su"):
        return _longrope(c, scaling)
    raise c.unlike(f"rope_scaling is {kind!r:.40}")


def _check_yarn_scale(c: Config, scaling: dict[str, Any], factor: float) -> None:
    """llama.cpp always makes q and k 1 + 0.1 log(factor) times as long, mlx-lm as the config's two mscales say."""

    def by(name: str, default: float) -> float:
        return 1 + 0.1 * c.checked(scaling.get(name, default), f"rope_scaling.{name}") * math.log(factor)

    if factor > 1 and not math.isclose(by("mscale", 1), by("mscale_all_dim", 0) * (1 + 0.1 * math.log(factor))):
        raise c.unlike("rope_scaling has mscale or mscale_all_dim")


def _llama3_factors(theta: float, head_dim: int, number: Callable[[str], float]) -> list[float]:
    """What each frequency is divided by, as Llama 3.1's reference has it."""
    factor, low, high = number("factor"), number("low_freq_factor"), number("high_freq_factor")
    context = number("original_max_position_embeddings")
    if low >= high:
        raise ModelFileError(f"rope_scaling.low_freq_factor is {low}; it must be below high_freq_factor, {high}")
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _longrope(c: Config, scaling: dict[str, Any]) -> tuple[Metadata, dict[str, list[float]]]:
    tables = []
    for name in ("short_factor", "long_factor"):
        values = scaling.get(name)
        if not isinstance(values, list) or len(values) > c.head_dim:
            raise ModelFileError(f"{c.path}: rope_scaling.{name} must be a list of factors")
        tables.append([c.checked(v, name, SMALL) for v in values])
    short, long = tables
    name = "original_max_position_embeddings"
    original = int(c.checked(c.get(name) or scaling.get(name), name, 2, 2**31))
    context = c.integer("max_position_embeddings")
    if c.get("model_type") == "llama" and short == long and original == context:
        return {}, {"rope_freqs.weight": long}  # as the table of a GGUF file is kept
    if c.get("model_type") != "phi3":
        raise c.unlike("rope_scaling is 'longrope'")
    stretch = context / original
    attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return {
        "rope.scaling.original_context_length": u32(original),
        "rope.scaling.attn_factor": f32(attention),
    }, {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
