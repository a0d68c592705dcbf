"""2000 fuzzed strings under every pre-tokenizer: the ids of llama.cpp, from the golden of make_fuzz.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tokenizers

from mlxinfer.formats.gguf.pretokenizers import PRE_TOKENIZERS, pre_tokenizer_json
from mlxinfer.formats.gguf.reader import GGUFFile, read_gguf
from mlxinfer.formats.gguf.vocab import read_vocabulary
from tests.parity.fuzz import FIXTURES, checksum, strings, vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"


def _any_case(end: str, digits: str) -> str:
    """llama.cpp takes every letter beyond ASCII for upper and lower case at once, and marks for no letters."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{end}|{start}{_UPPER}+{_LOWER}*{end}|{digits}|{_TAIL}"


_NO_SPACES = "[一-龥ࠀ-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-一"
SIMPLIFIED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_any_case(_END, r"\p{N}{1,3}"),)),
    "tekken": (_any_case("", r"\p{N}"),),
    # All letters are one, whatever their case.
    "kimi-k2": (
        rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!\p{{Han}})\p{{L}})+{_END}|\p{{N}}{{1,3}}|{_TAIL.replace('/', '')}",
    ),
    "youtu": (
        PRE_TOKENIZERS["youtu"].patterns[0],
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_END}|\p{{N}}|{_TAIL}",
    ),
    "superbpe": (r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"),
    # White space beyond ASCII is white space only, though the published range holds U+3000 too.
    **{
        name: tuple(
            p.replace("[一-龥ࠀ-一", _NO_SPACES).replace("\u3000-。", "\u3001-。") for p in PRE_TOKENIZERS[name].patterns
        )
        for name in ("deepseek-llm", "deepseek-coder")
    },
}
"""Where llama.cpp departs from the published pattern that is kept here: what it does instead."""


def ids_of(pre: str) -> list[list[int]]:
    """Of all strings, under llama.cpp's version of the pre-tokenizer. It doesn't compose accents either."""
    metadata: Mapping[str, object] = {"general.architecture": "llama", **vocabulary(pre)}
    file = GGUFFile(Path("fuzz.gguf"), 3, dict(metadata), {})
    found = read_vocabulary(file, 2**20).tokenizer_json
    found["normalizer"] = None
    if pre in SIMPLIFIED:
        kind = replace(PRE_TOKENIZERS[pre], patterns=SIMPLIFIED[pre])
        found["pre_tokenizer"] = pre_tokenizer_json(kind)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(found))
    return [e.ids for e in tokenizer.encode_batch(strings(), add_special_tokens=False)]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_fuzzed_string_has_the_ids_of_llama_cpp(pre: str) -> None:
    with np.load(FIXTURES / "fuzz_tokens.npz", allow_pickle=False) as file:
        names = file["names"].tolist()
        golden = file["checksums"][file["rows"][names.index(pre)]]
    texts = strings()
    assert len(texts) == len(golden) == 2000
    found = ids_of(pre)
    wrong = [t for t, ids, known in zip(texts, found, golden.tolist(), strict=True) if checksum(ids) != known]
    assert not wrong


@pytest.mark.slow
@pytest.mark.model
def test_every_fuzzed_string_has_the_ids_of_llama_cpp_under_gemmas_sentencepiece(gemma_gguf: Path) -> None:
    # Made like the others, with the model's own file in place of the synthetic ones.
    with np.load(FIXTURES / "gemma3_fuzz.npz", allow_pickle=False) as file:
        golden = file["checksums"].tolist()
    gguf = read_gguf(gemma_gguf)
    found = read_vocabulary(gguf, gguf.tensors["token_embd.weight"].shape[0])
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer_json))
    answers = [e.ids for e in tokenizer.encode_batch(strings(), add_special_tokens=False)]
    assert [t for t, ids, known in zip(strings(), answers, golden, strict=True) if checksum(ids) != known] == []
