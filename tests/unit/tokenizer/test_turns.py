"""Message boundaries are found in token ids."""

from mlxinfer.tokenizer import Tokenizer, message_starts, turn_tokens
from tests import tiny

TURN = 7


def test_the_token_that_opens_a_message_is_found_from_the_template(tmp_path):
    tokenizer = Tokenizer.from_folder(tiny.write_folder(tmp_path / "m"))
    opening = tokenizer.encode("<|im_start|>")
    assert turn_tokens(tokenizer) == frozenset(opening)


def test_without_a_chat_template_there_are_no_turns(tmp_path):
    folder = tiny.write_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    assert turn_tokens(Tokenizer.from_folder(folder)) == frozenset()


def chat(*lengths: int) -> list[int]:
    """Messages of so many tokens, each opened by TURN."""
    return [token for n in lengths for token in (TURN, *[1] * (n - 1))]


def test_the_first_message_after_the_start_and_the_last_few_are_kept():
    ids = chat(50, 20, 20, 20, 20, 20, 20, 20)
    assert message_starts(ids, frozenset({TURN})) == (50, 110, 130, 150, 170)


def test_boundaries_are_not_too_close_and_the_latest_wins():
    ids = chat(50, 30, 5, 3)
    assert message_starts(ids, frozenset({TURN})) == (50, 85)


def test_the_very_start_is_no_boundary():
    assert message_starts(chat(40), frozenset({TURN})) == ()
    assert message_starts([1, 2, 3], frozenset()) == ()
