"""tokenizer.json and its companions as tokenizer.ggml.*, where llama.cpp splits text the same way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gguf.constants import GGUFValueType as Type

from mlxinfer.convert.export.gguf_file import Value, boolean, string, strings, u32
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object
from mlxinfer.formats.gguf.merges import merges_from_scores
from mlxinfer.formats.gguf.pretokenizers import DEFAULT, GPT2, PRE_TOKENIZERS
from mlxinfer.formats.gguf.vocab import BYTE, CONTROL, KEEP_SPACE, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED
from mlxinfer.tokenizer.files import MAX_JSON_BYTES, chat_templates, special_tokens, token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_TOKENS = 2**22
DIGITS = r"\p{N}"
SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
UNMERGED_SCORE = -1e6
"""Of tokens that no merge makes; llama.cpp looks at the scores of merged ones only."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is written, and what the report says about it."""

    metadata: dict[str, Value]
    notes: tuple[str, ...]
    drops_space: bool
    """Special tokens drop the white space after them, which llama.cpp does for Phi-3's vocabulary only."""


class _Files:
    """The tokenizer's files, read and checked as far as this module goes into them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"
        parsed = read_json_object(self.path, MAX_JSON_BYTES)
        if parsed is None:
            raise UnsupportedModelError(f"{folder} has no tokenizer.json; a GGUF file needs its vocabulary")
        self.json = parsed
        self.config = read_json_object(folder / "tokenizer_config.json") or {}
        self.generation = read_json_object(folder / "generation_config.json") or {}
        self.templates = chat_templates(folder, self.config)
        self.model = parsed.get("model")
        if not isinstance(self.model, dict) or self.model.get("type") != "BPE":
            raise self.unknown("model", self.model.get("type") if isinstance(self.model, dict) else self.model)

    def unknown(self, field: str, value: object) -> UnsupportedModelError:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        return UnsupportedModelError(
            f"{self.path}: {field} is {shown:.300}; llama.cpp has no tokenizer that is known to do the same"
        )

    def broken(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}")


@dataclass(frozen=True, slots=True)
class _Tokens:
    texts: list[str]
    types: list[int]
    ids: dict[str, int]


def read_vocabulary(folder: Path, rows: int, config: Mapping[str, Any]) -> Vocabulary:
    """The tokenizer of `folder` for an embedding of `rows` rows; `config` is config.json.

    Raises UnsupportedModelError for a tokenizer whose steps llama.cpp isn't known to have, and ModelFileError for one
    that contradicts itself.
    """
    files = _Files(folder)
    assert isinstance(files.model, dict)
    by_bytes = not files.model.get("byte_fallback")
    tokens = _tokens(files, rows, by_bytes=by_bytes)
    merges = _merges(files, tokens)
    notes: list[str] = []
    if by_bytes:
        metadata = _byte_level(files, tokens, merges, notes)
    else:
        metadata = _sentencepiece(files, tokens, merges)
    metadata |= _special(files, tokens, config)
    _note_spaces(files, tokens, notes)
    if template := files.templates.get("default"):
        metadata["tokenizer.chat_template"] = string(template)
    if len(files.templates) > 1:
        notes.append(f"of {len(files.templates)} chat templates the default one is kept")
    return Vocabulary(metadata, tuple(notes), _drops_space(files, tokens))


def _drops_space(files: _Files, tokens: _Tokens) -> bool:
    """As Phi-3's do, whose three exceptions llama.cpp takes for granted."""
    added = [t for t in files.json.get("added_tokens") or [] if t.get("special")]
    return bool(added) and tokens.ids.keys() >= KEEP_SPACE and any(t.get("rstrip") for t in added)


def _note_spaces(files: _Files, tokens: _Tokens, notes: list[str]) -> None:
    added = [t for t in files.json.get("added_tokens") or [] if t.get("special")]
    before = any(t.get("lstrip") for t in added)
    after = any(t.get("rstrip") for t in added) and not _drops_space(files, tokens)
    if before or after:
        notes.append("the tokenizer drops white space beside some special tokens, llama.cpp keeps it")


