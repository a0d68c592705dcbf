"""Published tensor names → those of `layers.py`. What a pattern maps to None is left out on purpose."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")
Table = tuple[tuple[str, str | None], ...]

_PREFIX = re.compile(
    r"(?:bert|roberta|camembert|distilbert|mpnet|model)\.(?=embeddings|encoder|transformer|layers|emb_ln|pooler|final_norm)"
)
_LEFT_OUT: Table = (
    (r"cls\..*|lm_head\..*|vocab_\w+\..*|decoder\..*", None),  # of masked language modelling
    (r"(?:.*\.)?(?:position_ids|inv_freq)", None),  # tables that are computed
)
_EMBEDDINGS: Table = (
    (r"embeddings\.word_embeddings", "words"),
    (r"embeddings\.position_embeddings", "positions"),
    (r"embeddings\.token_type_embeddings", "types"),
    (r"embeddings\.LayerNorm", "embedding_norm"),
)
_LAYER = r"encoder\.layer\.(\d+)\."
_FEED_FORWARD: Table = (
    (_LAYER + r"intermediate\.dense", r"layers.\1.mlp.up_proj"),
    (_LAYER + r"output\.dense", r"layers.\1.mlp.down_proj"),
    (_LAYER + r"output\.LayerNorm", r"layers.\1.mlp_norm"),
)
_DENSE_OUT_HEAD: Table = (
    (r"pooler\.dense", None),
    (r"classifier\.dense", "head.dense"),
    (r"classifier\.out_proj", "head.out"),
)
_SELF: Table = (
    (_LAYER + r"attention\.self\.(q|k|v)\w+", r"layers.\1.attention.\2_proj"),
    (_LAYER + r"attention\.output\.dense", r"layers.\1.attention.o_proj"),
    (_LAYER + r"attention\.output\.LayerNorm", r"layers.\1.attention_norm"),
)
_BERT: Table = (*_EMBEDDINGS, *_SELF, *_FEED_FORWARD, (r"pooler\.dense", "head.dense"), (r"classifier", "head.out"))
_ROBERTA: Table = (*_EMBEDDINGS, *_SELF, *_FEED_FORWARD, *_DENSE_OUT_HEAD)
_TRANSFORMER = r"transformer\.layer\.(\d+)\."
TABLES: dict[str, Table] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": (
        *_EMBEDDINGS,
        (_LAYER + r"attention\.attn\.(q|k|v|o)", r"layers.\1.attention.\2_proj"),
        (_LAYER + r"attention\.LayerNorm", r"layers.\1.attention_norm"),
        (r"encoder\.relative_attention_bias", "relative_bias"),
        *_FEED_FORWARD,
        *_DENSE_OUT_HEAD,
    ),
    "distilbert": (
        *_EMBEDDINGS,
        (_TRANSFORMER + r"attention\.(q|k|v)_lin", r"layers.\1.attention.\2_proj"),
        (_TRANSFORMER + r"attention\.out_lin", r"layers.\1.attention.o_proj"),
        (_TRANSFORMER + r"sa_layer_norm", r"layers.\1.attention_norm"),
        (_TRANSFORMER + r"ffn\.lin1", r"layers.\1.mlp.up_proj"),
        (_TRANSFORMER + r"ffn\.lin2", r"layers.\1.mlp.down_proj"),
        (_TRANSFORMER + r"output_layer_norm", r"layers.\1.mlp_norm"),
        (r"pre_classifier", "head.dense"),
        (r"classifier", "head.out"),
    ),
    "nomic_bert": (
        *_EMBEDDINGS,
        (r"emb_ln", "embedding_norm"),
        (r"encoder\.layers\.(\d+)\.attn\.Wqkv", r"layers.\1.attention.qkv_proj"),
        (r"encoder\.layers\.(\d+)\.attn\.out_proj", r"layers.\1.attention.o_proj"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc11", r"layers.\1.mlp.linear_proj"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc12", r"layers.\1.mlp.gate_proj"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc1", r"layers.\1.mlp.up_proj"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc2", r"layers.\1.mlp.down_proj"),
        (r"encoder\.layers\.(\d+)\.norm1", r"layers.\1.attention_norm"),
        (r"encoder\.layers\.(\d+)\.norm2", r"layers.\1.mlp_norm"),
        (r"pooler\.dense", None),
    ),
    "modernbert": (
        (r"embeddings\.tok_embeddings", "words"),
        (r"embeddings\.norm", "embedding_norm"),
        (r"layers\.(\d+)\.attn\.Wqkv", r"layers.\1.attention.qkv_proj"),
        (r"layers\.(\d+)\.attn\.Wo", r"layers.\1.attention.o_proj"),
        (r"layers\.(\d+)\.attn_norm", r"layers.\1.attention_norm"),
        (r"layers\.(\d+)\.mlp\.Wi", r"layers.\1.mlp.up_proj"),
        (r"layers\.(\d+)\.mlp\.Wo", r"layers.\1.mlp.down_proj"),
        (r"layers\.(\d+)\.mlp_norm", r"layers.\1.mlp_norm"),
        (r"final_norm", "final_norm"),
        (r"head\.(dense|norm)", r"head.\1"),
        (r"classifier", "head.out"),
    ),
}  # fmt: skip
_KINDS = {"gamma": "weight", "beta": "bias"}
"""TensorFlow's names of a norm's parameters, in older files."""
JOINED = {
    "attention.qkv_proj": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "mlp.up_proj": ("mlp.gate_proj", "mlp.linear_proj"),
}
"""Layers that are computed as one, and the published parts whose rows follow one another in it."""


def own_names(names: Sequence[str], family: str, *, head: bool, where: str) -> dict[str, str]:
    """Published name → own name, without those that are left out. `head`: keep a reranker's head.

    Raises ModelFileError that lists the names which aren't known.
    """
    patterns = [(re.compile(p), to) for p, to in _LEFT_OUT]
    modules = [(re.compile(p), to) for p, to in TABLES[family]]
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        plain = _PREFIX.sub("", name, count=1)
        if any(p.fullmatch(plain) for p, _ in patterns):
            continue
        module, _, kind = plain.rpartition(".")
        match = next(((m, to) for p, to in modules if (m := p.fullmatch(module))), None)
        if match is None:
            unknown.append(name)
        elif match[1] is not None and (head or not match[1].startswith("head.")):
            found[name] = f"{match[0].expand(match[1])}.{_KINDS.get(kind, kind)}"
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ModelFileError(f"{where}: tensors that a {family} has no place for: {', '.join(unknown[:5])}{more}"[:800])
    return found


def joined(weights: Mapping[str, T], join: Callable[[list[T]], T]) -> dict[str, T]:
    """The weights with each group of JOINED made one by `join`; a group of which a part is missing stays as it is."""
    out = dict(weights)
    for name in weights:
        for whole, parts in JOINED.items():
            before, found, kind = name.partition(parts[0])
            group = [f"{before}{part}{kind}" for part in parts]
            if found and all(part in out for part in group):
                out[f"{before}{whole}{kind}"] = join([out.pop(part) for part in group])
    return out
