"""The incremental detokenizer and the stop matcher, against decode-everything and against naive oracles."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.tokenizer import Detokenizer, StopMatcher, Tokenizer
from tests.unit.tokenizer import tiny

BYTES = Tokenizer.from_parts(tokenizer_json=tiny.byte_level(), eos_token="</s>")
PIECES = Tokenizer.from_parts(tokenizer_json=tiny.sentencepiece(), eos_token="</s>")


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detok = tokenizer.detokenizer()
    return [*(detok.add(i) for i in ids), detok.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=60))
def test_pieces_of_any_byte_level_ids_join_to_the_full_decode(ids: list[int]) -> None:
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_text_survives_encode_and_incremental_decode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert "".join(stream(BYTES, BYTES.encode(text))) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["▁", "a", "b", "▁a", "▁b", "é", "ab", "<s>", "</s>", "é"]), max_size=30))
def test_leading_spaces_of_sentencepiece_tokens_are_kept_but_the_first(tokens: list[str]) -> None:
    vocab = tiny.sentencepiece()["model"]["vocab"]
    ids = [vocab[t] for t in tokens]
    assert "".join(stream(PIECES, ids)) == PIECES.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text("ab é🙂日", max_size=20))
def test_byte_fallback_text_streams_to_the_full_decode(text: str) -> None:
    ids = PIECES.encode(text)
    assert "".join(stream(PIECES, ids)) == PIECES.decode(ids) == text


def test_no_piece_shows_half_a_character() -> None:
    pieces = stream(BYTES, BYTES.encode("日🙂é" * 3))
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_appears_with_its_last_token() -> None:
    ids = PIECES.encode("🙂")[1:]  # four byte tokens, after the prepended space
    assert len(ids) == 4
    assert stream(PIECES, ids) == ["", "", "", "🙂", ""]


def test_flush_shows_an_incomplete_character_and_leaves_nothing() -> None:
    detok = PIECES.detokenizer()
    assert [detok.add(i) for i in PIECES.encode("🙂")[1:3]] == ["", ""]
    assert detok.flush() != ""
    assert detok.flush() == ""


def test_a_valid_character_followed_by_bad_bytes_loses_nothing_after_them() -> None:
    vocab = tiny.sentencepiece()["model"]["vocab"]
    ids = [*PIECES.encode("€")[1:], vocab["<0xFF>"], vocab["▁a"]]
    assert "".join(stream(PIECES, ids)) == "€\ufffd a"


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
def test_endless_invalid_bytes_come_out_and_cost_the_same_each(tokenizer: Tokenizer) -> None:
    spelled = "ÿ" if tokenizer is BYTES else "<0xFF>"  # how each vocabulary writes the byte 0xFF
    bad = tiny.byte_level()["model"]["vocab"]["ÿ"] if tokenizer is BYTES else None
    token = bad if bad is not None else tiny.sentencepiece()["model"]["vocab"][spelled]
    detok, start = tokenizer.detokenizer(), time.perf_counter()
    pieces = [detok.add(token) for _ in range(5000)]
    assert time.perf_counter() - start < 5
    assert len("".join(pieces)) > 4980
    assert len("".join(pieces) + detok.flush()) == 5000


def test_each_token_decodes_a_short_window_only() -> None:
    longest = 0

    def decode(ids) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return BYTES.decode(ids)

    detok = Detokenizer(decode, lambda _: True)
    for token in BYTES.encode("the cat sat on the mat " * 50):
        detok.add(token)
    assert longest <= 9


def naive_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Grow the text by one character until a stop string is at its end; the longest of several."""
    for end in range(len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("abe", max_size=4), max_size=12),
    st.lists(st.text("abe", min_size=1, max_size=4), max_size=4),
)
def test_stop_matcher_agrees_with_the_naive_search_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    matcher, out, stopped = StopMatcher(tuple(stops)), "", False
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        out += text
        # Nothing shown may be taken back, and nothing held that no stop string can begin in.
        held = "".join(pieces)[: sum(map(len, pieces))]
        assert held.startswith(out)
        if stopped:
            break
    if not stopped:
        out += matcher.flush()
    assert (out, stopped) == naive_stop("".join(pieces), tuple(stops))


@settings(max_examples=200, deadline=None)
@given(st.text("abe", max_size=20), st.lists(st.text("abe", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_is_held_only_where_a_stop_string_may_begin(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    out, stopped = matcher.feed(text)
    held = matcher.flush()
    if not stopped:
        assert out + held == text
        assert not held or any(s.startswith(held) for s in stops)


def test_eh_in_hehehe_cuts_after_the_first_letter() -> None:
    matcher = StopMatcher(("eh",))
    assert [matcher.feed(c) for c in "hehehe"][:3] == [("h", False), ("", False), ("", True)]
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""


def test_a_held_angle_bracket_comes_out_at_the_end() -> None:
    matcher = StopMatcher(("<end>",))
    assert matcher.feed("a <") == ("a ", False)
    assert matcher.flush() == "<"
