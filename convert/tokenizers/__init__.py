"""Other tokenizer formats as tokenizer.json, with the same ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mlxinfer.convert.tokenizers import sentencepiece, tiktoken
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.formats.files import read_json_object, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_MODEL_BYTES = 64 << 20
MAX_ADDED = 100_000
FILES = ("tokenizer.model", "spiece.model", "tiktoken.model", "qwen.tiktoken")
WITH_BOS = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "GemmaTokenizerFast")
"""Classes that begin a text with BOS unless tokenizer_config.json says otherwise."""


def tokenizer_json(folder: Path, config: Mapping[str, Any]) -> tuple[bytes | None, str]:
    """(tokenizer.json made from the first of FILES, a note); (None, why not) where that gives other ids.

    Raises ModelFileError for a file that is broken.
    """
    for name in FILES:
        data = read_regular(folder / name, MAX_MODEL_BYTES)
        if data is None:
            continue
        settings = read_json_object(folder / "tokenizer_config.json") or {}
        try:
            table = _table(data, str(folder / name), folder, config, settings)
        except UnsupportedModelError as error:
            return None, f"no tokenizer.json was made: {error}"
        return json.dumps(table, ensure_ascii=False).encode(), f"tokenizer.json was made from {name}"
    return None, ""


def _table(
    data: bytes, where: str, folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    first_line = data[:256].partition(b"\n")[0]
    if first_line.rpartition(b" ")[2].strip().isdigit():
        tokens = tiktoken.read_ranks(data, where)
        parts, kind = tiktoken.tokenizer_parts(tokens, config.get("model_type"), where)
        added = _listed(folder, settings, len(tokens)) or tiktoken.special_tokens(kind, len(tokens))
        bos_id = len(tokens) if kind.pre_tokenizer == "llama-bpe" else None
        bos = next((token["content"] for token in added if token["id"] == bos_id), None)
    else:
        model = sentencepiece.read_model(data, where)
        parts = sentencepiece.tokenizer_parts(model, where)
        added = parts.pop("added_tokens") + _listed(folder, settings, len(model.texts))
        bos_id = model.bos_id if 0 <= model.bos_id < len(model.texts) else None
        bos = None if bos_id is None else model.texts[bos_id]
        if not settings.get("add_bos_token", settings.get("tokenizer_class", WITH_BOS[0]) in WITH_BOS):
            bos = None
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": _begin_with(bos, bos_id), **parts,
    }  # fmt: skip


def _begin_with(text: str | None, index: int | None) -> dict[str, Any] | None:
    if text is None:
        return None
    bos = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing", "single": [bos, first], "pair": [bos, first, second],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }  # fmt: skip


def _listed(folder: Path, settings: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Tokens after the `count` of the file: those of tokenizer_config.json and added_tokens.json, by id.

    Raises UnsupportedModelError where ids leave a gap: the tokenizers package would give them others.
    """
    found: dict[int, dict[str, Any]] = {}
    for text, index in (read_json_object(folder / "added_tokens.json") or {}).items():
        if type(index) is int and index >= count:
            found[index] = sentencepiece.special_token(index, text)
    decoder = settings.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and key.isascii() and key.isdigit():
            index = int(key[:10])
            strips = entry.get("lstrip") is True, entry.get("rstrip") is True
            special = entry.get("special") is True
            if index >= count:
                found[index] = sentencepiece.special_token(index, entry["content"], special=special, strips=strips)
    if len(found) > MAX_ADDED or sorted(found) != list(range(count, count + len(found))):
        raise UnsupportedModelError(
            f"{folder}: the ids in added_tokens.json and tokenizer_config.json don't follow the {count} before them"
        )
    return [found[index] for index in sorted(found)]
