"""The published encoders in float64 numpy, one text at a time, over tensors under their published names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Array = np.ndarray[Any, np.dtype[np.float64]]

_erf = np.vectorize(math.erf)


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + _erf(x / math.sqrt(2)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Weights:
    """Linear layers, norms and tables by name."""

    def __init__(self, tensors: Mapping[str, Array], eps: float) -> None:
        self.tensors = tensors
        self.eps = eps

    def linear(self, name: str, x: Array) -> Array:
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        out = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps) * self.tensors[f"{name}.weight"]
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def table(self, name: str, ids: Any) -> Array:
        return self.tensors[f"{name}.weight"][np.asarray(ids)]


def attention(q: Array, k: Array, v: Array, heads: int, bias: Array | float = 0.0, rope: float | None = None) -> Array:
    length, size = q.shape
    q, k, v = (x.reshape(length, heads, -1).transpose(1, 0, 2) for x in (q, k, v))
    if rope is not None:
        q, k = rotated(q, rope), rotated(k, rope)
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + bias
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(length, size)


def rotated(x: Array, base: float) -> Array:
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def hidden_states(
    config: Mapping[str, Any], tensors: Mapping[str, Array], ids: Sequence[int], types: Sequence[int] | None = None
) -> Array:
    """The last hidden states [L, hidden] of one text."""
    family = config["model_type"]
    forward = {"distilbert": _distilbert, "modernbert": _modernbert, "nomic_bert": _nomic}.get(family, _bert)
    eps = config.get("layer_norm_eps") or config.get("norm_eps") or config.get("layer_norm_epsilon") or 1e-12
    return forward(config, Weights(tensors, eps), ids, types or [0] * len(ids))


def _bert(c: Mapping[str, Any], w: Weights, ids: Sequence[int], types: Sequence[int]) -> Array:
    family = c["model_type"]
    first = 0 if family == "bert" else c["pad_token_id"] + 1
    prefix = {"bert": "", "mpnet": "", "xlm-roberta": "roberta."}.get(family, f"{family}.")
    x = w.table(f"{prefix}embeddings.word_embeddings", ids)
    x = x + w.table(f"{prefix}embeddings.position_embeddings", range(first, first + len(ids)))
    bias: Array | float = 0.0
    own = "attention.self.{}"
    if family == "mpnet":
        buckets = [[_bucket(key - query, 32) for key in range(len(ids))] for query in range(len(ids))]
        bias = w.table(f"{prefix}encoder.relative_attention_bias", buckets).transpose(2, 0, 1)
        own = "attention.attn.{}"
    else:
        x = x + w.table(f"{prefix}embeddings.token_type_embeddings", types)
    x = w.norm(f"{prefix}embeddings.LayerNorm", x)
    for i in range(c["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{i}"
        names = ("q", "k", "v") if family == "mpnet" else ("query", "key", "value")
        q, k, v = (w.linear(f"{at}.{own.format(n)}", x) for n in names)
        mixed = attention(q, k, v, c["num_attention_heads"], bias)
        if family == "mpnet":
            x = w.norm(f"{at}.attention.LayerNorm", x + w.linear(f"{at}.attention.attn.o", mixed))
        else:
            x = w.norm(f"{at}.attention.output.LayerNorm", x + w.linear(f"{at}.attention.output.dense", mixed))
        x = w.norm(
            f"{at}.output.LayerNorm", x + w.linear(f"{at}.output.dense", gelu(w.linear(f"{at}.intermediate.dense", x)))
        )
    return x


def _bucket(distance: int, count: int) -> int:
    half = count // 2
    n, base = abs(distance), half if distance > 0 else 0
    exact = half // 2
    if n < exact:
        return base + n
    return base + min(half - 1, exact + int(math.log(n / exact) / math.log(128 / exact) * (half - exact)))


def _distilbert(c: Mapping[str, Any], w: Weights, ids: Sequence[int], types: Sequence[int]) -> Array:
    x = w.table("distilbert.embeddings.word_embeddings", ids)
    x = w.norm(
        "distilbert.embeddings.LayerNorm", x + w.table("distilbert.embeddings.position_embeddings", range(len(ids)))
    )
    for i in range(c["n_layers"]):
        at = f"distilbert.transformer.layer.{i}"
        q, k, v = (w.linear(f"{at}.attention.{n}_lin", x) for n in "qkv")
        x = w.norm(f"{at}.sa_layer_norm", x + w.linear(f"{at}.attention.out_lin", attention(q, k, v, c["n_heads"])))
        x = w.norm(f"{at}.output_layer_norm", x + w.linear(f"{at}.ffn.lin2", gelu(w.linear(f"{at}.ffn.lin1", x))))
    return x


def _nomic(c: Mapping[str, Any], w: Weights, ids: Sequence[int], types: Sequence[int]) -> Array:
    x = w.table("embeddings.word_embeddings", ids) + w.table("embeddings.token_type_embeddings", types)
    x = w.norm("emb_ln", x)
    for i in range(c["n_layer"]):
        at = f"encoder.layers.{i}"
        q, k, v = np.split(w.linear(f"{at}.attn.Wqkv", x), 3, -1)
        mixed = attention(q, k, v, c["n_head"], rope=c["rotary_emb_base"])
        x = w.norm(f"{at}.norm1", x + w.linear(f"{at}.attn.out_proj", mixed))
        wide = w.linear(f"{at}.mlp.fc11", x) * silu(w.linear(f"{at}.mlp.fc12", x))
        x = w.norm(f"{at}.norm2", x + w.linear(f"{at}.mlp.fc2", wide))
    return x


def _modernbert(c: Mapping[str, Any], w: Weights, ids: Sequence[int], types: Sequence[int]) -> Array:
    x = w.norm("model.embeddings.norm", w.table("model.embeddings.tok_embeddings", ids))
    away = np.abs(np.subtract.outer(np.arange(len(ids)), np.arange(len(ids))))
    window = np.where(away <= c["local_attention"] // 2, 0.0, -np.inf)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        wide = i % c["global_attn_every_n_layers"] == 0
        y = w.norm(f"{at}.attn_norm", x) if i else x
        q, k, v = np.split(w.linear(f"{at}.attn.Wqkv", y), 3, -1)
        base = c["global_rope_theta"] if wide else c["local_rope_theta"]
        mixed = attention(q, k, v, c["num_attention_heads"], 0.0 if wide else window, base)
        x = x + w.linear(f"{at}.attn.Wo", mixed)
        first, gate = np.split(w.linear(f"{at}.mlp.Wi", w.norm(f"{at}.mlp_norm", x)), 2, -1)
        x = x + w.linear(f"{at}.mlp.Wo", gelu(first) * gate)
    return w.norm("model.final_norm", x)


def score(config: Mapping[str, Any], tensors: Mapping[str, Array], ids: Sequence[int], types: Sequence[int]) -> float:
    """A cross-encoder's score of one pair."""
    family = config["model_type"]
    w = Weights(tensors, config.get("norm_eps") or 1e-12)
    hidden = hidden_states(config, tensors, ids, types)
    first = hidden[0]
    if family == "bert":
        logit = w.linear("classifier", np.tanh(w.linear("pooler.dense", first)))
    elif family == "distilbert":
        logit = w.linear("classifier", np.maximum(0, w.linear("pre_classifier", first)))
    elif family == "modernbert":
        pooled = hidden.mean(0) if config["classifier_pooling"] == "mean" else first
        logit = w.linear("classifier", w.norm("head.norm", gelu(w.linear("head.dense", pooled))))
    else:
        logit = w.linear("classifier.out_proj", np.tanh(w.linear("classifier.dense", first)))
    return 1 / (1 + math.exp(-float(logit[0])))


