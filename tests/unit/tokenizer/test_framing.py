"""Texts and pairs as encoders read them: special tokens kept, the rest cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import ContextLengthError, InvalidRequestError, ModelFileError
from mlxinfer.tokenizer import Tokenizer
from mlxinfer.tokenizer.framing import shares
from tests.unit.encoders import tiny


def tokenizer(**options: object) -> Tokenizer:
    parts = {"special_tokens": {}, "eos_token_ids": (), "add_bos_token": False, "chat_templates": {}} | options
    return Tokenizer(tiny.tokenizer(), **parts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("limit", range(3, 12))
@pytest.mark.parametrize("text", ["the quick brown fox jumps over the lazy dog", "paris"])
def test_a_text_is_cut_as_the_tokenizers_package_cuts_it(text: str, limit: int) -> None:
    reference = tiny.tokenizer()
    reference.enable_truncation(limit)
    made = tokenizer().frame([text], max_tokens=limit, truncate=True)[0]
    wanted = reference.encode(text)
    assert (made.ids, made.truncated) == (wanted.ids, bool(wanted.overflowing))


@pytest.mark.parametrize("limit", range(6, 22))
@pytest.mark.parametrize(
    "pair", [("the quick brown fox jumps over", "a b c"), ("a b", "the fox " * 8), ("a b c", "c b a")]
)
def test_a_pair_is_cut_as_the_tokenizers_package_cuts_it(pair: tuple[str, str], limit: int) -> None:
    reference = tiny.tokenizer()
    reference.enable_truncation(limit)
    made = tokenizer().frame([pair], max_tokens=limit, truncate=True)[0]
    wanted = reference.encode(*pair)
    assert (made.ids, made.types) == (wanted.ids, wanted.type_ids)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(2, 60))
def test_what_a_pair_keeps_fills_the_room(first: int, second: int, room: int) -> None:
    if first + second > room:
        kept = shares([first, second], room)
        assert sum(kept) == room
        assert kept[0] <= first
        assert kept[1] <= second


def test_a_text_that_is_too_long_is_an_error_that_names_it() -> None:
    with pytest.raises(ContextLengthError, match="text 1 has 7 tokens and the model reads 6"):
        tokenizer().frame(["paris", "a b c a b"], max_tokens=6)


def test_an_empty_text_is_its_special_tokens() -> None:
    assert tokenizer().frame([""], max_tokens=6)[0].ids == [2, 3]
    assert tokenizer().frame([("", "")], max_tokens=6)[0].ids == [2, 3, 3]
    assert tokenizer().frame([""], max_tokens=6, special_tokens=False)[0].ids == []


def test_a_leading_token_of_the_config_counts() -> None:
    own = tokenizer(special_tokens={"bos_token": "[UNK]"}, add_bos_token=True)
    assert own.frame(["a b c"], max_tokens=5, truncate=True)[0].ids[0] == 1
    assert len(own.frame(["a b c"], max_tokens=5, truncate=True)[0].ids) == 5


def test_a_limit_below_the_special_tokens_is_an_error() -> None:
    with pytest.raises(ModelFileError, match="no room in 2"):
        tokenizer().frame(["a"], max_tokens=2, truncate=True)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer().frame(["a", "\ud800"], max_tokens=9)
