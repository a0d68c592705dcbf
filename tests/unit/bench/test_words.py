"""Prompts have the length they were meant to have, and begin with what no cache has seen."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from mlxinfer.bench.words import CHARS_PER_TOKEN, WORDS, Sizer, local_sizer, nonce
from mlxinfer.config import Settings
from tests.tiny import write_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("tokens", [30, 100, 1100])
def test_filler_has_the_wanted_tokens_by_a_tokenizers_own_count(tokens: int) -> None:
    sizer = Sizer(lambda text: len(text.split()))
    text = sizer.filler(tokens, random.Random(1), before="two words")
    assert text.startswith("two words ")
    assert len(text.split()) == tokens


def test_without_a_tokenizer_the_length_is_estimated_from_characters_and_said_so() -> None:
    sizer = Sizer()
    text = sizer.filler(500, random.Random(1))
    assert abs(len(text) / CHARS_PER_TOKEN - 500) < 3
    assert "estimated" in sizer.how


def test_a_prompt_that_is_long_enough_already_gets_no_words() -> None:
    assert Sizer(len).filler(3, random.Random(1), before="longer than that") == "longer than that"


def test_a_model_on_this_machine_counts_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    sizer = local_sizer(str(folder), Settings())
    assert sizer.how == "the model's tokenizer"
    text = sizer.filler(200, random.Random(1))
    # A word is at most as many tokens as it has letters, and one more for its space.
    assert 200 <= sizer.tokens(text) <= 200 + max(len(word) for word in WORDS) + 1
    assert local_sizer(str(tmp_path / "none"), Settings()).how.startswith("estimated")


def test_nonces_of_one_seed_differ_and_repeat_with_it() -> None:
    rng, again = random.Random(1), random.Random(1)
    made = [nonce(rng) for _ in range(50)]
    assert len(set(made)) == 50
    assert made == [nonce(again) for _ in range(50)]