def _tokens(files: _Files, rows: int, *, by_bytes: bool) -> _Tokens:
    assert isinstance(files.model, dict)
    vocabulary, added = files.model.get("vocab"), files.json.get("added_tokens") or []
    if not isinstance(vocabulary, dict) or not isinstance(added, list) or len(vocabulary) > MAX_TOKENS:
        raise files.broken(f"model.vocab and added_tokens must list at most {MAX_TOKENS} tokens")
    texts: list[str | None] = [None] * rows
    types = [UNUSED] * rows

    def place(text: object, index: object, kind: int) -> None:
        if not isinstance(text, str) or type(index) is not int or not 0 <= index < rows:
            raise files.broken(f"the token {text!r:.60} has the id {index!r:.30}; the embedding has {rows} rows")
        texts[index], types[index] = text, kind

    for text, index in vocabulary.items():
        place(text, index, NORMAL if by_bytes else _sentencepiece_type(text, files))
    for entry in added:
        if not isinstance(entry, dict):
            raise files.broken(f"added_tokens holds {entry!r:.60}; an object is expected")
        text = entry.get("content")
        kind = CONTROL if entry.get("special") else USER_DEFINED
        unknown = not by_bytes and text == files.model.get("unk_token")
        if not by_bytes and kind == USER_DEFINED and isinstance(text, str):
            text = text.replace(SPACE, " ")
        place(text, entry.get("id"), UNKNOWN if unknown else kind)
    filled = [f"[PAD{i}]" if text is None else text for i, text in enumerate(texts)]
    ids = {text: i for i, text in enumerate(filled)}
    if len(ids) != rows:
        double = next(text for i, text in enumerate(filled) if ids[text] != i)
        raise files.broken(f"two ids stand for {double!r:.60}")
    return _Tokens(filled, types, ids)


def _sentencepiece_type(text: str, files: _Files) -> int:
    assert isinstance(files.model, dict)
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return BYTE
    return UNKNOWN if text == files.model.get("unk_token") else NORMAL


def _merges(files: _Files, tokens: _Tokens) -> list[tuple[str, str]]:
    assert isinstance(files.model, dict)
    listed = files.model.get("merges")
    if not isinstance(listed, list):
        raise files.broken("model.merges is missing")
    pairs: list[tuple[str, str]] = []
    for merge in listed:
        left, right = merge.split(" ", 1) if isinstance(merge, str) and " " in merge else _pair(merge)
        if not isinstance(left, str) or not isinstance(right, str) or left + right not in tokens.ids:
            raise files.broken(f"the merge {merge!r:.80} makes no token")
        pairs.append((left, right))
    return pairs


def _pair(merge: object) -> tuple[object, object]:
    return (merge[0], merge[1]) if isinstance(merge, list) and len(merge) == 2 else (None, None)


def _byte_level(files: _Files, tokens: _Tokens, merges: list[tuple[str, str]], notes: list[str]) -> dict[str, Value]:
    assert isinstance(files.model, dict)
    normalizer = files.json.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        raise files.unknown("normalizer", normalizer)
    nfc = normalizer == {"type": "NFC"}
    if nfc:
        notes.append("the tokenizer composes accents (NFC) first, llama.cpp doesn't: text in other forms differs")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if files.model.get(option):
            raise files.unknown(f"model.{option}", files.model[option])
    whole = bool(files.model.get("ignore_merges"))
    patterns = _patterns(files)
    names = {name: kind for name, kind in PRE_TOKENIZERS.items() if kind.patterns == patterns}
    exact = [name for name, kind in names.items() if kind.ignore_merges == whole]
    if not exact and names and _all_reachable(tokens, merges):
        exact = list(names)  # every token comes about by merges, so that taking words whole changes nothing
    if not exact:
        raise files.unknown("pre_tokenizer", files.json.get("pre_tokenizer"))
    pre = next((name for name in exact if PRE_TOKENIZERS[name].nfc == nfc), exact[0])
    # A space inside a part is written as its byte's own character, so that one space divides the parts.
    written = [f"{left} {right}" for left, right in merges]
    return {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string(pre),
        "tokenizer.ggml.tokens": strings(tokens.texts),
        "tokenizer.ggml.token_type": Value(Type.INT32, tokens.types),
        "tokenizer.ggml.merges": strings(written),
    }


def _patterns(files: _Files) -> tuple[str, ...]:
    """The regular expressions one after the other, each inside the pieces of the last."""
    step = files.json.get("pre_tokenizer")
    steps = step.get("pretokenizers") if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    found: list[str] = []
    for item in steps if isinstance(steps, list) else [steps]:
        if not isinstance(item, dict):
            raise files.unknown("pre_tokenizer", step)
        kind = item.get("type")
        if kind == "Split" and item.get("behavior") == "Isolated" and not item.get("invert"):
            pattern = item.get("pattern")
            found.append(pattern.get("Regex", "") if isinstance(pattern, dict) else "")
        elif kind == "Digits" and item.get("individual_digits"):
            found.append(DIGITS)
        elif kind == "Punctuation" and item.get("behavior") == "Contiguous" and not found:
            found.append(DEFAULT[0])
        elif kind == "ByteLevel" and not item.get("add_prefix_space"):
            found += [GPT2] if item.get("use_regex", True) else []
        else:
            raise files.unknown("pre_tokenizer", step)
    return tuple(found)


