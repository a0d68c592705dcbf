"""Replies of gpt-oss."""

import pytest

from tests.unit.tokenizer.replies.models import MODELS, TOOLS, format_of
from tests.unit.tokenizer.replies.reading import parse, summary

CALL = MODELS["harmony"].one
FIRST = ("get_weather", {"city": "Köln", "days": 3})
PROMPT = "<|end|><|start|>assistant"


def read(text, complete=True, prompt_tail=PROMPT, **options):
    form = format_of("harmony")
    return summary(parse(form, text, complete=complete, prompt_tail=prompt_tail, tools=TOOLS, **options))


def test_channels_are_reasoning_text_and_calls():
    text = (
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up."
        f"<|end|><|start|>assistant{CALL}<|call|>"
    )
    assert read(text) == [("reasoning", "Hm."), "I look it up.", FIRST]
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n<|return|>"
    assert read(final) == [("reasoning", "Hm."), "Yes.\n"]
    assert format_of("harmony").has_reasoning


def test_two_messages_to_the_user_are_two_paragraphs():
    text = "<|channel|>commentary<|message|>One.\n<|end|><|start|>assistant<|channel|>final<|message|>Two."
    assert read(text) == ["One.\n\nTwo."]


@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"])
def test_a_call_is_whole_with_any_end(end):
    assert read(CALL + end) == [FIRST]


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.now<|channel|>commentary json<|message|>",
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.now<|constrain|>json<|message|>",
        "<|channel|>analysis to=now code<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
    ],
)
def test_the_recipient_is_found_wherever_it_stands(header):
    assert read(header + '{"a": 1}') == [("now", {"a": 1})]
    assert read(header) == [("now", {})]
    assert read(header, complete=False) == []


def test_the_prompt_may_have_opened_the_message():
    assert read("Yes.<|return|>", prompt_tail=PROMPT + "<|channel|>final<|message|>") == ["Yes."]
    tail = PROMPT + "<|channel|>analysis<|message|>Let"
    assert read(" me.<|end|>", prompt_tail=tail) == [("reasoning", "me.")]
    assert format_of("harmony").reasoning_prefix(tail) is None


def test_text_without_any_message_is_text():
    assert read("Hello there.") == ["Hello there."]
    assert read("Hello there.<|return|>") == ["Hello there."]
    assert read("word " * 1000) == ["word " * 1000]


def test_a_body_that_is_no_object_is_text_with_its_header():
    text = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert read(text) == [text.removesuffix("<|call|>")]
    broken = CALL.replace('"days"', "days")
    assert read(broken) == [("void", "get_weather"), broken]


def test_calls_stay_text_when_they_are_not_asked_for():
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}"
    got = read(text, parse_tools=False)
    assert got[0] == ("reasoning", "Hm.")
    assert got[1:] == ["<|start|>assistant" + CALL]
