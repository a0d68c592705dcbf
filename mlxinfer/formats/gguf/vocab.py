"""The tokenizer of a GGUF file in the format of the `tokenizers` package (tokenizer.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.formats.gguf.fields import Fields
from mlxinfer.formats.gguf.merges import listed_merges, merges_from_scores
from mlxinfer.formats.gguf.pretokenizers import pre_tokenizer, pre_tokenizer_json

if TYPE_CHECKING:
    from mlxinfer.formats.gguf.reader import GGUFFile

# gguf.TokenType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"

END_TOKENS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
    | {"<|return|>", "<|call|>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "</s>", "<eos>"}
)
"""Control tokens that end a reply although the file may name only one of them as its end."""
KEEP_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's exceptions."""
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING = {
    "temp": ("temperature", 0.0, 100.0),
    "top_p": ("top_p", 0.0, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What `read_vocabulary` finds; the fields of GGUFModel of the same names."""

    tokenizer_json: dict[str, Any]
    chat_template: str | None
    bos_token_id: int | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos_token: bool
    add_eos_token: bool
    unk_token: str | None
    pad_token: str | None
    generation_config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Tokens:
    texts: list[str]
    types: list[int]
    ids: dict[str, int]


def read_vocabulary(file: GGUFFile, vocab_size: int) -> Vocabulary:
    """The tokenizer, template and special ids of `file`, whose embedding has `vocab_size` rows.

    Raises ModelFileError for a vocabulary that contradicts itself and UnsupportedModelError for a tokenizer or
    pre-tokenizer that is not known.
    """
    f = Fields(file)
    tokens = _read_tokens(f, vocab_size)
    kind = f.text("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = pre_tokenizer(f.text("tokenizer.ggml.pre", "default") or "default", str(file.path))
        parts = {
            "normalizer": {"type": "NFC"} if pre.nfc else None,
            "pre_tokenizer": pre_tokenizer_json(pre),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": _bpe(tokens, listed_merges(f, tokens.ids), ignore_merges=pre.ignore_merges),
        }
        add_bos = pre.add_bos
    elif kind == "llama":
        parts = _sentencepiece(f, tokens)
        add_bos = True
    else:
        raise UnsupportedModelError(f"{file.path}: tokenizer.ggml.model is {kind!r:.60}; gpt2 and llama are supported")
    return _assemble(f, tokens, parts, f.boolean("tokenizer.ggml.add_bos_token", add_bos))


def _read_tokens(f: Fields, vocab_size: int) -> _Tokens:
    texts = f.sequence("tokenizer.ggml.tokens", str)
    if not texts:
        raise f.fail("tokenizer.ggml.tokens", "is missing: the file has no tokenizer")
    if len(texts) > vocab_size:
        raise f.fail("tokenizer.ggml.tokens", f"has {len(texts)} tokens, but token_embd.weight has {vocab_size} rows")
    # An empty token can't be written in tokenizer.json; it never matches text either.
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    types = f.sequence("tokenizer.ggml.token_type", int) or [NORMAL] * len(texts)
    if len(types) != len(texts):
        raise f.fail("tokenizer.ggml.token_type", f"has {len(types)} entries for {len(texts)} tokens")
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) != len(texts):
        double = next(text for i, text in enumerate(texts) if ids[text] != i)
        raise f.fail("tokenizer.ggml.tokens", f"has {double!r:.80} twice")
    return _Tokens(texts, types, ids)


def _bpe(tokens: _Tokens, merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": tokens.ids,
        "merges": merges,
        **options,
    }


def _sentencepiece(f: Fields, tokens: _Tokens) -> dict[str, Any]:
    """BPE over "▁" for spaces, unknown characters as byte tokens, merges in the order of the scores."""
    scores = f.sequence("tokenizer.ggml.scores", float)
    if scores is None or len(scores) != len(tokens.texts):
        raise f.fail("tokenizer.ggml.scores", f"must have one number for each of the {len(tokens.texts)} tokens")
    unknown = _token_id(f, "unknown_token_id", tokens)
    if unknown is None and UNKNOWN in tokens.types:
        unknown = tokens.types.index(UNKNOWN)
    prefix = f.boolean("tokenizer.ggml.add_space_prefix", True)
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        to_marks = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, to_marks]}
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": to_marks,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            tokens,
            merges_from_scores(tokens.ids, tokens.types, scores, str(f.file.path)),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens.texts[unknown],
        ),
    }


def _token_id(f: Fields, name: str, tokens: _Tokens) -> int | None:
    key = f"tokenizer.ggml.{name}"
    # Some writers store -1 or 2^32 - 1 for "none".
    if f.file.metadata.get(key) in (None, -1, 2**32 - 1):
        return None
    return f.integer(key, 0, len(tokens.texts) - 1)


def _text_of(f: Fields, name: str, tokens: _Tokens) -> str | None:
    index = _token_id(f, name, tokens)
    return None if index is None else tokens.texts[index]


def _assemble(f: Fields, tokens: _Tokens, parts: dict[str, Any], add_bos: bool) -> Vocabulary:
    bos = _token_id(f, "bos_token_id", tokens)
    eos = _token_id(f, "eos_token_id", tokens)
    ends = dict.fromkeys(i for name in END_IDS if (i := _token_id(f, name, tokens)) is not None)
    ends |= dict.fromkeys(
        i for t in sorted(END_TOKENS) if (i := tokens.ids.get(t)) is not None and tokens.types[i] == CONTROL
    )
    special = {i for i in (bos, eos, *ends) if i is not None}
    strip = _strips_after_specials(f)
    added = [
        _added_token(
            i,
            tokens.texts[i],
            special=tokens.types[i] != USER_DEFINED or i in special,
            rstrip=strip and tokens.texts[i] not in KEEP_SPACE,
        )
        for i, kind in enumerate(tokens.types)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) or i in special
    ]
    add_bos = add_bos and bos is not None
    tokenizer_json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _prepend(bos, tokens.texts[bos]) if add_bos and bos is not None else None,
        **parts,
    }
    return Vocabulary(
        tokenizer_json=tokenizer_json,
        chat_template=f.text("tokenizer.chat_template"),
        bos_token_id=bos,
        bos_token=None if bos is None else tokens.texts[bos],
        eos_token=None if eos is None else tokens.texts[eos],
        eos_token_ids=tuple(ends),
        add_bos_token=add_bos,
        add_eos_token=f.boolean("tokenizer.ggml.add_eos_token", False),
        unk_token=_text_of(f, "unknown_token_id", tokens),
        pad_token=_text_of(f, "padding_token_id", tokens),
        generation_config=_generation_config(f, bos, tuple(ends), _token_id(f, "padding_token_id", tokens)),
    )


def _strips_after_specials(f: Fields) -> bool:
    """Phi-3's tokenizer drops white space after a special token; llama.cpp too knows it by the model's name only."""
    name = (f.text("general.name") or "").lower()
    return "phi-3" in name or "phi3" in name


def _added_token(index: int, text: str, *, special: bool, rstrip: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def _prepend(index: int, text: str) -> dict[str, Any]:
    """A post-processor that puts one token before the text, unless special tokens are turned off."""
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }


def _generation_config(f: Fields, bos: int | None, ends: tuple[int, ...], pad: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": list(ends), "pad_token_id": pad}
    for key, (name, low, high) in SAMPLING.items():
        if f.has(f"general.sampling.{key}"):
            config[name] = f.number(f"general.sampling.{key}", low, high)
    if f.has("general.sampling.top_k"):
        config["top_k"] = f.integer("general.sampling.top_k", -1, 2**31 - 1)
    return {name: value for name, value in config.items() if value is not None}
