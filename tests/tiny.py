"""A tiny, complete model folder: random Llama weights, a byte-level BPE tokenizer, a ChatML template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import mlx.core as mx
import tokenizers
from mlx.utils import tree_flatten, tree_map
from tokenizers import decoders, models, pre_tokenizers, trainers

from mlxinfer import upstream

if TYPE_CHECKING:
    from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "the quick brown fox jumps over the lazy dog. what is the capital of france? paris is the capital of france."


def config(**changes: object) -> dict[str, object]:
    """A Llama config of three layers; the vocabulary is the tokenizer's."""
    base: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return base | changes


def build_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE of at most 320 tokens with ids 0, 1, 2 special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def build_model(cfg: dict[str, object], seed: int = 0, scale: float = 3.0):
    """A random model whose output depends on its context: matrices are scaled up."""
    mx.random.seed(seed)
    model_class, args_class = upstream.model_classes(cfg)
    model = model_class(args_class.from_dict(cfg))
    model.update(tree_map(lambda w: w * scale if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def write_folder(
    folder: Path, *, seed: int = 0, generation: dict[str, object] | None = None, **changes: object
) -> Path:
    """Write the whole model into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = config(**changes)
    weights = dict(tree_flatten(build_model(cfg, seed).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(cfg))
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHATML})
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
