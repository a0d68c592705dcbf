"""What of a request to Ollama's API reaches the chat template and the sampler, and what is refused by its name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.chat import ChatTask
from mlxinfer.server.ollama.options import keep_seconds, sampling
from mlxinfer.server.ollama.schemas import ChatRequest, GenerateRequest
from mlxinfer.server.ollama.task import RawText, read_chat, read_generate
from mlxinfer.server.openai.fields import parse

HELLO = {"role": "user", "content": "hello"}


def chat(**fields: Any) -> ChatTask:
    task = read_chat(parse(ChatRequest, {"messages": [HELLO], **fields})[0]).task
    assert isinstance(task, ChatTask)
    return task


def refused(kind: Any, **fields: Any) -> str | None:
    read: Any = read_chat if kind is ChatRequest else read_generate
    with pytest.raises(InvalidRequestError) as caught:
        read(parse(kind, fields)[0])
    assert caught.value.status == 400
    return caught.value.param


def test_options_are_honoured_under_ollamas_names() -> None:
    options = {
        "num_predict": 5, "temperature": 0, "top_k": 40.0, "top_p": 0.5, "min_p": 0.1, "seed": 7, "stop": ["x"],
        "repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 0.5, "num_ctx": None,
    }  # fmt: skip
    params, ignored = sampling(options, None, None)
    assert ignored == ()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (5, 0, 40, 0.5, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (7, ("x",), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1, 0.5)
    assert sampling({"stop": "x"}, None, None)[0].stop == ("x",)


def test_no_limit_and_a_random_seed_have_numbers_in_ollama() -> None:
    for limit in (-1, -2):
        assert sampling({"num_predict": limit}, None, None)[0].max_tokens is None
    assert sampling({"seed": -1}, None, None)[0].seed is None
    assert sampling({"top_k": 10**12}, None, None)[0].top_k == 2**31 - 1


def test_the_name_of_an_option_can_stand_in_a_header() -> None:
    for name in ("x ", " x ", "x" * 39 + " y", "\t", "é\n"):
        (shown,) = sampling({name: 1}, None, None)[1]
        assert shown == shown.strip()
        assert shown.isascii()
        assert shown.isprintable()


def test_options_that_nothing_heeds_are_named() -> None:
    ignored = sampling({"num_ctx": 4096, "mirostat": 1, "wéird\n": 2, "seed": 1}, None, None)[1]
    assert ignored == ("options.num_ctx", "options.mirostat", "options.w\\xe9ird\\n")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"num_predict": 0}, "options.num_predict"),
        ({"num_predict": "5"}, "options.num_predict"),
        ({"num_predict": True}, "options.num_predict"),
        ({"top_k": 1.5}, "options.top_k"),
        ({"temperature": -1}, "options.temperature"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"seed": 2**70}, "options.seed"),
        ({"stop": [1]}, "options.stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "options.stop"),
        ({str(i): i for i in range(100)}, "options"),
    ],
)
def test_an_option_that_is_wrong_is_refused_by_its_name(options: dict[str, Any], param: str) -> None:
    assert refused(ChatRequest, messages=[HELLO], options=options) == param


def test_an_error_speaks_of_options_as_the_client_does() -> None:
    with pytest.raises(InvalidRequestError, match=r"^options\.num_predict is 0; it must be at least 1"):
        chat(options={"num_predict": 0})
    with pytest.raises(InvalidRequestError, match=r"^options\.stop: a stop string has 0 characters"):
        chat(options={"stop": ""})


def test_a_format_is_a_grammar() -> None:
    for nothing in ("", None):
        assert chat(format=nothing).params.grammar is None
    assert chat(format="json").params.grammar.kind == "json_object"  # pyright: ignore[reportOptionalMemberAccess]
    schema = chat(format={"type": "object"}).params.grammar
    assert schema is not None
    assert (schema.kind, json.loads(schema.text)) == ("json_schema", {"type": "object"})
    assert refused(ChatRequest, messages=[HELLO], format="xml") == "format"
    assert refused(ChatRequest, messages=[HELLO], format={"x": "y" * 70_000}) == "format"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None), (0, 0), ("0", 0), ("0s", 0), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), (300, 300),
        ("300", 300), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("500ms", 0.5), ("24h", 86400), (1e300, 1e300),
    ],
)  # fmt: skip
def test_how_long_a_model_is_kept_is_read_as_go_and_ollama_write_it(value: Any, seconds: float | None) -> None:
    assert keep_seconds(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 m", "m", "5x", "1m" * 40, "9" * 60, "1e400", "nan"])
def test_any_other_duration_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="keep_alive") as caught:
        keep_seconds(value)
    assert caught.value.param == "keep_alive"


@given(st.text(max_size=80) | st.floats(allow_nan=False) | st.integers(-(2**60), 2**60))
def test_a_duration_is_a_number_of_seconds_or_an_error(value: Any) -> None:
    try:
        seconds = keep_seconds(value)
    except InvalidRequestError:
        return
    assert seconds is not None
    assert seconds >= 0


def test_thinking_is_switched_or_measured() -> None:
    assert chat().template_kwargs == {}
    assert chat(think=False).template_kwargs == {"enable_thinking": False}
    assert chat(think="low").template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert refused(ChatRequest, messages=[HELLO], think="much") == "think"


def test_results_are_given_to_the_calls_they_answer() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": i}}} for i, name in enumerate(("time", "weather", "time"))]
    messages = [
        HELLO,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "tool_name": "time", "content": "one"},
        {"role": "tool", "tool_name": "other", "content": "x"},
    ]
    made = chat(messages=messages).messages
    ids = [call["id"] for call in made[1]["tool_calls"]]
    assert len(set(ids)) == 3
    assert made[1]["reasoning_content"] == "hm"
    assert made[1]["tool_calls"][1]["function"] == {"name": "weather", "arguments": {"n": 1}}
    assert [(m["tool_call_id"], m["name"]) for m in made[2:]] == [
        (ids[1], "weather"), (ids[0], "time"), (ids[2], "time"), ("", "other"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{**HELLO, "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{**HELLO, "role": "wizard"}]}, "messages[0].role"),
        ({"messages": [{**HELLO, "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{**HELLO, "tool_calls": [{"function": {"name": "x", "arguments": {}}}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "x", "parameters": {"x": "y" * 70_000}}}]}, "tools[0].function.parameters"),
        ({"stream": "yes"}, "stream"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_chat_field_that_is_wrong_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    assert refused(ChatRequest, **{"messages": [HELLO], **fields}) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"suffix": "}"}, "suffix"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["aGk="]}, "images"),
        ({"raw": True, "system": "x"}, "system"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused_and_its_empty_form_is_not(fields: dict[str, Any], param: str) -> None:
    assert refused(GenerateRequest, prompt="x", **fields) == param
    empty = {"template": "", "suffix": "", "context": [], "images": [], "system": "", "raw": False, "think": None}
    task = read_generate(parse(GenerateRequest, {"prompt": "x", **empty})[0]).task
    assert isinstance(task, ChatTask)


def test_a_prompt_is_a_user_message_unless_it_is_raw() -> None:
    task = read_generate(parse(GenerateRequest, {"prompt": "x", "system": "s"})[0]).task
    assert isinstance(task, ChatTask)
    assert task.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "x"})
    task = read_generate(parse(GenerateRequest, {"prompt": "x", "raw": True})[0]).task
    assert isinstance(task, RawText)
    assert task.text == "x"


def test_answers_are_streamed_unless_told_not_to() -> None:
    for stream, expected in ((None, True), (True, True), (False, False)):
        assert read_chat(parse(ChatRequest, {"messages": [HELLO], "stream": stream})[0]).stream is expected
