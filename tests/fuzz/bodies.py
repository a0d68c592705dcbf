"""Good requests to every endpoint, and what may be put in the place of any value in them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

CHAT = [{"role": "user", "content": "the quick brown fox"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "look it up"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "fox"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "an animal"},
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}

GOOD: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/chat/completions", {"messages": CHAT, **SHORT}),
    ("POST", "/v1/chat/completions", {"messages": HISTORY, "tools": [TOOL], "tool_choice": "auto", **SHORT}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True},
                                      "n": 2, "seed": 3, "stop": ["x"], "logprobs": True, "top_logprobs": 2, **SHORT}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 20, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "user": "u",
                                      "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
                                      "logit_bias": {"7": 3}, "reasoning_effort": "low", "metadata": {"a": "b"},
                                      "chat_template_kwargs": {"enable_thinking": False}, **SHORT}),
    ("POST", "/v1/completions", {"prompt": "the quick", **SHORT}),
    ("POST", "/v1/completions", {"prompt": [[5, 6, 7], [8]], "logprobs": 2, "echo": True, **SHORT}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True, "suffix": None, **SHORT}),
    ("POST", "/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    ("POST", "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
                               "instructions": "Be brief.", "stream": True, "store": False, "max_output_tokens": 4,
                               "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    ("POST", "/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("POST", "/v1/rerank", {"query": "fox", "documents": ["a fox", {"text": "a dog"}], "top_n": 1}),
    ("POST", "/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}], "system": "x"}),
    ("POST", "/v1/messages", {"max_tokens": 4, "stream": True, "temperature": 0, "stop_sequences": ["y"],
                              "tools": [{"name": "look_up", "input_schema": SCHEMA}],
                              "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look_up", "input": {"a": True}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "yes"}]}]}),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
    ("POST", "/api/chat", {"messages": CHAT, "options": {"num_predict": 4, "temperature": 0, "stop": ["z"]}}),
    ("POST", "/api/chat", {"messages": HISTORY[:2], "stream": False, "format": SCHEMA, "think": False,
                           "tools": [TOOL], "keep_alive": "5m", "options": {"num_predict": 20}}),
    ("POST", "/api/generate", {"prompt": "hello", "stream": False, "options": {"num_predict": 4}}),
    ("POST", "/api/show", {}),
    ("POST", "/api/embed", {"input": ["a"]}),
    ("GET", "/v1/models", None),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/api/version", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
]  # fmt: skip
"""Method, path and body; the model's name is put in."""

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 10**6, 10**12, 2**31 - 1, 2**31, 2**63, 2**70, -(2**63), 0.5, -0.0, 1e308, -1.5,
    "", " ", "a", "\0", "\u202e", "é", "🙂" * 20, "A" * 5000, "../x", "/etc/passwd", "http://127.0.0.1:9/x", "NaN",
    "{{ 7 * 7 }}", "{% for i in range(9**9) %}x{% endfor %}", "<|im_start|>system\n", "</s>", "[INST]", "<think>",
    "data:image/png;base64,AAAA", "null", "true", "10", "auto", "none", "required", "json_object", "assistant",
    [], [[]], [None], [1], [[1, 2], [3]], ["a", 1], ["x"] * 5, [{}], [{"type": "text"}], [0] * 3000,
    {}, {"": ""}, {"type": None}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}},
    {"type": "function"}, {"type": "json_schema"}, {"$ref": "#"}, {"type": "string", "pattern": "(a|b)*c{3,90}"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"anyOf": [{"type": "nope"}]},
]  # fmt: skip
EXTRA = [
    "model", "messages", "prompt", "input", "n", "stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs",
    "logit_bias", "response_format", "tools", "tool_choice", "functions", "max_tokens", "max_completion_tokens",
    "guided_json", "guided_regex", "guided_grammar", "guided_choice", "chat_template", "chat_template_kwargs", "echo",
    "best_of", "priority", "keep_alive", "format", "options", "think", "raw", "system", "template", "thinking",
    "previous_response_id", "text", "reasoning", "dimensions", "encoding_format", "top_n", "adapter", "x" * 300, "",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place below `value`, by the keys that lead to it."""
    found = [path]
    if isinstance(value, dict):
        for key, child in value.items():
            found += places(child, (*path, key))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            found += places(child, (*path, i))
    return found


def mutated(body: dict[str, Any], drawn: random.Random) -> Any:
    """The body with one to three things wrong in it."""
    made: Any = json.loads(json.dumps(body))
    for _ in range(drawn.choice((1, 1, 1, 2, 3))):
        spots = places(made)
        path = drawn.choice(spots[1:] or spots)
        made = _changed(made, path, drawn)
        if not isinstance(made, dict | list):
            break
    return made


def _changed(root: Any, path: tuple[Any, ...], drawn: random.Random) -> Any:
    nasty = json.loads(json.dumps(drawn.choice(NASTY)))
    if not path:
        return nasty
    parent = root
    for key in path[:-1]:
        parent = parent[key]
    action = drawn.randrange(6)
    if action == 0:
        del parent[path[-1]]
    elif action == 1 and isinstance(parent, dict):
        parent[drawn.choice(EXTRA)] = nasty
    elif action == 2:
        parent[path[-1]] = [parent[path[-1]]] * drawn.choice((1, 2, 9))
    elif action == 3:
        parent[path[-1]] = _nested(parent[path[-1]], drawn.choice((2, 40, 63, 70, 250)))
    else:
        parent[path[-1]] = nasty
    return root


def _nested(value: Any, depth: int) -> Any:
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


def raw(body: Any, drawn: random.Random) -> bytes:
    """The bytes that are sent; now and then they are no JSON."""
    data = json.dumps(body).encode()
    kind = drawn.randrange(30)
    if kind == 0:
        return data[: drawn.randrange(len(data) + 1)]
    if kind == 1:
        at = drawn.randrange(len(data) + 1)
        return data[:at] + drawn.randbytes(drawn.choice((1, 4))) + data[at:]
    if kind == 2:
        return data.replace(b'"', b'"\\ud800', 1)
    if kind == 3:
        return drawn.choice(
            (b"", b"[]", b"[" * 100_000, b'{"a":1e999}', b"{" + b'"a":' * 90 + b"1", b"\xff\xfe", b"NaN")
        )
    if kind == 4:
        return data[:-1] + b',"stream":true,"stream":false}'
    return data
