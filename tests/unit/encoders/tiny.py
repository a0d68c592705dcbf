"""Tiny encoders with random weights under their published names, in folders as they are published."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from tests import tiny as chat_tiny

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "paris", "is", "capital", "of", "france", "banana",
    "yellow", "what", "a", "b", "c",
)  # fmt: skip
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCAB = 40
HIDDEN, HEADS, WIDE, LAYERS, POSITIONS = 32, 4, 48, 2, 96

_PLAIN = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": WIDE,
    "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "hidden_act": "gelu",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "type_vocab_size": 2, "layer_norm_eps": 1e-12, **_PLAIN},
    "roberta": {"model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, **_PLAIN},
    "xlm-roberta": {
        "model_type": "xlm-roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, **_PLAIN,
    },
    "mpnet": {
        "model_type": "mpnet", "layer_norm_eps": 1e-5, "pad_token_id": 1, "relative_attention_num_buckets": 32,
        **_PLAIN,
    },
    "distilbert": {
        "model_type": "distilbert", "dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": WIDE,
        "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "activation": "gelu",
    },
    "nomic_bert": {
        "model_type": "nomic_bert", "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_inner": WIDE,
        "vocab_size": VOCAB, "n_positions": POSITIONS, "rotary_emb_base": 1000.0, "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu", "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "layer_norm_epsilon": 1e-12, "type_vocab_size": 2, "prenorm": False,
    },
    "modernbert": {
        "model_type": "modernbert", **_PLAIN, "num_hidden_layers": 4, "global_attn_every_n_layers": 3,
        "hidden_activation": "gelu", "local_attention": 8, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "norm_eps": 1e-5, "classifier_pooling": "mean",
    },
}  # fmt: skip


def tokenizer(max_words: int = VOCAB) -> tokenizers.Tokenizer:
    """BERT's kind: lower-cased words, [CLS] text [SEP], [CLS] text [SEP] pair [SEP]."""
    vocab = {token: i for i, token in enumerate([*SPECIALS, *WORDS][:max_words])}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(list(SPECIALS))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def shapes(config: Mapping[str, Any], *, scores: bool = False) -> dict[str, tuple[int, ...]]:
    """Published tensor names → shapes, of one family."""
    family = config["model_type"]
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = (out, into)
        if bias:
            found[f"{name}.bias"] = (out,)

    def norm(name: str, bias: bool = True) -> None:
        found[f"{name}.weight"] = (HIDDEN,)
        if bias:
            found[f"{name}.bias"] = (HIDDEN,)

    if family == "modernbert":
        found["model.embeddings.tok_embeddings.weight"] = (VOCAB, HIDDEN)
        norm("model.embeddings.norm", bias=False)
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}"
            if i:
                norm(f"{at}.attn_norm", bias=False)
            linear(f"{at}.attn.Wqkv", 3 * HIDDEN, HIDDEN, bias=False)
            linear(f"{at}.attn.Wo", HIDDEN, HIDDEN, bias=False)
            norm(f"{at}.mlp_norm", bias=False)
            linear(f"{at}.mlp.Wi", 2 * WIDE, HIDDEN, bias=False)
            linear(f"{at}.mlp.Wo", HIDDEN, WIDE, bias=False)
        norm("model.final_norm", bias=False)
        if scores:
            linear("head.dense", HIDDEN, HIDDEN, bias=False)
            norm("head.norm", bias=False)
            linear("classifier", 1, HIDDEN)
        return found
    if family == "nomic_bert":
        found |= {
            "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
            "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        }
        norm("emb_ln")
        for i in range(LAYERS):
            at = f"encoder.layers.{i}"
            linear(f"{at}.attn.Wqkv", 3 * HIDDEN, HIDDEN, bias=False)
            linear(f"{at}.attn.out_proj", HIDDEN, HIDDEN, bias=False)
            linear(f"{at}.mlp.fc11", WIDE, HIDDEN, bias=False)
            linear(f"{at}.mlp.fc12", WIDE, HIDDEN, bias=False)
            linear(f"{at}.mlp.fc2", HIDDEN, WIDE, bias=False)
            norm(f"{at}.norm1")
            norm(f"{at}.norm2")
        return found
    prefix = {"bert": "", "mpnet": "", "xlm-roberta": "roberta."}.get(family, f"{family}.")
    found[f"{prefix}embeddings.word_embeddings.weight"] = (VOCAB, HIDDEN)
    found[f"{prefix}embeddings.position_embeddings.weight"] = (POSITIONS, HIDDEN)
    norm(f"{prefix}embeddings.LayerNorm")
    if types := config.get("type_vocab_size"):
        found[f"{prefix}embeddings.token_type_embeddings.weight"] = (types, HIDDEN)
    if family == "mpnet":
        found["encoder.relative_attention_bias.weight"] = (32, HEADS)
    for i in range(LAYERS):
        if family == "distilbert":
            at = f"{prefix}transformer.layer.{i}"
            for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
                linear(f"{at}.attention.{name}", HIDDEN, HIDDEN)
            norm(f"{at}.sa_layer_norm")
            linear(f"{at}.ffn.lin1", WIDE, HIDDEN)
            linear(f"{at}.ffn.lin2", HIDDEN, WIDE)
            norm(f"{at}.output_layer_norm")
            continue
        at = f"{prefix}encoder.layer.{i}"
        if family == "mpnet":
            for name in "qkvo":
                linear(f"{at}.attention.attn.{name}", HIDDEN, HIDDEN)
            norm(f"{at}.attention.LayerNorm")
        else:
            for name in ("query", "key", "value"):
                linear(f"{at}.attention.self.{name}", HIDDEN, HIDDEN)
            linear(f"{at}.attention.output.dense", HIDDEN, HIDDEN)
            norm(f"{at}.attention.output.LayerNorm")
        linear(f"{at}.intermediate.dense", WIDE, HIDDEN)
        linear(f"{at}.output.dense", HIDDEN, WIDE)
        norm(f"{at}.output.LayerNorm")
    if family in ("bert", "mpnet"):
        linear("pooler.dense", HIDDEN, HIDDEN)  # published with embedding models too, and not used by them
    if scores and family == "bert":
        linear("classifier", 1, HIDDEN)
    elif scores and family == "distilbert":
        linear("pre_classifier", HIDDEN, HIDDEN)
        linear("classifier", 1, HIDDEN)
    elif scores:
        linear("classifier.dense", HIDDEN, HIDDEN)
        linear("classifier.out_proj", 1, HIDDEN)
    return found


def weights(config: Mapping[str, Any], *, scores: bool = False, seed: int = 0) -> dict[str, Any]:
    """Random float32 tensors that make a model's output depend on all of its input."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(float(len(shape) == 1 and name.endswith("weight")), 0.3, shape).astype(np.float32)
        for name, shape in shapes(config, scores=scores).items()
    }


def write_folder(
    folder: Path,
    family: str = "bert",
    *,
    scores: bool = False,
    pooling: Mapping[str, Any] | None = None,
    extra: tuple[str, ...] = ("Normalize",),
    tensors: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a whole model and return its folder; with `pooling`, the parts of sentence-transformers too."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family] | {"architectures": ["XForSequenceClassification" if scores else "XModel"]} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors or weights(CONFIGS[family], scores=scores)), folder / "model.safetensors")
    tokenizer().save(str(folder / "tokenizer.json"))
    if pooling is not None:
        parts = ["Transformer", "Pooling", *extra]
        modules = [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(parts)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": WIDE, "vocab_size": 320,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def qwen3_weights(seed: int = 0) -> dict[str, Any]:
    """Under the names of the published rerankers; the embedding models leave "model." out."""
    rng = np.random.default_rng(seed)
    found: dict[str, tuple[int, ...]] = {"embed_tokens": (320, HIDDEN), "norm": (HIDDEN,)}
    for i in range(2):
        at = f"layers.{i}"
        found |= {f"{at}.input_layernorm": (HIDDEN,), f"{at}.post_attention_layernorm": (HIDDEN,)}
        found |= {f"{at}.self_attn.q_norm": (8,), f"{at}.self_attn.k_norm": (8,)}
        found |= {f"{at}.self_attn.{n}_proj": (out, HIDDEN) for n, out in (("q", 32), ("k", 16), ("v", 16))}
        found |= {f"{at}.self_attn.o_proj": (HIDDEN, 32), f"{at}.mlp.down_proj": (HIDDEN, WIDE)}
        found |= {f"{at}.mlp.{n}_proj": (WIDE, HIDDEN) for n in ("gate", "up")}
    return {
        f"model.{name}.weight": rng.normal(float(len(shape) == 1), 0.3, shape).astype(np.float32)
        for name, shape in found.items()
    }


def write_qwen3(folder: Path, *, prefix: bool = True, **changes: Any) -> Path:
    """A decoder as Qwen3's embedding models and rerankers are published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 | changes))
    tensors = qwen3_weights()
    if not prefix:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    made = chat_tiny.build_tokenizer()
    made.add_tokens(["yes", "no"])
    made.save(str(folder / "tokenizer.json"))
    return folder
