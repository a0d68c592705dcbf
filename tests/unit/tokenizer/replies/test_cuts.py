"""However a reply is cut into pieces, its parts are the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.tokenizer.replies import TextPart
from tests.unit.tokenizer.replies.models import MODELS, TOOLS, format_of
from tests.unit.tokenizer.replies.reading import merged, parse, pieces, summary

WORDS = ["Hi", " ", "\n", "<", "{", "}", "[", '"', "</", "é🙂", "a=1", ";", '{"name": "f", "arguments": {}}', "null,"]


def _fragments(name: str) -> list[str]:
    """Pieces of replies in a format: whole calls, their markup, halves of both."""
    model, form = MODELS[name], format_of(name)
    marks = [*form.syntax.openers, *form.syntax.tokens, getattr(form.syntax, "closer", ""), *form.silent]
    if form.think:
        marks += [form.think.start, form.think.end]
    halves = [model.one[:n] for n in (5, 20, 45, 60)] + [model.one[n:] for n in (5, 20, 45, 60)]
    return [*WORDS, *filter(None, marks), *halves, *filter(None, (model.one, model.two))]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_parts_do_not_depend_on_the_cuts(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(_fragments(name)), max_size=8)))
    cuts = data.draw(st.lists(st.integers(1, max(1, len(text))), max_size=12))
    options = {
        "complete": data.draw(st.booleans()),
        "tools": data.draw(st.sampled_from([(), TOOLS])),
        "parse_tools": data.draw(st.booleans()),
        "prompt_tail": data.draw(st.sampled_from(["", format_of(name).think.start if format_of(name).think else ""])),
    }
    form = format_of(name)
    whole = parse(form, text, **options)
    assert parse(form, pieces(text, cuts), **options) == whole
    assert parse(form, list(text), **options) == whole
    # Whole calls have whole arguments, indices count up.
    summary(whole)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_of_a_reply_that_ended_nothing_is_lost_but_white_space_around_markup(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from([*WORDS, MODELS[name].one[:30]]), max_size=8)))
    form = format_of(name)
    if form.name == "harmony" and "<|" in text:
        return
    parts = merged([p for p in parse(form, text, tools=TOOLS, merge=False) if isinstance(p, TextPart)])
    whole = [p for p in summary(parse(form, text, tools=TOOLS)) if not isinstance(p, str) and p[0] != "void"]
    if not whole:
        assert "".join("".join(p.text for p in parts).split()) == "".join(text.split())


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_markup_gets_into_the_text_of_a_sound_reply(name, data):
    form, model = format_of(name), MODELS[name]
    before = data.draw(st.sampled_from(["", "Hi.", "\n", "a < b "])) if form.name not in ("plain", "llama3") else ""
    if form.name == "harmony":
        before = f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant" if before else ""
    think = f"{form.think.start}\nhm\n{form.think.end}\n\n" if form.think and data.draw(st.booleans()) else ""
    text = think + before + (model.two or model.one)
    cuts = data.draw(st.lists(st.integers(1, len(text)), max_size=40))
    length = data.draw(st.integers(0, len(text)))
    for complete, cut in ((True, text), (False, text[:length])):
        parts = summary(parse(form, pieces(cut, cuts), complete=complete, tools=TOOLS))
        for part in parts:
            if isinstance(part, str) and complete:
                assert part in ("Hi.", "a < b"), part
    assert len([p for p in summary(parse(form, pieces(text, cuts), tools=TOOLS)) if p[0] == "get_weather"]) in (1, 2)
