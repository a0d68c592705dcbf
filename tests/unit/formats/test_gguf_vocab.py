"""The tokenizer that comes out of a GGUF file's metadata."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
import tokenizers

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import load_gguf
from tests.unit.formats.gguf_files import Blueprint, auto, bpe_vocabulary, tiny_model, typed

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.formats.gguf import GGUFModel

TRICKY = [
    "", " ", "  ", "hello", " hello", "hello ", "hello  world", "low lower lowest newest widest", "aaaaaaaaa",
    "the\nlow\n\nest",
    "\t", "naïve", "日本語", "😀😀", "\x00", "wide.widest,low;new", "a b c", "l o w e r", "thethethe", "es est st t",
    "▁", "<0x41>",
]  # fmt: skip


def load(plan: Blueprint, folder: Path) -> GGUFModel:
    return load_gguf(plan.write(folder / "m.gguf"), dtype=None)


def tokenizer_of(model: GGUFModel) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(model.tokenizer_json))


def with_vocabulary(values: dict[str, Any]) -> Blueprint:
    plan = tiny_model("llama")
    plan.metadata = [(k, v) for k, v in plan.metadata if not k.startswith("tokenizer.")]
    for key, value in values.items():
        plan.set(key, auto(value))
    return plan


def test_byte_level_bpe_follows_the_listed_merges(tmp_path: Path) -> None:
    model = load(tiny_model("llama"), tmp_path)
    tokenizer = tokenizer_of(model)
    tokens = bpe_vocabulary()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("hello world", add_special_tokens=True).ids
    assert [tokens[i] for i in ids] == ["hello", "Ġworld"]
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_and_user_defined_tokens_are_found_in_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(load(tiny_model("llama"), tmp_path))
    ids = tokenizer.encode("<|im_start|>hello<tool><|im_end|>").ids
    assert ids == [1, 262, 268, 2]
    # A user-defined token is text, a control token is not.
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<tool>"


def test_template_and_special_ids_come_out_of_the_metadata(tmp_path: Path) -> None:
    model = load(tiny_model("llama"), tmp_path)
    assert model.chat_template == "{{ messages[0].content }}"
    assert (model.bos_token, model.eos_token, model.add_bos_token) == ("<|im_start|>", "<|im_end|>", False)
    # <|endoftext|> ends a reply too, though the file names <|im_end|> only.
    assert model.eos_token_ids == (2, 0)
    assert model.config["eos_token_id"] == [2, 0]


def test_end_of_turn_and_message_ids_end_a_reply(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("tokenizer.ggml.eot_token_id", auto(100))
    plan.set("tokenizer.ggml.eom_token_id", auto(101))
    assert load(plan, tmp_path).eos_token_ids == (2, 100, 101, 0)


def test_bos_is_added_when_the_file_says_so_or_its_tokenizer_always_does(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("tokenizer.ggml.add_bos_token", auto(True))
    model = load(plan, tmp_path)
    assert model.add_bos_token
    assert tokenizer_of(model).encode("hello").ids == [1, 262]
    assert tokenizer_of(model).encode("hello", add_special_tokens=False).ids == [262]
    assert load(tiny_model("llama", pre="llama-bpe"), tmp_path).add_bos_token
    assert not load(tiny_model("llama", pre="qwen2"), tmp_path).add_bos_token


def test_sampling_defaults_of_the_file_are_kept(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("general.sampling.temp", auto(0.5))
    plan.set("general.sampling.top_k", auto(20))
    config = load(plan, tmp_path).generation_config
    assert config == {"bos_token_id": 1, "eos_token_id": [2, 0], "temperature": 0.5, "top_k": 20}


def test_an_unknown_pre_tokenizer_is_an_error_and_no_guess(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre is 'klingon'.*llama-bpe"):
        load(tiny_model("llama", pre="klingon"), tmp_path)


def test_an_unknown_tokenizer_model_is_an_error(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("tokenizer.ggml.model", auto("rwkv"))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.model is 'rwkv'"):
        load(plan, tmp_path)


BAD: dict[str, tuple[str, Any, str]] = {
    "no tokens": ("tokenizer.ggml.tokens", ["a"] * 300, "300 tokens"),
    "tokens of numbers": ("tokenizer.ggml.tokens", [1, 2], "list of str"),
    "a doubled token": ("tokenizer.ggml.tokens", [*"ab", *(f"t{i}" for i in range(266)), "a"], "'a' twice"),
    "too few types": ("tokenizer.ggml.token_type", [1, 1], "2 entries for 269"),
    "a merge of no tokens": ("tokenizer.ggml.merges", ["h e", "x q"], "'x q'"),
    "a merge without a space": ("tokenizer.ggml.merges", ["he"], "'he'"),
    "bos past the end": ("tokenizer.ggml.bos_token_id", 269, "bos_token_id"),
    "a template that is a number": ("tokenizer.chat_template", 5, "chat_template"),
    "add_bos as a number": ("tokenizer.ggml.add_bos_token", 1, "add_bos_token"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_vocabulary_that_contradicts_itself_is_an_error(tmp_path: Path, case: str) -> None:
    key, value, named = BAD[case]
    plan = tiny_model("llama")
    plan.set(key, auto(value))
    with pytest.raises(ModelFileError, match=named):
        load(plan, tmp_path)


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_vocabulary_without_tokens_or_merges_is_an_error(tmp_path: Path, key: str) -> None:
    plan = with_vocabulary({k: v for k, v in bpe_vocabulary().items() if k != f"tokenizer.ggml.{key}"})
    with pytest.raises(ModelFileError, match=f"{key} is missing"):
        load(plan, tmp_path)


def test_ids_of_none_are_no_ids(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("tokenizer.ggml.bos_token_id", typed(4, 2**32 - 1))
    plan.set("tokenizer.ggml.add_bos_token", auto(True))
    model = load(plan, tmp_path)
    assert model.bos_token is None
    assert not model.add_bos_token


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A byte-fallback BPE of 352 pieces, two of them defined by the user."""
    lines = [t for t in TRICKY if t.strip()] + ["the lowest of the newest and the widest hello world"] * 20
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=352, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, character_coverage=0.99, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False, user_defined_symbols=["<turn>", "[x]"],
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def spm_values(sp: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """What llama.cpp's converter writes for a sentencepiece model."""
    ids = range(sp.get_piece_size())

    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return 2
        if sp.is_control(i):
            return 3
        if sp.is_byte(i):
            return 6
        return 4 if sp.id_to_piece(i) in ("<turn>", "[x]") else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(sp.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
    }


def spm_plan(values: dict[str, Any]) -> Blueprint:
    plan = tiny_model("llama", rows=len(values["tokenizer.ggml.tokens"]))
    plan.metadata = [(k, v) for k, v in plan.metadata if not k.startswith("tokenizer.")]
    for key, value in values.items():
        plan.set(key, auto(value))
    return plan


def test_sentencepiece_ids_are_those_of_sentencepiece(
    tmp_path: Path, trained: sentencepiece.SentencePieceProcessor
) -> None:
    model = load(spm_plan(spm_values(trained)), tmp_path)
    tokenizer = tokenizer_of(model)
    assert model.add_bos_token
    assert trained.get_piece_size() > 290
    for text in TRICKY:
        assert tokenizer.encode(text, add_special_tokens=False).ids == trained.encode(text), repr(text)
    assert tokenizer.encode("hello").ids == [trained.bos_id(), *trained.encode("hello")]
    # "▁" stands for a space, so it is the one text that does not come back.
    for text in set(TRICKY) - {"▁"}:
        assert tokenizer.decode(tokenizer.encode(text).ids) == trained.decode(trained.encode(text)) == text


def test_user_defined_pieces_stay_whole(tmp_path: Path, trained: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = tokenizer_of(load(spm_plan(spm_values(trained)), tmp_path))
    assert trained.piece_to_id("<turn>") in tokenizer.encode("a<turn>b").ids
    assert trained.piece_to_id("[x]") in tokenizer.encode("[x]").ids


def test_no_space_is_put_before_the_text_when_the_file_forbids_it(
    tmp_path: Path, trained: sentencepiece.SentencePieceProcessor
) -> None:
    plan = spm_plan(spm_values(trained) | {"tokenizer.ggml.add_space_prefix": False})
    tokenizer = tokenizer_of(load(plan, tmp_path))
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    assert str(tokenizer.id_to_token(ids[0])).startswith("h")
    assert tokenizer.decode(ids) == "hello"


def test_phi3_drops_white_space_after_a_special_token(
    tmp_path: Path, trained: sentencepiece.SentencePieceProcessor
) -> None:
    plan = spm_plan(spm_values(trained))
    turn, text = trained.piece_to_id("<turn>"), "<turn>\n\n hello<turn> <s>\n"
    kept = tokenizer_of(load(plan, tmp_path)).encode(text, add_special_tokens=False).ids
    plan.set("general.name", auto("Phi 3 Mini"))
    assert tokenizer_of(load(plan, tmp_path)).encode(text, add_special_tokens=False).ids == kept
    plan.set("general.name", auto("Phi-3 Mini 4k"))
    newline = trained.piece_to_id("\n")
    mark = trained.piece_to_id("▁")
    ids = tokenizer_of(load(plan, tmp_path)).encode(text, add_special_tokens=False).ids
    # <s> keeps what follows it: a space of its own, then the line break.
    assert ids == [turn, *trained.encode("hello"), turn, trained.bos_id(), mark, newline]
    assert len(kept) > len(ids)


@pytest.mark.parametrize("scores", [None, [0.0], "none"])
def test_sentencepiece_without_a_score_per_token_is_an_error(
    tmp_path: Path, trained: sentencepiece.SentencePieceProcessor, scores: object
) -> None:
    values = spm_values(trained) | {"tokenizer.ggml.scores": scores}
    plan = spm_plan({k: v for k, v in values.items() if v is not None})
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores"):
        load(plan, tmp_path)
