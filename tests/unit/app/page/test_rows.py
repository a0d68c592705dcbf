"""Messages as rows and feet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.app.comparisons import Comparisons
from mlxinfer.app.library import Library
from mlxinfer.app.page.context import House, PageContext
from mlxinfer.app.page.rows import EMPTY, foot_of, rows_of, rows_of_shown, transcript
from mlxinfer.app.page.sidebar import listed, title_of
from mlxinfer.app.page.texts import LANGUAGES, WORDS, Texts
from mlxinfer.app.replies import Replies, Shown
from mlxinfer.app.store import Message, open_store
from mlxinfer.config import Settings
from mlxinfer.pool import Machine, ModelPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EN = Texts("en")


@pytest.fixture
def context(tmp_path: Path) -> Iterator[PageContext]:
    settings = Settings(cache_dir=tmp_path / "cache", data_dir=tmp_path)
    pool = ModelPool({}, Machine(settings))
    store = open_store(tmp_path / "chats.db").store
    replies, library = Replies(pool, store), Library(pool, settings)
    comparisons = Comparisons(pool, store, replies, library)
    house = House(
        pool=pool, store=store, replies=replies, library=library, comparisons=comparisons, settings=settings,
        uploads=tmp_path,
    )  # fmt: skip
    yield PageContext.of(house, EN, ("en",))
    comparisons.close()
    store.close()
    pool.close()


def reply(**changes: Any) -> Message:
    values: dict[str, Any] = {"content": "yes", "created": 0.0, "updated": 0.0} | changes
    return Message("m", "c", "p", "assistant", **values)


def test_every_word_is_there_in_both_languages_with_the_same_values() -> None:
    for key, words in WORDS.items():
        assert len(words) == len(LANGUAGES)
        assert all(words), key
        named = [sorted(part.split("}")[0] for part in text.split("{")[1:]) for text in words]
        assert named[0] == named[1], key


def test_reasoning_calls_text_and_error_are_rows_in_this_order() -> None:
    shown = Shown("failed", "text", "because", 2.34, (("find", '{"a": 1}'),), "broke <b>")
    thought, call, text, error = rows_of_shown(EN, shown, "m")
    assert thought["metadata"] == {"title": "Thinking", "status": "done", "duration": 2.3}
    assert call["metadata"]["title"] == "Tool call: find"
    assert text == {"role": "assistant", "content": "text"}
    assert "broke <\u2060b>" in error["content"]


def test_a_reply_without_a_word_says_what_is_waited_for() -> None:
    assert rows_of_shown(EN, Shown("loading"), "qwen")[0]["content"] == "Loading qwen …"
    assert rows_of_shown(EN, Shown("reading", prompt_tokens=1234), "qwen")[0]["content"] == "Reading 1,234 tokens …"
    assert rows_of_shown(EN, Shown("stopped"), "qwen")[0]["content"] == EMPTY


def test_reasoning_spins_until_the_text_begins() -> None:
    assert rows_of_shown(EN, Shown("writing", "", "hm"), "")[0]["metadata"]["status"] == "pending"
    assert rows_of_shown(EN, Shown("writing", "so", "hm"), "")[0]["metadata"]["status"] == "done"


def test_the_arguments_of_a_call_cant_leave_their_block() -> None:
    content = rows_of_shown(EN, Shown("done", calls=(("x", '~~~\n<img src="x">'),)), "")[0]["content"]
    assert content.count("~~~") == 2


def test_an_error_that_was_gone_on_from_is_no_longer_shown() -> None:
    old = {"error": "broke"}
    assert len(rows_of(EN, reply(status="done", extra=old))) == 1
    assert len(rows_of(EN, reply(status="failed", extra=old))) == 2


def test_a_foot_escapes_and_says_the_figures() -> None:
    extra = {
        "model": "<m>",
        "decode_tok_s": 21.25,
        "ttft_s": 0.4,
        "completion_tokens": 7,
        "prompt_tokens": 30,
        "cached_tokens": 20,
    }
    foot = foot_of(EN, reply(extra=extra, status="stopped"), ["m"], goes_on=True, idle=True)
    assert "stopped · &lt;m&gt; · 21.2 tok/s · first token after 0.40 s · 7 tokens · 20 of 30 from the cache" in foot
    assert 'data-do="retry"' in foot
    assert 'data-do="continue"' in foot


def test_a_foot_switches_between_siblings_and_stops_at_the_ends() -> None:
    foot = foot_of(EN, reply(), ["m", "n", "o"], goes_on=False, idle=True)
    assert "1 / 3" in foot
    assert foot.count("disabled") == 1
    assert 'data-do="show" data-id="n"' in foot
    assert 'data-do="continue"' not in foot


def test_nothing_can_be_pressed_while_a_reply_is_written() -> None:
    assert "<button" not in foot_of(EN, reply(), ["m", "n"], goes_on=True, idle=False)


def test_the_last_exchange_stands_apart_and_each_row_has_a_foot(context: PageContext) -> None:
    store = context.store
    chat = store.create("m")
    for number in range(6):
        extra: dict[str, Any] = {"prompt_tokens": 10 * number, "completion_tokens": 1} if number % 2 else {}
        store.add(
            chat.id, "assistant" if number % 2 else "user", f"{number}", reasoning="r" if number % 2 else "", **extra
        )
    shown = transcript(context, store.conversation(chat.id))
    assert [row["content"] for row in shown.tail] == ["4", "r", "5"]
    assert len(shown.history) == 6
    assert shown.used == 51
    before, after = shown.feet.split('data-for="tail"')
    assert before.count("<div>") == 6
    assert after.count("<div>") == 3


def test_the_list_escapes_titles_and_snippets(context: PageContext) -> None:
    chat = context.store.create("m", title="<b>title</b>")
    context.store.add(chat.id, "user", 'find me <script>"x"</script>')
    for html in (
        listed(context, chat.id, "", ""),
        listed(context, "", "find me", ""),
        listed(context, "", "", chat.id),
    ):
        assert "<b>" not in html
        assert "<script>" not in html
        assert "&lt;b&gt;title&lt;/b&gt;" in html


def test_a_title_is_one_short_line() -> None:
    assert title_of(" a\n b ") == "a b"
    assert len(title_of("word " * 100)) == 60
