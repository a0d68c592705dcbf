"""Replies that are written on a thread of their own, on a real tiny model."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.app.prompts import params_of, task_of
from mlxinfer.app.replies import Live, Replies, Shown
from mlxinfer.app.store import Conversation, Message, Store
from mlxinfer.config import Settings
from mlxinfer.errors import InvalidRequestError
from mlxinfer.pool import Machine, ModelPool
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPool]:
    folder = tiny.write_folder(tmp_path_factory.mktemp("tiny"))
    made = ModelPool({"tiny": str(folder), "gone": str(folder / "nowhere")}, Machine(Settings()))
    yield made
    made.close()


def over(live: Live, timeout: float = 60.0) -> Shown:
    ends = time.monotonic() + timeout
    while not live.shown.over and time.monotonic() < ends:
        live.wait(live.shown, 1.0)
    assert live.shown.over
    return live.shown


def until_text(live: Live) -> None:
    ends = time.monotonic() + 60
    while not live.shown.text and not live.shown.over and time.monotonic() < ends:
        live.wait(live.shown, 1.0)
    assert live.shown.text


def test_a_reply_is_in_the_store_when_it_is_over(replies: Replies, store: Store) -> None:
    chat = store.create("tiny", temperature=0.0, max_tokens=20)
    shown = over(replies.ask(chat.id, "hello"))
    asked, reply = store.branch(chat.id)
    assert (asked.role, asked.content) == ("user", "hello")
    assert reply.content == shown.text
    assert reply.status == shown.stage == "done"
    assert reply.extra["completion_tokens"] > 0
    assert reply.extra["prompt_tokens"] == shown.prompt_tokens > 0
    assert {"ttft_s", "decode_tok_s", "cached_tokens", "finish_reason"} <= reply.extra.keys()


def test_a_reply_grows_while_it_is_written_and_what_is_there_is_the_beginning_of_it(
    replies: Replies, store: Store
) -> None:
    chat = store.create("tiny", temperature=0.0, max_tokens=300)
    live = replies.ask(chat.id, "hello")
    texts, shown = [""], live.shown
    while not shown.over:
        shown = live.wait(shown, 5.0)
        texts.append(shown.text)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(set(texts)) > 3


def test_a_stopped_reply_keeps_what_it_has(replies: Replies, store: Store) -> None:
    chat = store.create("tiny", temperature=0.0, max_tokens=1800, stop=["\0"])
    live = replies.ask(chat.id, "hello")
    until_text(live)
    began = time.monotonic()
    live.stop()
    shown = over(live, 5.0)
    assert time.monotonic() - began < 5.0
    if shown.stage == "done":
        pytest.fail("the tiny model ended by itself before it could be stopped")
    reply = store.branch(chat.id)[-1]
    assert (reply.status, reply.content) == ("stopped", shown.text)
    assert replies.live(live.message) is None


def test_a_reply_stopped_while_its_model_loads_is_stopped(tmp_path: Path, store: Store) -> None:
    class Never(Machine):
        def load(self, source: str, cancel: Any) -> Any:
            cancel.wait(30)
            raise AssertionError("cancelled")

    folder = tiny.write_folder(tmp_path / "slow")
    pool = ModelPool({"slow": str(folder)}, Never(Settings()))
    replies = Replies(pool, store)
    live = replies.ask(store.create("slow").id, "hello")
    live.stop()
    assert over(live, 5.0).stage == "stopped"
    pool.close()


def test_an_error_is_part_of_the_reply(replies: Replies, store: Store) -> None:
    chat = store.create("gone")
    shown = over(replies.ask(chat.id, "hello"))
    assert shown.stage == "failed"
    assert "nowhere" in shown.error
    assert store.branch(chat.id)[-1].extra["error"] == shown.error


def test_a_prompt_beyond_the_context_says_so_and_nothing_is_cut(replies: Replies, store: Store) -> None:
    chat = store.create("tiny")
    shown = over(replies.ask(chat.id, "word " * 5000))
    assert shown.stage == "failed"
    assert "2048" in shown.error


def test_only_one_reply_is_written_in_a_conversation(replies: Replies, store: Store) -> None:
    chat = store.create("tiny", temperature=0.0, max_tokens=1500)
    live = replies.ask(chat.id, "hello")
    with pytest.raises(InvalidRequestError, match="stop it first"):
        replies.ask(chat.id, "and again")
    live.stop()
    over(live)
    assert len(store.messages(chat.id)) == 2


def test_replies_in_two_conversations_are_written_at_the_same_time(replies: Replies, store: Store) -> None:
    lives = [replies.ask(store.create("tiny", temperature=0.0, max_tokens=200).id, text) for text in ("one", "two")]
    assert [over(live).stage for live in lives] == ["done", "done"]


def test_a_retry_stands_beside_the_reply(replies: Replies, store: Store) -> None:
    chat = store.create("tiny", temperature=0.0, max_tokens=10)
    first = replies.ask(chat.id, "hello")
    over(first)
    second = replies.retry(first.message)
    over(second)
    assert store.siblings(second.message) == [first.message, second.message]
    assert [one.id for one in store.branch(chat.id)][-1] == second.message
    assert store.message(first.message).content == store.message(second.message).content


def test_a_retry_of_a_question_answers_it_again(replies: Replies, store: Store) -> None:
    chat = store.create("tiny", temperature=0.0, max_tokens=10)
    over(replies.ask(chat.id, "hello"))
    asked = store.branch(chat.id)[0]
    again = replies.retry(asked.id)
    over(again)
    assert store.message(again.message).parent == asked.id


def test_an_edit_is_a_question_beside_the_first(replies: Replies, store: Store) -> None:
    chat = store.create("tiny", temperature=0.0, max_tokens=10)
    over(replies.ask(chat.id, "hello"))
    asked = store.branch(chat.id)[0]
    over(replies.ask(chat.id, "goodbye", root=True))
    assert store.branch(chat.id)[0].content == "goodbye"
    assert len(store.siblings(asked.id)) == 2


def test_going_on_gives_what_one_long_reply_would_have_given(replies: Replies, store: Store) -> None:
    short = store.create("tiny", temperature=0.0, max_tokens=10)
    live = replies.ask(short.id, "the quick brown fox")
    over(live)
    begun = store.message(live.message).content
    store.change(short.id, settings={"temperature": 0.0, "max_tokens": 20})
    whole = over(replies.go_on(live.message)).text
    long = store.create("tiny", temperature=0.0, max_tokens=30)
    other = over(replies.ask(long.id, "the quick brown fox")).text
    assert whole.startswith(begun)
    assert len(whole) > len(begun)
    # Where the cut falls between two tokens that the tokenizer would write as one, the texts part.
    assert other.startswith(begun)
    assert store.message(live.message).status == "done"


@pytest.mark.parametrize("root", [True, False])
def test_an_empty_message_is_refused_and_leaves_nothing(replies: Replies, store: Store, root: bool) -> None:
    chat = store.create("tiny")
    with pytest.raises(InvalidRequestError, match="empty"):
        replies.ask(chat.id, "  \n", root=root)
    assert store.messages(chat.id) == []


def test_closing_stops_and_keeps_what_is_written(pool: ModelPool, store: Store) -> None:
    replies = Replies(pool, store)
    chat = store.create("tiny", temperature=0.0, max_tokens=1800)
    live = replies.ask(chat.id, "hello")
    until_text(live)
    replies.close()
    assert store.branch(chat.id)[-1].status in ("stopped", "done")
    with pytest.raises(InvalidRequestError, match="closing"):
        replies.ask(chat.id, "more")


def test_what_grew_is_on_disk_before_the_reply_is_over(
    replies: Replies, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxinfer.app.replies.EVERY_S", 0.0)
    chat = store.create("tiny", temperature=0.0, max_tokens=1500)
    live = replies.ask(chat.id, "hello")
    until_text(live)
    live.wait(live.shown, 5.0)
    kept = store.message(live.message)
    live.stop()
    over(live)
    assert kept.status == "streaming"
    assert kept.content
    assert store.message(live.message).content.startswith(kept.content)


def _chat(**settings: Any) -> Conversation:
    return Conversation("c", "", "tiny", 0.0, 0.0, system=settings.pop("system", ""), settings=settings)


def _message(role: Any, content: str, **extra: Any) -> Message:
    return Message("m", "c", None, role, content, 0.0, 0.0, extra=extra)


def test_the_prompt_has_the_system_message_the_files_and_the_turns() -> None:
    files = [{"name": "a.txt", "text": "alpha", "tokens": 1}]
    task = task_of(
        _chat(system="Be kind.", thinking=False),
        [
            _message("user", "Sum up.", attachments=files),
            _message("assistant", "It says alpha."),
            _message("user", "?"),
        ],
    )
    assert [one["role"] for one in task.messages] == ["system", "user", "assistant", "user"]
    assert task.messages[1]["content"] == '<file name="a.txt">\nalpha\n</file>\n\nSum up.'
    assert task.template_kwargs == {"enable_thinking": False}


def test_a_reply_stopped_before_its_first_word_is_no_turn() -> None:
    task = task_of(_chat(), [_message("user", "a"), _message("assistant", ""), _message("user", "b")])
    assert [one["content"] for one in task.messages] == ["a", "b"]


def test_settings_become_sampling_parameters() -> None:
    params = params_of({"temperature": 0.5, "top_k": None, "stop": ["x"], "schema": '{"type": "object"}', "other": 1})
    assert (params.temperature, params.top_k, params.stop) == (0.5, None, ("x",))
    assert params.grammar is not None
    assert params.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": -1}, "temperature"),
        ({"schema": "{"}, "line 1"),
        ({"schema": "[]"}, "object"),
        ({"schema": "[" * 100_000}, "nested"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        params_of(settings)
