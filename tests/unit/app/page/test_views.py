"""The panels' HTML: what anybody named is escaped, every word is there in both languages."""

from __future__ import annotations

import string
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mlxinfer.app.library import MemoryBar, Offer
from mlxinfer.app.page import compare_view, models_view
from mlxinfer.app.page.texts import LANGUAGES, Texts
from mlxinfer.app.page.words_models import WORDS
from mlxinfer.app.pulls import Pull
from mlxinfer.app.replies import Shown

if TYPE_CHECKING:
    from mlxinfer.app.comparisons import Comparison

EVIL = "<img src=x onerror=alert(1)>\"'`${1}{{2}}"
EN = Texts("en")


def offer(name: str = "m", **changes: Any) -> Offer:
    values: dict[str, Any] = {
        "here": True, "state": "registered", "size_bytes": 1_500_000, "parameters": 1_000_000, "bits": 12.0,
        "licence": "mit", "capabilities": ("chat",), "origin": "folder",
    }  # fmt: skip
    return Offer(name, **(values | changes))


def compared(left: Shown, right: Shown, *, over: bool = True) -> str:
    question = SimpleNamespace(models=("base", EVIL))
    made = SimpleNamespace(over=over, question=question, shown=lambda: (left, right), waits=lambda _: False)
    return compare_view.comparison("1", cast("Comparison", made), (0, 1), EN)


def test_both_languages_have_every_word_with_the_same_values_in_it() -> None:
    for key, texts in WORDS.items():
        assert len(texts) == len(LANGUAGES)
        assert all(texts), key
        fields = [{field for _, field, _, _ in string.Formatter().parse(text) if field} for text in texts]
        assert fields[0] == fields[1], key


@pytest.mark.parametrize("lang", LANGUAGES)
def test_whatever_is_named_in_a_list_is_escaped(lang: str) -> None:
    words = Texts(lang)
    evil = offer(EVIL, licence=EVIL, origin=EVIL, error=EVIL, adapters=(EVIL,))
    pull = Pull(EVIL, state="failed", error=EVIL)
    html = models_view.table([evil], 1, {}, EVIL, words) + models_view.detail(evil, None, words)
    html += models_view.pulls([pull], words) + models_view.notice(EVIL, bad=True)
    html += compared(Shown("done", EVIL, EVIL, error=EVIL, calls=((EVIL, EVIL),)), Shown("done", "a"))
    assert "<img" not in html
    assert html.count("&lt;img") >= 14


def test_every_state_of_a_model_and_of_a_pull_has_words() -> None:
    for state in ("registered", "loading", "loaded", "unloading", "failed"):
        assert models_view.table([offer(state=state)], 1, {}, "", EN)
    assert "loaded, at work" in models_view.table([offer(state="loaded", at_work=True)], 1, {}, "", EN)
    for can in ("chat", "completion", "embedding", "reranking", "thinking", "tools", "vision", "code"):
        assert models_view.table([offer(capabilities=(can,))], 1, {}, "", EN)
    for phase in ("resolve", "download", "unpack", "verify", "load"):
        assert "Cancel" in models_view.pulls([Pull("m", phase=phase)], EN)
    cancelled = Pull("m")
    cancelled.cancel.set()
    assert "being cancelled" in models_view.pulls([cancelled], EN)
    assert "data-act" not in models_view.pulls([cancelled], EN)


def test_a_filter_wants_every_word_somewhere() -> None:
    offers = [offer("qwen3-8b"), offer("llama", licence="Llama"), offer("far", here=False, capabilities=("tools",))]

    def found(text: str, only_here: bool = False) -> list[str]:
        return [one.name for one in models_view.matching(offers, text, only_here)]

    assert found("") == ["qwen3-8b", "llama", "far"]
    assert found("", only_here=True) == ["qwen3-8b", "llama"]
    assert found("QWEN chat") == ["qwen3-8b"]
    assert found("tools") == ["far"]
    assert found("qwen tools") == []


def test_the_memory_bar_has_a_part_for_each_share() -> None:
    html = models_view.memory(MemoryBar(weights=50, kv=20, cache=10, free=15, other=5), EN)
    for name, width in (("weights", "50.00%"), ("kv", "20.00%"), ("cache", "10.00%"), ("other", "5.00%"),
                        ("free", "15.00%")):  # fmt: skip
        assert f'class="part {name}" style="width:{width}"' in html
    assert "nan" not in models_view.memory(MemoryBar(0, 0, 0, 0), EN)


@pytest.mark.parametrize(
    ("left", "right", "said", "marked"),
    [
        (Shown("writing", "one two"), Shown("writing", "one"), "Same text so far (3 characters)", ()),
        (Shown("writing", "one two"), Shown("done", "one"), "Same text up to here: 3 characters", (" two",)),
        (Shown("done", "one two three"), Shown("done", "one ten"), "up to here: 5 characters", ("wo", "en")),
        (Shown("done", "one"), Shown("stopped", "one"), "Both replies are the same text", ()),
        (Shown("done", "one"), Shown("done", "two"), "differ from the first word on", ("one", "two")),
        (Shown("loading"), Shown("loading"), "Both run at the same time", ()),
    ],
)
def test_the_first_difference_is_marked_as_soon_as_it_is_certain(
    left: Shown, right: Shown, said: str, marked: tuple[str, ...]
) -> None:
    html = compared(left, right, over=left.over and right.over)
    assert said in html
    assert html.count("<mark") == len(marked)
    for text in marked:
        assert f">{text}</mark>" in html


def test_a_reply_without_text_is_not_gone_on_with() -> None:
    html = compared(Shown("failed", error="no room"), Shown("done", "text"))
    assert html.count('data-act="continue"') == 1
    assert 'data-act="continue" data-name="1"' in html
    assert "data-act" not in compared(Shown("writing", "a"), Shown("done", "text"), over=False)
