"""`mlxinfer serve` on the demo model, spoken to by Anthropic's and Ollama's own clients."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import anthropic
import ollama
import pytest

from tests.e2e.test_server import DEMO, FRANCE, Served, launch, stop
from tests.unit.server.fake import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.model

ASK: list[Any] = [{"role": "user", "content": FRANCE}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = launch()
    yield server
    assert stop(server) == 0


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def llama(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=served.url, timeout=120) as made:
        yield made


def test_all_three_apis_give_the_same_text(served: Served, claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    expected = served.ask(FRANCE)
    made = claude.messages.create(model=DEMO, max_tokens=12, messages=ASK, extra_body={"temperature": 0})
    assert [b.text for b in made.content if b.type == "text"] == [expected]
    assert llama.chat(DEMO, ASK, options=GREEDY).message.content == expected
    assert llama.generate(DEMO, FRANCE, options=GREEDY).response == expected
    raw = served.complete(prompt=FRANCE)["choices"][0]["text"]
    assert llama.generate(DEMO, FRANCE, raw=True, options=GREEDY).response == raw
    assert raw != expected


def test_streams_give_it_piece_by_piece(served: Served, claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    expected = served.ask(FRANCE)
    with claude.messages.stream(model=DEMO, max_tokens=12, messages=ASK, extra_body={"temperature": 0}) as stream:
        pieces = list(stream.text_stream)
        usage = stream.get_final_message().usage
    assert "".join(pieces) == expected
    assert len(pieces) > 2
    counted = claude.messages.count_tokens(model=DEMO, messages=ASK).input_tokens
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted

    parts = list(llama.chat(DEMO, ASK, options=GREEDY, stream=True))
    assert "".join(p.message.content or "" for p in parts) == expected
    assert len(parts) > 3
    assert parts[-1].prompt_eval_count == counted
    assert (parts[-1].eval_duration or 0) > 1000, "measured"

    async def ask() -> str:
        async with ollama.AsyncClient(host=served.url, timeout=120) as client:
            return "".join(
                [p.message.content or "" async for p in await client.chat(DEMO, ASK, options=GREEDY, stream=True)]
            )

    assert asyncio.run(ask()) == expected


def test_a_stop_sequence_ends_the_text_and_is_named(served: Served, claude: anthropic.Anthropic) -> None:
    stop_at = served.ask(FRANCE).split()[-1]
    made = claude.messages.create(
        model=DEMO, max_tokens=12, messages=ASK, stop_sequences=[stop_at], extra_body={"temperature": 0}
    )
    assert stop_at not in str(made.content)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop_at)


def test_a_model_goes_when_the_client_says_so_and_comes_back(served: Served, llama: ollama.Client) -> None:
    expected = served.ask(FRANCE)
    assert [m.model for m in llama.ps().models] == [DEMO]
    shown = llama.show(DEMO)
    assert (shown.modelinfo or {})["general.architecture"] == "llama"
    llama.chat(DEMO, ASK, options=GREEDY, keep_alive=0)
    assert wait_for(lambda: not llama.ps().models)
    assert served.ask(FRANCE) == expected
    assert [m.model for m in llama.list().models] == [DEMO]


@pytest.mark.parametrize("name", ["gone", "../../etc/passwd"])
def test_an_unknown_model_is_a_404_in_each_shape(claude: anthropic.Anthropic, llama: ollama.Client, name: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model=name, max_tokens=1, messages=ASK)
    with pytest.raises(ollama.ResponseError) as caught:
        llama.chat(name, ASK)
    assert caught.value.status_code == 404


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_forced_call_is_valid_and_its_result_can_be_sent_back(claude: anthropic.Anthropic) -> None:
    tools: list[Any] = [{"name": "weather", "description": "The weather of a city", "input_schema": CITY}]
    with claude.messages.stream(
        model=DEMO,
        max_tokens=200,
        messages=ASK,
        tools=tools,
        tool_choice={"type": "tool", "name": "weather"},
        extra_body={"temperature": 0},
    ) as stream:
        made = stream.get_final_message()
    (use,) = (block for block in made.content if block.type == "tool_use")
    assert made.stop_reason == "tool_use"
    assert use.name == "weather"
    assert isinstance(use.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns: list[Any] = [*ASK, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(model=DEMO, max_tokens=8, messages=turns, tools=tools, tool_choice={"type": "none"})
    assert last.stop_reason in ("max_tokens", "end_turn")


def test_an_answer_of_a_schema_obeys_it(claude: anthropic.Anthropic, llama: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 100}
    text = llama.chat(DEMO, ASK, format=CITY, options=options).message.content or ""
    assert set(json.loads(text)) == {"city"}
    assert isinstance(json.loads(llama.generate(DEMO, "x", format=CITY, options=options).response or ""), dict)
    form: Any = {"format": {"type": "json_schema", "schema": CITY}}
    made = claude.messages.create(model=DEMO, max_tokens=100, messages=ASK, output_config=form)
    assert set(json.loads("".join(b.text for b in made.content if b.type == "text"))) == {"city"}
    bad: Any = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    with pytest.raises(ollama.ResponseError, match="format") as caught:
        llama.chat(DEMO, ASK, format=bad)
    assert caught.value.status_code == 400
    form = {"format": {"type": "json_schema", "schema": bad}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        claude.messages.create(model=DEMO, max_tokens=100, messages=ASK, output_config=form)
