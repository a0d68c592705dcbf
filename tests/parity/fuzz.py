# ruff: noqa: RUF001
"""Seeded strings that fall apart differently under every pre-tokenizer, and a vocabulary that shows it."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

from tests.unit.formats.gguf_files import byte_alphabet

FIXTURES = Path(__file__).parent.parent / "fixtures"
VOCABULARY_FILE = FIXTURES / "fuzz_vocabulary.json"
COUNT, SEED = 2000, 20_240
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool>", "<extra>"]

WORDS = (
    "the", "Hello", "WORLD", "camelCaseWord", "HTTPServer", "iPhone", "x", "I", "naïve", "Straße", "ﬁne", "Ǆur",
    "Привет", "МИР", "ёж", "Ωμέγα", "Ἀρχή", "שלום", "مرحبا", "عليكم،", "नमस्ते", "हिन्दी", "สวัสดี", "ไทย", "ພາສາ", "ខ្មែរ",
    "你好", "世界。",
    "東京", "こんにちは", "カタカナ", "ｶﾀｶﾅ", "안녕하세요", "ㄱㄴ", "ㄅㄆㄇ", "ᏣᎳᎩ", "ქართული", "Հայ", "𐐀𐐨", "ª", "ʰ",
    "don't", "we'll", "I'M", "they'Re", "it's", "'s", "'T", "'ll", "’s", "''", "can't've", "x'd", "'VE", "o'clock",
)  # fmt: skip
NUMBERS = ("1", "12", "123", "1234", "12345678", "3.14", "1,000", "٣٤", "१२", "½", "²", "Ⅳ", "①", "２０", "0x1F", "1e9")
MARKS = (
    ".", ",", "!", "?", "...", "…", "。", "、", "!!", "?!", "--", "—", "==", "+=", "/", "//", "\\", "(", ")", "((",
    "[]", "{}",
    "<", ">", "$", "€", "£", "%", "^", "~", "`", "|", "@", "#", "&", "*", "_", "__", "\"", "«", "»",
    "・", "！", "：", "‘", "„",
    "°", "©", "¬", "→", "∑", "😀", "👩‍👧", "🇫🇷", "♥️",
    "\u0301", "\u200b", "\u200d", "\u200c", "\ufeff", "\u00ad", "।", "۔", "،",
)  # fmt: skip
SPACES = (
    " ",
    "  ",
    "   ",
    " " * 5,
    " " * 17,
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
    "\t\t",
    "\n ",
    " \n",
    "  \n  ",
    "\u00a0",
    "\u3000",
)
ODD = ("\x00", "\x07", "\x0b", "\x0c", "\x85", "\u2028", "\u2003", *SPECIALS, *USER_DEFINED)
BLOCKS = ((0x21, 0x7E), (0xA1, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A), (0x905, 0x939),
          (0xE01, 0xE2E), (0x1E00, 0x1EFF), (0x2010, 0x2027), (0x20A0, 0x20BF), (0x2190, 0x21FF), (0x3041, 0x3096),
          (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F600, 0x1F64F))  # fmt: skip


def strings(count: int = COUNT, seed: int = SEED) -> list[str]:
    """Up to twelve pieces each, with and without spaces between them."""
    draw = random.Random(seed)

    def piece() -> str:
        kind = draw.random()
        if kind < 0.35:
            return draw.choice(WORDS)
        if kind < 0.5:
            return draw.choice(NUMBERS) if draw.random() < 0.6 else str(draw.randrange(10 ** draw.randrange(1, 12)))
        if kind < 0.7:
            return draw.choice(MARKS)
        if kind < 0.88:
            return draw.choice(SPACES)
        if kind < 0.91:
            return draw.choice(ODD)
        low, high = draw.choice(BLOCKS)
        return "".join(chr(draw.randint(low, high)) for _ in range(draw.randrange(1, 4)))

    def one() -> str:
        glue = draw.choice(("", "", " "))
        return glue.join(piece() for _ in range(draw.randrange(1, 13)))

    return [one() for _ in range(count)]


def checksum(ids: list[int]) -> int:
    """16 bits of the ids of one string."""
    return zlib.crc32(b"".join(i.to_bytes(4, "little") for i in ids)) & 0xFFFF


def train() -> None:
    """Make VOCABULARY_FILE: merges across words, digits and spaces alike, so that each boundary shows in the ids."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, max_token_length=24
    )
    texts = [t for s in strings(6000, seed=1) for t in (s.split("<")[0],) if t]
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    VOCABULARY_FILE.write_text(json.dumps([" ".join(m) for m in merges], ensure_ascii=False, indent=0) + "\n")


def vocabulary(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level BPE under the pre-tokenizer `pre`."""
    merges = json.loads(VOCABULARY_FILE.read_text(encoding="utf-8"))
    tokens = [*SPECIALS, *byte_alphabet()]
    known = set(tokens)
    for merge in merges:
        left, right = merge.split(" ")
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
    # Words that no merge leads to: only where whole words are looked up first do they come out.
    whole = [w for w in ("HTTPServer", "ĠHTTPServer", "iPhone", "ĠiPhone", "ĠcamelCaseWord") if w not in known]
    kinds = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS) + len(whole)) + [4] * len(USER_DEFINED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *whole, *USER_DEFINED],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


if __name__ == "__main__":
    train()
