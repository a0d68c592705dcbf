"""tiktoken files (BASE64 RANK a line) as tokenizer.json: byte-level BPE whose merges follow from the ranks."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from mlxinfer.convert.tokenizers.sentencepiece import special_token
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf.merges import every_split
from mlxinfer.formats.gguf.pretokenizers import PRE_TOKENIZERS, pre_tokenizer_json

MAX_RANKS = 1_000_000
MAX_TOKEN_BYTES = 1024
LLAMA3_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)  # fmt: skip
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A published tokenizer that comes as such a file."""

    pre_tokenizer: str
    """Its name in `pretokenizers.PRE_TOKENIZERS`."""
    specials: tuple[str, ...]
    """They follow the ranks, unless tokenizer_config.json lists others."""


KINDS = {"llama": Kind("llama-bpe", LLAMA3_SPECIALS), "qwen": Kind("qwen2", QWEN_SPECIALS)}
"""By model_type. The file doesn't say how text is split into words, so no others are read."""


def read_ranks(data: bytes, where: str) -> list[bytes]:
    """The tokens in the order of their ranks. Raises ModelFileError unless ranks are 0, 1, … and every byte has one."""
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        token, _, rank = line.strip().partition(b" ")
        try:
            raw, index = base64.b64decode(token, validate=True), int(rank[:20])
        except (binascii.Error, ValueError):
            raise ModelFileError(f"{where}: line {number} is no token in base64 and a rank") from None
        if not 0 < len(raw) <= MAX_TOKEN_BYTES or index in ranks or not 0 <= index < MAX_RANKS:
            raise ModelFileError(f"{where}: line {number} has a token of {len(raw)} bytes with rank {index}")
        ranks[index] = raw
    tokens = [ranks[i] for i in sorted(ranks)]
    if sorted(ranks) != list(range(len(ranks))) or len(set(tokens)) != len(tokens):
        raise ModelFileError(f"{where}: the ranks of its {len(ranks)} tokens have gaps, or a token occurs twice")
    if missing := {bytes([i]) for i in range(256)} - set(tokens):
        raise ModelFileError(f"{where}: {len(missing)} bytes have no token, among them {min(missing)!r}")
    return tokens


def tokenizer_parts(tokens: list[bytes], model_type: object, where: str) -> tuple[dict[str, Any], Kind]:
    """normalizer, pre_tokenizer, decoder and model of a tokenizer.json, and what is known of the model's kind.

    Raises UnsupportedModelError for other models.
    """
    kind = KINDS.get(model_type) if isinstance(model_type, str) else None
    if kind is None:
        raise UnsupportedModelError(
            f"{where} doesn't say how text falls into words, and for model_type {model_type!r:.60} that isn't known; "
            f"known: {', '.join(KINDS)}"
        )
    splits = PRE_TOKENIZERS[kind.pre_tokenizer]
    characters = byte_characters()
    texts = ["".join(characters[byte] for byte in token) for token in tokens]
    parts = {
        "normalizer": {"type": "NFC"} if splits.nfc else None,
        "pre_tokenizer": pre_tokenizer_json(splits),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {text: i for i, text in enumerate(texts)}, "merges": _merges(texts, where),
        },
    }  # fmt: skip
    return parts, kind


def special_tokens(kind: Kind, count: int) -> list[dict[str, Any]]:
    """The kind's own, after `count` ranks."""
    return [special_token(count + i, text) for i, text in enumerate(kind.specials)]


def byte_characters() -> list[str]:
    """How byte-level BPE writes each byte: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _merges(texts: list[str], where: str) -> list[tuple[str, str]]:
    """Every way in which two tokens make a third, by the rank of the third: tiktoken joins by that alone."""
    return every_split(texts, {text: i for i, text in enumerate(texts)}, where)
