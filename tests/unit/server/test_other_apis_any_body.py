"""Whatever a body holds, Anthropic's and Ollama's requests are read or refused: nothing else comes of it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.anthropic.schemas import MessagesRequest
from mlxinfer.server.anthropic.task import read_count, read_messages
from mlxinfer.server.ollama.schemas import ChatRequest, EmbedRequest, GenerateRequest
from mlxinfer.server.ollama.task import read_chat, read_generate
from mlxinfer.server.openai.fields import parse
from mlxinfer.types import SamplingParams

if TYPE_CHECKING:
    from starlette.testclient import TestClient

SCALARS = st.text(max_size=5) | st.sampled_from(
    [
        None, True, False, 0, 1, -1, 2.5, 40.0, 10**30, float("inf"), "", "x", "user", "json", "5m", "function", "\0",
        "é" * 90,
    ]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "type", "text", "role", "content", "name", "input", "id", "tool_use_id", "input_schema", "thinking",
        "signature", "function", "arguments", "tool_calls", "images", "parameters", "is_error", "budget_tokens",
        "schema", "format", "effort", "stop", "num_predict", "top_k", "data", "source", "nonsense", "é\n",
    ]
)  # fmt: skip
TYPES = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "enabled", "any", "json_schema"])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=5)
        | st.builds(lambda kind, more: {**more, "type": kind}, TYPES, st.dictionaries(NAMES, inner, max_size=4))
    ),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
TEXT = {"type": "text", "text": "x"}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [TEXT], "is_error": True}
BLOCKS = st.sampled_from([TEXT, CALL, RESULT, {"type": "thinking", "thinking": "hm"}]) | st.builds(
    lambda block, name, value: {**block, name: value}, st.sampled_from([TEXT, CALL, RESULT]), NAMES, JSON
)
TURNS: Any = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": [TEXT, CALL]},
    {"role": "user", "content": [RESULT, TEXT]},
]
MESSAGES = (
    st.builds(
        lambda i, block: [*TURNS[:i], {**TURNS[i], "content": [*TURNS[i]["content"], block]}, *TURNS[i + 1 :]],
        st.integers(1, 2),
        BLOCKS,
    )
    | st.just(TURNS)
    | st.lists(st.fixed_dictionaries({"role": ROLES, "content": JSON | st.lists(BLOCKS, max_size=3)}), max_size=4)
    | JSON
)


def bodies(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    fields: dict[str, Any] = dict.fromkeys(kind.model_fields, JSON)
    fields |= dict.fromkeys((*kind.off, *kind.harmless), JSON)
    if "messages" in fields:
        fields["messages"] = MESSAGES
    likely = {"messages": MESSAGES, "max_tokens": st.just(5000), "model": st.just("tiny"), "prompt": st.just("x")}
    sound = {name: value for name, value in likely.items() if name in fields}
    anything = st.fixed_dictionaries({}, optional=fields)
    nearly = [
        st.builds(lambda a, b: {**a, **b}, st.fixed_dictionaries(sound), st.fixed_dictionaries({name: fields[name]}))
        for name in fields
    ]
    return st.one_of(anything, *nearly)


def check(read: Any, body: dict[str, Any]) -> None:
    refusal: InvalidRequestError | None = None
    asked: Any = None
    try:
        asked = read(body)
    except InvalidRequestError as error:
        refusal = error
    if refusal is not None:
        assert str(refusal)
        assert refusal.param is None or refusal.param.isascii()
        return
    assert all(name.isascii() and name.isprintable() for name in asked.ignored), "it goes into a header"
    if asked.task is not None:
        assert isinstance(asked.task.params, SamplingParams)
        for message in getattr(asked.task, "messages", ()):
            content = message["content"]
            assert isinstance(content, str) or all(isinstance(part["text"], str) for part in content)


@settings(max_examples=300, deadline=None)
@given(bodies(MessagesRequest))
def test_a_message_is_read_or_refused(body: dict[str, Any]) -> None:
    check(read_messages, body)
    check(read_count, body)


@settings(max_examples=300, deadline=None)
@given(bodies(ChatRequest))
def test_a_chat_is_read_or_refused(body: dict[str, Any]) -> None:
    check(lambda sent: read_chat(parse(ChatRequest, sent)[0]), body)


@settings(max_examples=200, deadline=None)
@given(bodies(GenerateRequest), bodies(EmbedRequest))
def test_a_prompt_is_read_or_refused(body: dict[str, Any], texts: dict[str, Any]) -> None:
    check(lambda sent: read_generate(parse(GenerateRequest, sent)[0]), body)
    with contextlib.suppress(InvalidRequestError):
        assert all(isinstance(text, str) for text in parse(EmbedRequest, texts)[0].texts())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies(MessagesRequest), bodies(ChatRequest), bodies(GenerateRequest))
def test_no_body_breaks_the_server(
    client: TestClient, messages: dict[str, Any], chat: dict[str, Any], prompt: dict[str, Any]
) -> None:
    for path, body in (("/v1/messages", messages), ("/api/chat", chat), ("/api/generate", prompt)):
        answer = client.post(path, content=json.dumps(body))
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code == 200:
            assert '"error"' not in answer.text[-200:]
