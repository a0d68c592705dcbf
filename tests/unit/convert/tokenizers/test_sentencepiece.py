"""Tokenizers made from sentencepiece models, against sentencepiece itself, on models trained on the spot."""

from __future__ import annotations

import io
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
import tokenizers

from mlxinfer.convert.tokenizers import tokenizer_json
from mlxinfer.convert.tokenizers.sentencepiece import read_model
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = (
    "the quick brown fox jumps over a lazy dog while seven wizards box sphinx of black quartz judge my vow "
    "aa aaa aaaa abab ababab banana bananas mississippi naïve café Straße übergrößen 1234 2024 3.14 foo_bar() "
    "if x==y: return {'a':1} новый мир 你好世界 こんにちは 안녕하세요 e\u0301 \ufb01ne \u00bd \u2163 \uff21\uff22\uff23"
)
WORDS = TEXT.split()
ODD = ["▁", "▁▁", "\t", "\n", "\r\n", "\0", "  ", "   ", "🙂", "👩\u200d👩\u200d👧", "é", "e\u0301", "<0x41>", "\ufb03",
       "\u200b", "\u3000", "\u00bd"]  # fmt: skip


def train(**options: Any) -> bytes:
    rng = random.Random(0)
    lines = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))) for _ in range(1500)]
    lines += [line.replace(" ", "  ") for line in lines[:100]]
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=writer, vocab_size=options.pop("vocab_size", 450),
        hard_vocab_limit=False, character_coverage=options.pop("character_coverage", 1.0), minloglevel=2, **options,
    )  # fmt: skip
    return writer.getvalue()


def texts(count: int = 2000, specials: tuple[str, ...] = ()) -> list[str]:
    rng = random.Random(1)
    alphabet = "ab aa e né ßxyz019_.,:;'\"(){}[]<>/\\|новыймир你好世界" + "".join(specials)
    out = ["", " ", "  ", "▁", " ▁ ", "a", " a", "a ", "\n", *ODD, *specials]
    while len(out) < count:
        pieces: list[str] = []
        for _ in range(rng.randint(1, 9)):
            kind = rng.random()
            if kind < 0.45:
                pieces.append(rng.choice(WORDS))
            elif kind < 0.6:
                pieces.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 8))))
            elif kind < 0.75:
                pieces.append(rng.choice(ODD))
            elif kind < 0.85:
                pieces.append("".join(rng.choice("ab") for _ in range(rng.randint(2, 14))))
            else:
                pieces.append(
                    rng.choice(specials) if specials else chr(rng.choice([0x100, 0x4E00, 0x1F600]) + rng.randint(0, 80))
                )
            pieces.append(rng.choice(["", " ", " ", "  "]))
        out.append("".join(pieces))
    # Control symbols in a text are one token for a tokenizer.json and plain characters for sentencepiece.
    return [t for t in out if "<s>" not in t and "</s>" not in t and "<unk>" not in t]


def made(folder: Path, data: bytes, **settings: Any) -> tokenizers.Tokenizer:
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    table, note = tokenizer_json(folder, {"model_type": "llama"})
    assert note == "tokenizer.json was made from tokenizer.model"
    assert table is not None
    return tokenizers.Tokenizer.from_str(table.decode())


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False, "split_digits": True, "allow_whitespace_only_pieces": True},
    "gemma": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True,
              "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n", "▁▁", "▁▁▁", "[@BOS@]", "qu"]},
    "user-defined and a prefix": {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True,
              "remove_extra_whitespaces": False, "user_defined_symbols": ["<|user|>", "(.*)", "ab"]},
    "bpe without bytes": {"model_type": "bpe", "normalization_rule_name": "identity", "character_coverage": 0.98},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity", "character_coverage": 0.98},
    "unigram with bytes": {"model_type": "unigram", "normalization_rule_name": "identity", "byte_fallback": True,
              "remove_extra_whitespaces": False, "vocab_size": 700},
    "unigram with user-defined": {"model_type": "unigram", "normalization_rule_name": "identity",
              "user_defined_symbols": ["<|user|>", "ab"]},
    "unigram nmt_nfkc": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "bpe nfkc": {"model_type": "bpe", "normalization_rule_name": "nfkc", "byte_fallback": True},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, name: str) -> None:
    options = dict(MODELS[name])
    specials = tuple(s for s in options.get("user_defined_symbols", ()))
    data = train(**options)
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = made(tmp_path, data)
    inputs = texts(specials=specials)
    ours = [encoding.ids for encoding in tokenizer.encode_batch(inputs, add_special_tokens=False)]
    wrong = [
        (text, ids, right) for text, ids in zip(inputs, ours, strict=True) if ids != (right := reference.encode(text))
    ]
    assert not wrong, f"{len(wrong)} of {len(inputs)}: {wrong[:3]}"


def test_decoding_gives_the_text_back(tmp_path: Path) -> None:
    data = train(**MODELS["llama"])
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = made(tmp_path, data)
    for text in texts(300):
        ids = reference.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@pytest.mark.parametrize(
    ("settings", "begins"),
    [({}, True), ({"add_bos_token": False}, False), ({"tokenizer_class": "T5Tokenizer"}, False),
     ({"tokenizer_class": "T5Tokenizer", "add_bos_token": True}, True)],
)  # fmt: skip
def test_a_text_begins_with_bos_where_the_config_says_so(
    tmp_path: Path, settings: dict[str, Any], begins: bool
) -> None:
    tokenizer = made(tmp_path, train(**MODELS["llama"]), **settings)
    assert (tokenizer.encode("fox").ids[0] == 1) is begins


def test_added_tokens_follow_the_pieces(tmp_path: Path) -> None:
    data = train(**MODELS["llama"])
    count = sentencepiece.SentencePieceProcessor(model_proto=data).vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": count}))
    listed = {str(count + 1): {"content": "<|end|>", "special": True, "rstrip": True}}
    tokenizer = made(tmp_path, data, added_tokens_decoder=listed)
    assert tokenizer.encode("fox<pad><|end|>", add_special_tokens=False).ids[-2:] == [count, count + 1]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": count + 7}))
    table, note = tokenizer_json(tmp_path, {})
    assert table is None
    assert "don't follow" in note


@pytest.mark.parametrize(
    ("options", "reason"), [({"model_type": "char"}, "type 4"), ({"treat_whitespace_as_suffix": True}, "suffix")]
)
def test_models_that_cannot_have_the_same_ids_are_left_with_a_reason(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train(**options))
    table, note = tokenizer_json(tmp_path, {})
    assert table is None
    assert note.startswith("no tokenizer.json was made")
    assert reason in note


def test_broken_models_are_errors_that_name_the_file() -> None:
    data = train(**MODELS["llama"])
    rng = random.Random(2)
    for _ in range(1000):
        damaged = bytearray(data[: rng.randint(0, len(data))] if rng.random() < 0.5 else data)
        for _ in range(rng.randint(0, 4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            read_model(bytes(damaged), "x/tokenizer.model")
        except ModelFileError as error:
            assert str(error).startswith("x/tokenizer.model")  # noqa: PT017
    for broken, message in ((b"", "no pieces"), (b"\xff" * 20, "has no end"), (b"\x0a\xff\x7f", "truncated")):
        with pytest.raises(ModelFileError, match=message):
            read_model(broken, "x")
