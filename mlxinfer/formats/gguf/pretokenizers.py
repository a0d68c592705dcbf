"""How text falls into words before byte-level BPE, by the name in `tokenizer.ggml.pre`.

The patterns are facts of the published tokenizers; a name that is not listed is an error, since a guess would give
other ids than the model was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxinfer.errors import UnsupportedModelError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One published way of splitting. `patterns` apply one after the other, each inside the pieces of the last."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A whole word that is a token is taken as it is, whatever the merges say."""
    add_bos: bool = False
    """What holds when the file doesn't say."""
    nfc: bool = False


_KINDS: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer(DEFAULT): ("default",),
    PreTokenizer((GPT2,)): ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "roberta-bpe", "exaone4"),
    PreTokenizer((r"\p{N}", GPT2)): ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True): ("llama-bpe", "llama3", "llama-v3", "falcon3"),
    PreTokenizer((LLAMA3,)): ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    PreTokenizer((QWEN2,), nfc=True): ("qwen2", "deepseek-r1-qwen", "megrez"),
    PreTokenizer((QWEN2,)): ("stablelm2", "hunyuan"),
    PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((GPT4O,)): ("gpt-4o", "llama4"),
}
PRE_TOKENIZERS = {name: kind for kind, names in _KINDS.items() for name in names}


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """Raises UnsupportedModelError for a name that is not in the table."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(f"{where}: tokenizer.ggml.pre is {name!r:.60}, which is not known; known: {known}")
    return found


def pre_tokenizer_json(kind: PreTokenizer) -> dict[str, Any]:
    """The "pre_tokenizer" of a tokenizer.json."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in kind.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}
