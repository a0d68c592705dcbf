"""The openai client, unmodified, against a real server on a socket with a tiny random model that knows tools."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from mlxinfer.llm import LLM, load
from mlxinfer.server.app import create_app
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.run import Server, bind
from tests import tiny
from tests.unit.server.fake import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERMES = (
    '{% if tools %}<|im_start|>system\n{{ tools | tojson }} as <tool_call>{"name": …}</tool_call><|im_end|>\n'
    "{% endif %}" + tiny.CHATML
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
HELLO: Any = [{"role": "user", "content": "hello"}]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


class Trip(BaseModel):
    city: Literal["Rome", "Köln"]
    back: bool


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": HERMES}))
    with load(folder, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    options = ServerOptions(grace_s=1)
    listener = bind("127.0.0.1", 0)
    server = Server(create_app({"tiny": llm}, options), options)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    assert wait_for(lambda: server.started)
    host, port = listener.getsockname()[:2]
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
    server.should_exit = True
    thread.join(20)
    listener.close()


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "tiny", "messages": HELLO, "seed": 5, "max_tokens": 300} | fields
    return client.chat.completions.create(**fields)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mlxinfer"


def test_a_stream_has_the_tokens_and_log_probabilities_of_the_whole(client: openai.OpenAI) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12, "n": 2}
    whole = chat(client, **fields)
    texts, logprobs = ["", ""], [[], []]
    chunk = None
    for chunk in chat(client, stream=True, stream_options={"include_usage": True}, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert [t.token for t in logprobs[choice.index]] == [t.token for t in choice.logprobs.content]
        assert len(choice.logprobs.content) == 12
        assert all(len(t.top_logprobs) == 3 for t in choice.logprobs.content)
    assert chunk is not None
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_strict_schema_is_obeyed_also_after_and_beside_plain_requests(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=30).choices[0].message.content
    with pytest.raises(ValueError, match=r".+"):
        json.loads(plain)
    jsonschema.validate(json.loads(chat(client, response_format=FORM).choices[0].message.content), SCHEMA)
    streams = [
        chat(client, stream=True, seed=i, **({"response_format": FORM} if i % 2 else {"max_tokens": 30}))
        for i in range(6)
    ]
    for i, stream in enumerate(streams):
        text = "".join(c.delta.content or "" for chunk in stream for c in chunk.choices)
        if i % 2:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert chat(client, max_tokens=30).choices[0].message.content == plain


def test_a_pydantic_model_comes_back_as_one(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Trip, seed=3, max_tokens=400
    ).choices[0]
    assert isinstance(made.message.parsed, Trip)
    response = client.responses.parse(model="tiny", input="hi", text_format=Trip, extra_body={"seed": 3})
    assert isinstance(response.output_parsed, Trip)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_obeys_its_schema_and_its_result_goes_back(client: openai.OpenAI, choice: Any) -> None:
    made = chat(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert made.finish_reason == "tool_calls"
    (call,) = made.message.tool_calls
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert made.message.content is None
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*HELLO, made.message, result]
    assert chat(client, messages=messages, tools=TOOLS, max_tokens=5).choices[0].finish_reason


def test_streamed_calls_are_whole_json(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny",
        messages=HELLO,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        seed=8,
        max_tokens=300,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.message.tool_calls is not None
    jsonschema.validate(json.loads(final.message.tool_calls[0].function.arguments), SCHEMA)


def test_a_call_that_is_cut_off_is_no_call(client: openai.OpenAI) -> None:
    forced = {"tools": TOOLS, "tool_choice": "required"}
    for limit in (1, 8, 20):
        made = chat(client, max_tokens=limit, **forced).choices[0]
        assert made.finish_reason == "length"
        assert made.message.tool_calls is None
        assert not made.message.content


def test_a_good_grammar_a_bad_one_and_the_good_one_again(client: openai.OpenAI) -> None:
    def complete(**extra: Any) -> str:
        return client.completions.create(model="tiny", prompt="a", max_tokens=20, extra_body=extra).choices[0].text

    assert complete(guided_choice=["red", "blue"]) in ("red", "blue")
    for bad in ({"guided_regex": "["}, {"guided_grammar": "start: nowhere"}, {"guided_json": {"type": "wizard"}}):
        with pytest.raises(openai.BadRequestError) as error:
            complete(**bad)
        assert error.value.param == next(iter(bad))
    assert complete(guided_choice=["red", "blue"]) in ("red", "blue")


def test_the_score_of_a_text_is_the_sum_that_its_own_tokens_had(client: openai.OpenAI, llm: LLM) -> None:
    prompt = llm.tokenizer.encode("the quick brown")
    made = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=1)
    found = made.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    text = list(llm.generate(prompt, max_tokens=6, temperature=0).token_ids)
    scored = client.completions.create(
        model="tiny", prompt=[prompt + text], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    again = scored.choices[0].logprobs
    assert again is not None
    assert again.token_logprobs is not None
    own = again.token_logprobs[len(prompt) : len(prompt) + len(text)]
    assert own == pytest.approx(found.token_logprobs, abs=1e-3)
    # Greedy tokens are the likeliest, as the harness checks.
    assert again.top_logprobs is not None
    best = [max(top.values()) for top in again.top_logprobs[len(prompt) : len(prompt) + len(text)]]
    assert own == best


def test_a_prompt_that_ends_with_an_earlier_answer_is_continued(client: openai.OpenAI) -> None:
    first = client.completions.create(model="tiny", prompt="the quick", max_tokens=8, seed=2).choices[0].text
    more = client.completions.create(model="tiny", prompt="the quick" + first, max_tokens=8, seed=2).choices[0].text
    assert more


def test_responses_stream_call_and_go_on(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    with client.responses.stream(
        model="tiny", input="weather?", tools=tools, tool_choice={"type": "function", "name": "weather"}
    ) as stream:
        for _ in stream:
            pass
        first = stream.get_final_response()
    (call,) = first.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    second = client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        tools=tools,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        max_output_tokens=8,
    )
    assert second.status == "incomplete"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_errors_come_as_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(client, model="../tiny")
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}])
    assert "image_url" in str(error.value)
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, max_tokens=10**6)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="tiny", input="hello")
