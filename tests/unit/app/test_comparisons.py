"""Two replies to one prompt at the same time, on real tiny models."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.app.comparisons import Comparison, Comparisons, Question, same_until
from mlxinfer.app.library import Library
from mlxinfer.app.replies import Replies
from mlxinfer.config import Settings
from mlxinfer.errors import InvalidRequestError, ModelNotFoundError
from mlxinfer.pool import Machine, ModelPool
from tests import tiny
from tests.adapters import write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlxinfer.app.store import Store

LONG = {"temperature": 0.0, "max_tokens": 1500, "stop": ["\0"]}
SHORT = {"temperature": 0.9, "seed": 3, "max_tokens": 30}


class Narrow(Machine):
    """Memory for one tiny model at a time."""

    pool: ModelPool

    def budget(self) -> int:
        return 1_000_000

    def held(self) -> int:
        return sum(status.bytes for status in self.pool.status().values())


def pool_of(folder: Path, machine: Machine) -> ModelPool:
    models = {name: str(tiny.write_folder(folder / name, seed=seed)) for seed, name in enumerate(("base", "other"))}
    return ModelPool(models, machine)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPool]:
    folder = tmp_path_factory.mktemp("models")
    made = pool_of(folder, Machine(Settings()))
    made.offer("base", "mine", str(write_adapter(folder / "mine", folder / "base", seed=1)))
    yield made
    made.close()


def comparisons_of(pool: ModelPool, store: Store, replies: Replies) -> Comparisons:
    return Comparisons(pool, store, replies, Library(pool, Settings()))


@pytest.fixture
def comparisons(pool: ModelPool, store: Store, replies: Replies) -> Iterator[Comparisons]:
    made = comparisons_of(pool, store, replies)
    yield made
    made.close()


def begun(comparisons: Comparisons, *models: str, keep: bool = False, **settings: Any) -> tuple[str, Comparison]:
    left, right = models
    key = comparisons.begin(Question("what is the capital", (left, right), settings=settings), keep=keep)
    made = comparisons.get(key)
    assert made is not None
    return key, made


def until(true: Callable[[], object], timeout: float = 60.0) -> None:
    ends = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.01)


def test_a_model_beside_itself_gives_the_same_text_at_one_seed_and_another_one_gives_another(
    comparisons: Comparisons,
) -> None:
    _, same = begun(comparisons, "base", "base", **SHORT)
    _, different = begun(comparisons, "base", "base:mine", **SHORT)
    assert same.wait(60)
    assert different.wait(60)
    left, right = same.shown()
    assert left.text == right.text != ""
    assert (left.stage, right.stage) == ("done", "done")
    left_again, adapted = different.shown()
    assert left_again.text == left.text
    assert adapted.text != left.text
    assert left.figures["completion_tokens"] > 0
    assert {"ttft_s", "decode_tok_s"} <= left.figures.keys()


def test_both_are_written_at_the_same_time_and_stop_ends_both(comparisons: Comparisons) -> None:
    _, made = begun(comparisons, "base", "other", **LONG)
    until(lambda: all(shown.text for shown in made.shown()))
    assert not made.over
    assert {shown.stage for shown in made.shown()} == {"writing"}
    made.stop()
    assert made.wait(5)
    assert {shown.stage for shown in made.shown()} == {"stopped"}


def test_nothing_is_among_the_conversations_unless_it_is_gone_on_with(comparisons: Comparisons, store: Store) -> None:
    key, made = begun(comparisons, "base", "base:mine", **SHORT)
    assert made.wait(60)
    assert store.conversations() == []
    chat = comparisons.go_on(key, 1)
    assert [one.id for one in store.conversations()] == [chat.id]
    assert (chat.model, chat.title) == ("base:mine", "what is the capital")
    assert chat.settings == {name: value for name, value in SHORT.items() if name != "seed"}
    asked, reply = store.branch(chat.id)
    assert (asked.role, asked.content) == ("user", "what is the capital")
    assert (reply.role, reply.content, reply.status) == ("assistant", made.shown()[1].text, "done")
    assert reply.extra["completion_tokens"] == made.shown()[1].figures["completion_tokens"]


def test_a_chat_that_was_gone_on_with_answers_further(comparisons: Comparisons, store: Store, replies: Replies) -> None:
    key, made = begun(comparisons, "base", "other", **SHORT)
    assert made.wait(60)
    chat = comparisons.go_on(key, 0)
    live = replies.ask(chat.id, "and then?")
    until(lambda: live.shown.over)
    assert live.shown.stage == "done"
    assert len(store.branch(chat.id)) == 4


def test_what_is_kept_is_on_disk_while_it_is_written(comparisons: Comparisons, store: Store) -> None:
    key, made = begun(comparisons, "base", "other", keep=True, **LONG)
    titles = {one.title for one in store.conversations()}
    assert titles == {"what is the capital (base)", "what is the capital (other)"}
    with pytest.raises(InvalidRequestError, match="no finished reply"):
        comparisons.go_on(key, 0)
    until(lambda: all(store.branch(one.id)[-1].content for one in store.conversations()))
    made.stop()
    assert made.wait(5)
    assert comparisons.go_on(key, 0).id in [one.id for one in store.conversations()]
    assert len(store.conversations()) == 2


@pytest.mark.parametrize(
    ("prompt", "models", "settings", "error"),
    [
        (" ", ("base", "other"), {}, "prompt is empty"),
        ("hi", ("base", "nowhere"), {}, "nowhere"),
        ("hi", ("base", "base:none"), {}, "base:none"),
        ("hi", ("base", "other"), {"temperature": -1}, "temperature"),
        ("hi", ("base", "other"), {"seed": 1.5}, "seed"),
    ],
)
def test_what_cannot_be_compared_begins_nothing(
    prompt: str, models: tuple[str, str], settings: dict[str, Any], error: str, comparisons: Comparisons
) -> None:
    with pytest.raises((InvalidRequestError, ModelNotFoundError), match=error):
        comparisons.begin(Question(prompt, models, settings=settings), keep=True)
    assert comparisons.last() is None


def test_two_models_that_do_not_fit_together_answer_one_after_the_other(tmp_path: Path, store: Store) -> None:
    machine = Narrow(Settings())
    pool = machine.pool = pool_of(tmp_path, machine)
    comparisons = comparisons_of(pool, store, Replies(pool, store))
    try:
        _, made = begun(comparisons, "base", "other", temperature=0.0, max_tokens=600, stop=["\0"])
        until(lambda: made.waits(1) or made.over, 20)
        assert not made.over
        assert made.shown()[1].stage == "loading"
        assert made.wait(60)
        assert {shown.stage for shown in made.shown()} == {"done"}
        assert all(shown.text for shown in made.shown())
        _, stopped = begun(comparisons, "base", "other", **LONG)
        until(lambda: stopped.waits(0) or stopped.waits(1))
        refused = 0 if stopped.waits(0) else 1
        stopped.stop()
        assert stopped.wait(5)
        assert stopped.shown()[refused].stage == "failed"
        assert "is at work" in stopped.shown()[refused].error
    finally:
        comparisons.close()
        pool.close()


def test_a_vote_counts_once_for_each_comparison_on_whichever_side_the_model_stood(comparisons: Comparisons) -> None:
    for models, sides in ((("base", "other"), (0,)), (("other", "base"), (0, 1)), (("base", "base:mine"), (1,))):
        key, made = begun(comparisons, *models, temperature=0.0, max_tokens=2)
        assert made.wait(60)
        for side in sides:
            comparisons.vote(key, side)
    assert comparisons.votes(("base", "other")) == (2, 0)
    assert comparisons.votes(("other", "base")) == (0, 2)
    assert comparisons.votes(("base", "base:mine")) == (0, 1)


def test_only_the_last_comparisons_are_remembered(comparisons: Comparisons, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.app.comparisons.KEPT", 2)
    keys: list[str] = []
    for _ in range(4):
        key, made = begun(comparisons, "base", "other", temperature=0.0, max_tokens=2)
        assert made.wait(60)
        keys.append(key)
    assert comparisons.last() == keys[-1]
    assert [comparisons.get(key) is not None for key in keys] == [False, False, True, True]
    assert len(comparisons._passing.conversations()) == 4
    with pytest.raises(InvalidRequestError, match="not remembered"):
        comparisons.go_on(keys[0], 0)


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [
        ("", "", 0),
        ("abc", "abd", 2),
        ("abc", "abcdef", 3),
        ("abc", "xbc", 0),
        ("cafe\u0301", "cafe\u0300", 3),
        ("cafe", "cafe\u0301", 3),
        ("a\U0001f469\u200d\U0001f467", "a\U0001f469\u200d\U0001f466", 1),
        ("日本語", "日本人", 2),
    ],
)
def test_the_first_difference_never_takes_a_sign_apart(left: str, right: str, count: int) -> None:
    assert same_until(left, right) == same_until(right, left) == count
