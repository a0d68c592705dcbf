"""The shape of an encoder, from its config.json: one description for all families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.encoders.checks import Values
from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
    "tanh": "tanh",
}
"""Names in configs → the functions of `layers.py`."""
GATED = frozenset({"swiglu", "geglu"})
OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
"""Their first position is pad_token_id + 1, as in fairseq."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An encoder of `num_layers` layers of bidirectional attention and a feed-forward network."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_tokens: int
    activation: str = "gelu"
    norm_eps: float = 1e-12
    positions: int = 0
    """Rows of the table of learned positions; 0: there is none."""
    position_offset: int = 0
    types: int = 0
    """Token types; 0: there is no table of them."""
    relative_buckets: int = 0
    """Of MPNet's relative positions."""
    rope: tuple[float, ...] = ()
    """The base of the rotary positions, by layer."""
    windows: tuple[int | None, ...] = ()
    """How far a token sees to each side, by layer; None: everything."""
    gated: bool = False
    prenorm: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    head_activation: str = "tanh"
    """Of a reranker's head."""
    head_bias: bool = True
    head_norm: bool = False
    head_pooling: str = "cls"


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """The shape that a config.json describes. Raises ModelFileError or UnsupportedModelError."""
    values = Values(where, config)
    family = values.word("model_type")
    shape = {"distilbert": _distilbert, "modernbert": _modernbert, "nomic_bert": _nomic}.get(family, _bert)(values)
    if shape.hidden_size % shape.num_heads:
        raise ModelFileError(f"{where}: {shape.num_heads} heads don't divide a hidden size of {shape.hidden_size}")
    return shape


def _activation(values: Values, *keys: str, default: str = "gelu") -> str:
    name = values.word(*keys, default=default)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{values.where}: {keys[0]} is {name!r:.80}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _bert(values: Values) -> Shape:
    """BERT, RoBERTa, XLM-RoBERTa, CamemBERT and MPNet."""
    family = values.word("model_type")
    kind = values.word("position_embedding_type", default="absolute")
    if kind != "absolute" or values.values.get("is_decoder"):
        raise UnsupportedModelError(f"{values.where}: an encoder with absolute positions is expected, not {kind!r}")
    offset = values.size("pad_token_id", default=1, least=0) + 1 if family in OFFSET_FAMILIES else 0
    positions = values.size("max_position_embeddings", default=512)
    if positions <= offset:
        raise values.error("max_position_embeddings", positions, f"more than {offset}")
    mpnet = family == "mpnet"
    return Shape(
        family=family,
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        num_layers=values.size("num_hidden_layers"),
        num_heads=values.size("num_attention_heads"),
        intermediate_size=values.size("intermediate_size"),
        max_tokens=positions - offset,
        activation=_activation(values, "hidden_act"),
        norm_eps=values.number("layer_norm_eps", default=1e-12),
        positions=positions,
        position_offset=offset,
        types=0 if mpnet else values.size("type_vocab_size", default=2),
        relative_buckets=values.size("relative_attention_num_buckets", default=32, least=4) if mpnet else 0,
    )


def _distilbert(values: Values) -> Shape:
    positions = values.size("max_position_embeddings", default=512)
    return Shape(
        family="distilbert",
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("dim"),
        num_layers=values.size("n_layers"),
        num_heads=values.size("n_heads"),
        intermediate_size=values.size("hidden_dim"),
        max_tokens=positions,
        activation=_activation(values, "activation"),
        positions=positions,
        head_activation="relu",
    )


def _nomic(values: Values) -> Shape:
    """nomic-embed-text: BERT's order of norms, rotary positions, a gated network; GPT-2's names in its config."""
    where, config = values.where, values.values
    for key, plain in (
        ("prenorm", False), ("use_rms_norm", False), ("rotary_emb_interleaved", False), ("rotary_scaling_factor", None),
        ("rotary_emb_scale_base", None), ("rotary_emb_fraction", 1.0), ("num_experts", None), ("causal", False),
        ("parallel_block", False),
    ):  # fmt: skip
        if config.get(key, plain) not in (plain, None):
            raise UnsupportedModelError(f"{where}: {key} is {config[key]!r:.80}; only {plain} is supported")
    layers = values.size("n_layer", "num_hidden_layers")
    hidden = values.size("n_embd", "hidden_size")
    name = values.word("activation_function", "hidden_act", default="swiglu")
    inner = values.size("n_inner", "intermediate_size", default=4 * hidden)
    mlp_bias = values.flag("mlp_fc1_bias", False)
    if values.flag("mlp_fc2_bias", mlp_bias) != mlp_bias:
        raise UnsupportedModelError(f"{where}: mlp_fc1_bias and mlp_fc2_bias differ")
    return Shape(
        family="nomic_bert",
        vocab_size=values.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=values.size("n_head", "num_attention_heads"),
        intermediate_size=inner,
        max_tokens=values.size("n_positions", "max_position_embeddings", default=2048),
        activation=_activation(values, "activation_function", "hidden_act", default="swiglu"),
        norm_eps=values.number("layer_norm_epsilon", "layer_norm_eps", default=1e-12),
        types=values.size("type_vocab_size", default=2, least=0),
        rope=(values.number("rotary_emb_base", default=1000.0),) * layers,
        gated=name in GATED or name == "silu",
        attention_bias=values.flag("qkv_proj_bias", False),
        mlp_bias=mlp_bias,
    )


def _modernbert(values: Values) -> Shape:
    layers = values.size("num_hidden_layers")
    kinds = values.values.get("layer_types")
    if kinds is None:
        every = values.size("global_attn_every_n_layers", default=3)
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    known = {"sliding_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise values.error("layer_types", kinds, f"{layers} times one of {', '.join(sorted(known))}")
    bases = {
        "full_attention": _rope_base(values, "full_attention", "global_rope_theta", 160_000.0),
        "sliding_attention": _rope_base(values, "sliding_attention", "local_rope_theta", 10_000.0),
    }
    # The window of both sides together; the token itself isn't counted.
    half = values.size("local_attention", default=128) // 2
    pooling = values.word("classifier_pooling", default="cls")
    if pooling not in ("cls", "mean"):
        raise values.error("classifier_pooling", pooling, "cls or mean")
    return Shape(
        family="modernbert",
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        num_layers=layers,
        num_heads=values.size("num_attention_heads"),
        intermediate_size=values.size("intermediate_size"),
        max_tokens=values.size("max_position_embeddings", default=8192),
        activation=_activation(values, "hidden_activation"),
        norm_eps=values.number("norm_eps", default=1e-5),
        rope=tuple(bases[kind] for kind in kinds),
        windows=tuple(half if kind == "sliding_attention" else None for kind in kinds),
        gated=True,
        prenorm=True,
        attention_bias=values.flag("attention_bias", False),
        mlp_bias=values.flag("mlp_bias", False),
        norm_bias=values.flag("norm_bias", False),
        head_activation=_activation(values, "classifier_activation"),
        head_bias=values.flag("classifier_bias", False),
        head_norm=True,
        head_pooling=pooling,
    )


def _rope_base(values: Values, kind: str, key: str, default: float) -> float:
    """transformers 5 writes rope_parameters by kind of layer, earlier versions a number."""
    parameters = values.values.get("rope_parameters")
    if parameters is None:
        return values.number(key, default=default)
    own = parameters.get(kind) if isinstance(parameters, dict) else None
    if not isinstance(own, dict) or own.get("rope_type", "default") != "default":
        raise UnsupportedModelError(
            f"{values.where}: rope_parameters are {parameters!r:.80}; only the default type is supported"
        )
    return Values(values.where, own).number("rope_theta", default=default)