def pooled(hidden: Array, mode: str) -> Array:
    """One text's hidden states [L, hidden] → [hidden]."""
    length = len(hidden)
    weights = np.arange(1, length + 1)[:, None]
    return {
        "cls": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max": lambda: hidden.max(0),
        "mean": lambda: hidden.mean(0),
        "mean_sqrt_len": lambda: hidden.sum(0) / math.sqrt(length),
        "weightedmean": lambda: (hidden * weights).sum(0) / weights.sum(),
    }[mode]()


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x)


def qwen3_hidden(c: Mapping[str, Any], tensors: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """The last hidden states [L, hidden] of one text, causally."""

    def rms(name: str, x: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * tensors[f"{name}.weight"]

    w = Weights(tensors, 0.0)
    dim, heads, shared = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    causal = np.where(np.tril(np.ones((len(ids), len(ids)))) > 0, 0.0, -np.inf)
    x = w.table("model.embed_tokens", ids)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = rms(f"{at}.input_layernorm", x)
        q, k, v = (w.linear(f"{at}.self_attn.{n}_proj", y).reshape(len(ids), -1, dim) for n in "qkv")
        q, k = rms(f"{at}.self_attn.q_norm", q), rms(f"{at}.self_attn.k_norm", k)
        k, v = (np.repeat(part, heads // shared, 1) for part in (k, v))
        flat = [part.reshape(len(ids), -1) for part in (q, k, v)]
        x = x + w.linear(f"{at}.self_attn.o_proj", attention(*flat, heads, causal, c["rope_theta"]))
        y = rms(f"{at}.post_attention_layernorm", x)
        wide = silu(w.linear(f"{at}.mlp.gate_proj", y)) * w.linear(f"{at}.mlp.up_proj", y)
        x = x + w.linear(f"{at}.mlp.down_proj", wide)
    return rms("model.norm", x)