def _all_reachable(tokens: _Tokens, merges: list[tuple[str, str]]) -> bool:
    """Whether merging the characters of each token gives that token."""
    from tokenizers.models import BPE

    normal = {text: i for text, i in tokens.ids.items() if tokens.types[i] == NORMAL}
    if not all(part in normal for left, right in merges for part in (left, right, left + right)):
        return False
    model = BPE(vocab=normal, merges=merges)
    return all(len(model.tokenize(text)) == 1 for text in normal)


def _sentencepiece(files: _Files, tokens: _Tokens, merges: list[tuple[str, str]]) -> dict[str, Value]:
    prefix = _space_prefix(files)
    scores = _scores(tokens, merges)
    # llama.cpp joins whatever two neighbours make a token, so the merges must be all there are, in the scores' order.
    made = merges_from_scores(tokens.ids, tokens.types, scores, str(files.path))
    if set(made) != set(merges) or not _grouped(merges):
        raise files.unknown("model.merges", f"{len(merges)} merges that no scores of sentencepiece give")
    return {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("default"),
        "tokenizer.ggml.tokens": strings(tokens.texts),
        "tokenizer.ggml.scores": Value(Type.FLOAT32, scores),
        "tokenizer.ggml.token_type": Value(Type.INT32, tokens.types),
        "tokenizer.ggml.add_space_prefix": boolean(prefix),
    }


def _scores(tokens: _Tokens, merges: list[tuple[str, str]]) -> list[float]:
    """The earlier a merge, the better its result; exact in float32 up to 2^24 results."""
    scores = [UNMERGED_SCORE] * len(tokens.texts)
    order = dict.fromkeys(left + right for left, right in merges)
    for rank, text in enumerate(order):
        scores[tokens.ids[text]] = float(-rank)
    return scores


def _grouped(merges: list[tuple[str, str]]) -> bool:
    """The merges that make one token stand together."""
    results = [left + right for left, right in merges]
    changes = sum(a != b for a, b in pairwise(results)) + bool(results)
    return changes == len(set(results))


def _space_prefix(files: _Files) -> bool:
    """Whether a space is put before the text. Raises for steps that aren't sentencepiece's."""
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    normalizer, step = files.json.get("normalizer"), files.json.get("pre_tokenizer")
    if isinstance(step, dict) and step.get("type") == "Metaspace" and not step.get("split", True):
        if normalizer is not None or step.get("replacement") != SPACE:
            raise files.unknown("normalizer", normalizer)
        return step.get("prepend_scheme", "always") != "never"
    at_spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if step not in (None, at_spaces):  # no spaces are left for it to split at
        raise files.unknown("pre_tokenizer", step)
    if normalizer == to_mark:
        return False
    if normalizer == {"type": "Sequence", "normalizers": [prepend, to_mark]}:
        return True
    raise files.unknown("normalizer", normalizer)


def _special(files: _Files, tokens: _Tokens, config: Mapping[str, Any]) -> dict[str, Value]:
    """Special ids, and whether BOS and EOS are put around a text."""
    assert isinstance(files.model, dict)
    named = {"unk_token": files.model.get("unk_token") or "", **special_tokens(files.config)}
    found: dict[str, int] = {}
    for name, key in SPECIAL_IDS.items():
        listed = [i for source in (files.generation, config) for i in token_ids(source.get(f"{name}_id"))]
        index = tokens.ids.get(named.get(name, ""), next((i for i in listed if 0 <= i < len(tokens.texts)), None))
        if index is not None:
            found[key] = index
    ends = [i for source in (files.generation, config) for i in token_ids(source.get("eos_token_id"))]
    others = [i for i in ends if i != found.get("eos_token_id") and 0 <= i < len(tokens.texts)]
    if others:
        found["eot_token_id"] = others[0]
    metadata = {f"tokenizer.ggml.{key}": u32(index) for key, index in found.items()}
    before, after = _around(files)
    for name, put in (("bos", before), ("eos", after)):
        if put and (len(put) > 1 or tokens.ids.get(put[0]) != found.get(f"{name}_token_id")):
            raise files.unknown("post_processor", put)
        metadata[f"tokenizer.ggml.add_{name}_token"] = boolean(bool(put))
    return metadata


def _around(files: _Files) -> tuple[list[str], list[str]]:
    """The special tokens before and after a text."""
    step = files.json.get("post_processor")
    steps = step.get("processors") if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    before: list[str] = []
    after: list[str] = []
    for item in steps if isinstance(steps, list) else [steps]:
        kind = item.get("type") if isinstance(item, dict) else None
        if item is None or kind == "ByteLevel":
            continue
        if kind != "TemplateProcessing" or not isinstance(item.get("single"), list):
            raise files.unknown("post_processor", step)
        side = before
        for part in item["single"]:
            if isinstance(part, dict) and "SpecialToken" in part:
                token = part["SpecialToken"]
                side.append(str(token.get("id") if isinstance(token, dict) else token))
            else:
                side = after
    return before, after
