# ruff: noqa: RUF001 - the patterns hold the characters of many scripts
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
_NOT_HAN_UPPER, _NOT_HAN_LOWER = (rf"(?:(?!\p{{Han}}){letters})" for letters in (_UPPER, _LOWER))
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}?|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
SUPERBPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")
_HAN_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_WORD_AFTER_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
DEEPSEEK3 = (r"\p{N}{1,3}", _HAN_KANA, rf"{_WORD_AFTER_MARK}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_WIDE = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ"
    "-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰"
    "-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with case, as DeepSeek's first tokenizer lists them."""
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_WIDE}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
KIMI_K2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
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
    PreTokenizer((GPT2,)): (
        *("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "gigachat"),
        *("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "roberta-bpe", "exaone4", "a.x-4.0", "mellum"),
    ),
    PreTokenizer((r"\p{N}", GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    PreTokenizer((LLAMA3,)): ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    PreTokenizer((QWEN2,), nfc=True): ("qwen2", "deepseek-r1-qwen", "megrez", "kormo"),
    PreTokenizer((QWEN2,)): ("stablelm2", "hunyuan", "grok-2"),
    PreTokenizer((QWEN35,), nfc=True): ("qwen35",),
    PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((GPT4O,)): ("gpt-4o", "llama4", "minimax-m2"),
    PreTokenizer(YOUTU, ignore_merges=True): ("youtu",),
    PreTokenizer(DEEPSEEK_LLM): ("deepseek-llm",),
    PreTokenizer(DEEPSEEK_CODER): ("deepseek-coder",),
    PreTokenizer(DEEPSEEK3): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    PreTokenizer(FALCON): ("falcon",),
    PreTokenizer(BLOOM): ("bloom", "poro-chat", "gpt3-finnish"),
    PreTokenizer((*BLOOM, r"\p{N}")): ("viking",),
    PreTokenizer(CHAMELEON, add_bos=True): ("chameleon",),
    PreTokenizer(SUPERBPE): ("superbpe",),
    PreTokenizer((KIMI_K2,)): ("kimi-k2",),
    PreTokenizer((SEED_CODER,)): ("seed-coder",),
    PreTokenizer((BAILING,)): ("bailingmoe", "bailingmoe2", "llada-moe"),
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
