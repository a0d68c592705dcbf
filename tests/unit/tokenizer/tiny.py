"""Small tokenizers, trained or written here, so that no test needs a model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["hello wörld, 日本語 🙂🙂 naïve café", "the cat sat on the mat.\n", "  two  spaces\tand tabs"] * 5


@cache
def _byte_level_text() -> str:
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_tokens(["<tool>"])
    return tok.to_str()


def byte_level() -> dict[str, Any]:
    """Byte-level BPE over all 256 bytes, four special tokens and one added token that isn't special."""
    return json.loads(_byte_level_text())


def sentencepiece(*, adds_bos: bool = False) -> dict[str, Any]:
    """A byte-fallback BPE with the decoder of Llama 2: ▁ for spaces, the first one stripped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁b", "é", "ab"]
    tok = tokenizers.Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[("▁", "a"), ("▁", "b"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    if adds_bos:
        tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return json.loads(tok.to_str())
