"""A sentencepiece model (tokenizer.model) as tokenizer.json, BPE or unigram, with the ids sentencepiece gives.

Facts of the format are those of sentencepiece_model.proto. Refused, since no tokenizer.json has the same ids: unused
pieces in BPE, white space as a suffix, word and character models.
"""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass, field
from typing import Any

from mlxinfer.convert.tokenizers.protobuf import Value, fields
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf.merges import merges_from_scores

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
SPACE = "▁"
BYTE_CHARACTERS = frozenset("<0x>123456789ABCDEF")
"""A text may spell a byte piece, such as <0x41>, which is no piece of it. Where one of these is unknown, the spelling
is dearer than the byte piece; no piece has that character, so the text is split there and nothing else changes."""
MAX_PIECES = 1_000_000
MAX_PIECE_CHARACTERS = 512


@dataclass(slots=True)
class Model:
    """What the file says, with the defaults of the format."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    space_as_suffix: bool = False
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True


_TRAINER = {3: "kind", 24: "space_as_suffix", 35: "byte_fallback", 41: "bos_id", 42: "eos_id"}
_NORMALIZER = {2: "charsmap", 3: "dummy_prefix", 4: "remove_extra_spaces", 5: "escape_spaces"}


def read_model(data: bytes, where: str) -> Model:
    """Raises ModelFileError for a file that is broken, with pieces that are doubled, empty, no text or too many."""
    model = Model()
    for number, value in fields(data, where):
        if number == 1 and isinstance(value, bytes):
            _add_piece(model, value, where)
        elif number in (2, 3) and isinstance(value, bytes):
            _set_fields(model, value, _TRAINER if number == 2 else _NORMALIZER, where)
    if not model.texts:
        raise ModelFileError(f"{where} has no pieces; it is no sentencepiece model")
    if len(set(model.texts)) != len(model.texts):
        double = next(text for text in model.texts if model.texts.count(text) > 1)
        raise ModelFileError(f"{where} has the piece {double!r:.80} twice")
    return model


def _set_fields(model: Model, data: bytes, names: dict[int, str], where: str) -> None:
    for number, value in fields(data, where):
        if (name := names.get(number)) is None:
            continue
        old: Value = getattr(model, name)
        if isinstance(value, bytes) != isinstance(old, bytes) or isinstance(value, float):
            raise ModelFileError(f"{where}: its {name} is of another type")
        if isinstance(value, int):
            # Negative numbers are written as 64-bit ones.
            value = bool(value) if isinstance(old, bool) else value - (1 << 64) * (value >> 63)
        setattr(model, name, value)


def _add_piece(model: Model, data: bytes, where: str) -> None:
    text, score, kind = b"", 0.0, NORMAL
    for number, value in fields(data, where):
        if number == 1 and isinstance(value, bytes):
            text = value
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    index = len(model.texts)
    try:
        piece = text.decode()
    except UnicodeDecodeError:
        raise ModelFileError(f"{where}: piece {index} is no UTF-8") from None
    if not piece or len(piece) > MAX_PIECE_CHARACTERS or index >= MAX_PIECES or not math.isfinite(score):
        raise ModelFileError(
            f"{where}: piece {index} has {len(piece)} characters and the score {score}; 1 to {MAX_PIECE_CHARACTERS} "
            f"characters, a finite score and at most {MAX_PIECES} pieces are expected"
        )
    model.texts.append(piece)
    model.scores.append(score)
    model.types.append(kind)


def tokenizer_parts(model: Model, where: str) -> dict[str, Any]:
    """normalizer, pre_tokenizer, decoder, model and added_tokens of a tokenizer.json.

    Raises UnsupportedModelError where no tokenizer.json gives the same ids.
    """
    _check_supported(model, where)
    kinds = list(enumerate(zip(model.texts, model.types, strict=True)))
    user_defined = [(i, text) for i, (text, kind) in kinds if kind == USER_DEFINED]
    added = [special_token(i, text) for i, (text, kind) in kinds if kind in (CONTROL, UNKNOWN)]
    splits = False
    unknown = sorted(BYTE_CHARACTERS - set(model.texts)) if model.kind == UNIGRAM and model.byte_fallback else []
    if model.kind == BPE and user_defined:
        # They are looked for in normalized text. The normalizer is applied to the tokens too, so it must keep them.
        splits = model.dummy_prefix or model.remove_extra_spaces or bool(model.charsmap)
        if not splits:
            added += [special_token(i, text, special=False) | {"normalized": True} for i, text in user_defined]
    return {
        "normalizer": _normalizer(model),
        "pre_tokenizer": _split_at([text for _, text in user_defined] if splits else unknown),
        "decoder": _decoder(model),
        "model": _bpe(model, where, whole=splits) if model.kind == BPE else _unigram(model, where),
        "added_tokens": sorted(added, key=lambda token: token["id"]),
    }


def _check_supported(model: Model, where: str) -> None:
    problems = {
        f"a model of type {model.kind}": model.kind not in (UNIGRAM, BPE),
        "white space as a suffix": model.space_as_suffix,
        "spaces that are not escaped": not model.escape_spaces,
        "unused pieces": UNUSED in model.types,
        "characters in its pieces that are no pieces": not _covered(model),
    }
    for problem, found in problems.items():
        if found:
            raise UnsupportedModelError(f"{where} has {problem}, which no tokenizer.json gives the same ids for")


def _covered(model: Model) -> bool:
    """Whether every character of a normal piece is a piece: sentencepiece starts from characters that are none too."""
    known = set(model.texts)
    pieces = (text for text, kind in zip(model.texts, model.types, strict=True) if kind == NORMAL)
    return all(character in known for text in pieces for character in text)


def special_token(index: int, text: str, *, special: bool = True, strips: tuple[bool, bool] = (False, False)) -> Any:
    return {
        "id": index, "content": text, "single_word": False, "lstrip": strips[0], "rstrip": strips[1],
        "normalized": False, "special": special,
    }  # fmt: skip


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _normalizer(model: Model) -> dict[str, Any]:
    """Its rules, then spaces: extra ones removed, one put in front, all marked."""
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_extra_spaces:
        steps += [_replace({"Regex": r"\A +"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if model.dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(_replace({"String": " "}, SPACE))
    if model.remove_extra_spaces:
        # Marks in the text itself go too when they stand at the end.
        steps.append(_replace({"Regex": rf"{SPACE}+\z"}, ""))
    return {"type": "Sequence", "normalizers": steps}


def _split_at(texts: list[str]) -> dict[str, Any] | None:
    """Texts that always stay whole: the longest wins, as in sentencepiece. They are looked for in normalized text."""
    if not texts:
        return None
    pattern = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _decoder(model: Model) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _bpe(model: Model, where: str, *, whole: bool) -> dict[str, Any]:
    """`whole`: a run of text that is a piece is taken as one, which the pieces that stay whole need."""
    ids = {text: i for i, text in enumerate(model.texts)}
    return {
        "type": "BPE", "dropout": None, "unk_token": _unknown(model, where), "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": model.byte_fallback, "ignore_merges": whole,
        "vocab": ids, "merges": merges_from_scores(ids, model.types, model.scores, where),
    }  # fmt: skip


def _unigram(model: Model, where: str) -> dict[str, Any]:
    normal = [score for score, kind in zip(model.scores, model.types, strict=True) if kind == NORMAL]
    if not normal:
        raise ModelFileError(f"{where} has no normal pieces")
    # Never the best way through a text. It makes what is unknown dearer, which is without effect: where a character is
    # no piece, no other piece has it either (see `_covered`).
    never = min(normal) - 1000
    vocab: list[tuple[str, float]] = []
    for text, score, kind in zip(model.texts, model.scores, model.types, strict=True):
        if kind == USER_DEFINED:
            # sentencepiece's own weight for them, which is better than any logarithm of a probability below 0.9.
            score = -0.1
        elif kind != NORMAL:
            score = never
        vocab.append((text, score))
    unknown = _unknown(model, where)
    return {
        "type": "Unigram", "unk_id": None if unknown is None else model.texts.index(unknown), "vocab": vocab,
        "byte_fallback": model.byte_fallback,
    }  # fmt: skip


def _unknown(model: Model, where: str) -> str | None:
    if model.types.count(UNKNOWN) > 1:
        raise ModelFileError(f"{where} has more than one unknown piece")
    return model.texts[model.types.index(UNKNOWN)] if UNKNOWN in model.types else None
