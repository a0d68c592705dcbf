"""Tokenizers made from tiktoken files, against a plain implementation of tiktoken's rule."""

from __future__ import annotations

import base64
import itertools
import random
import unicodedata
from typing import TYPE_CHECKING

import pytest
import tokenizers

from mlxinfer.convert.tokenizers import tokenizer_json
from mlxinfer.errors import ModelFileError
from mlxinfer.formats.gguf.merges import every_split
from mlxinfer.formats.gguf.pretokenizers import LLAMA3, QWEN2

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = (
    "the quick brown fox aa aaa aaaa banana mississippi 1234 12 3.14 naïve 你好 don't I'LL  x\n\n y\t🙂 e\u0301 " * 3
)


def ranks() -> list[bytes]:
    """The bytes in a shuffled order, then the commonest pair again and again, as BPE is trained."""
    rng = random.Random(0)
    tokens = [bytes([i]) for i in range(256)]
    rng.shuffle(tokens)
    known = set(tokens)
    words = [[bytes([b]) for b in word.encode()] for word in CORPUS.split(" ")]
    words += [[b" ", *word] for word in words]
    while len(tokens) < 420:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        pair = max(counts, key=lambda p: (counts[p], p), default=None)
        if pair is None:
            break
        if (joined := b"".join(pair)) not in known:
            known.add(joined)
            tokens.append(joined)
        words = [joined_pairs(word, pair) for word in words]
    return tokens


def joined_pairs(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def reference(text: str, tokens: list[bytes], pattern: str) -> list[int]:
    """A word that is a token is one; else the neighbours of the lowest joint rank are joined, the first first."""
    import regex

    table = {token: i for i, token in enumerate(tokens)}
    ids: list[int] = []
    for word in regex.findall(pattern, text):
        parts = [bytes([b]) for b in word.encode()]
        if word.encode() in table:
            parts = [word.encode()]
        while True:
            joints = [(table.get(a + b, len(table)), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            rank, at = min(joints, default=(len(table), 0))
            if rank == len(table):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [table[part] for part in parts]
    return ids


def written(path: Path, tokens: list[bytes]) -> None:
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))


@pytest.mark.parametrize(
    ("model_type", "name", "pattern"), [("llama", "tokenizer.model", LLAMA3), ("qwen", "qwen.tiktoken", QWEN2)]
)
def test_ids_are_those_of_tiktoken(tmp_path: Path, model_type: str, name: str, pattern: str) -> None:
    tokens = ranks()
    written(tmp_path / name, tokens)
    table, note = tokenizer_json(tmp_path, {"model_type": model_type})
    assert table is not None
    assert name in note
    tokenizer = tokenizers.Tokenizer.from_str(table.decode())
    rng = random.Random(1)
    words = CORPUS.split(" ")
    for _ in range(2000):
        text = "".join(
            rng.choice(words) + rng.choice(["", " ", "  ", "\n", "a" * rng.randint(1, 9), chr(rng.randint(33, 0x2FFF))])
            for _ in range(rng.randint(1, 8))
        )
        expected = unicodedata.normalize("NFC", text) if model_type == "qwen" else text
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference(expected, tokens, pattern)


def test_special_tokens_follow_the_ranks(tmp_path: Path) -> None:
    tokens = ranks()
    written(tmp_path / "tokenizer.model", tokens)
    table, _ = tokenizer_json(tmp_path, {"model_type": "llama"})
    assert table is not None
    tokenizer = tokenizers.Tokenizer.from_str(table.decode())
    assert tokenizer.encode("fox<|eot_id|>").ids[0] == len(tokens)
    assert tokenizer.token_to_id("<|eot_id|>") == len(tokens) + 9
    assert tokenizer.get_vocab_size() == len(tokens) + 256


def test_other_models_are_left_with_a_reason(tmp_path: Path) -> None:
    written(tmp_path / "tiktoken.model", ranks())
    table, note = tokenizer_json(tmp_path, {"model_type": "kimi_k2"})
    assert table is None
    assert "kimi_k2" in note


@pytest.mark.parametrize(
    "lines",
    [b"!!!! 0\n", b"YQ== x 0\n", b"YQ== 5\n", b"YQ== 0\nYg== 0\n", b"YQ== 0\nYQ== 1\n", b"YQ== 0\n", b"YQ== -1\n 0\n"],
)
def test_broken_files_are_errors_that_name_file(tmp_path: Path, lines: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(lines)
    with pytest.raises(ModelFileError, match=r"tokenizer\.model"):
        tokenizer_json(tmp_path, {"model_type": "llama"})


def test_a_vocabulary_of_runs_is_an_error_before_it_fills_the_memory() -> None:
    runs = [letter * length for letter in "abc" for length in range(1, 513)]
    with pytest.raises(ModelFileError, match=r"^model: its tokens split into others in too many ways"):
        every_split(runs, {text: i for i, text in enumerate(runs)}, "model")
