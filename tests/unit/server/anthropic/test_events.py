"""From the parts of a reply to Anthropic's events, and from those to a message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.server.anthropic.events import Blocks, whole_message
from mlxinfer.server.chat import Finish
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart
from mlxinfer.types import Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

USAGE = Usage(prompt_tokens=20, completion_tokens=5, cached_tokens=16, reasoning_tokens=2)
STOP = Finish("stop", None, USAGE, None)
CUT = Finish("length", None, USAGE, None)


def blocks(max_tokens: int = 5, show_thinking: bool = True) -> Blocks:
    return Blocks(
        model="tiny", message_id="msg_1", prompt_tokens=20, max_tokens=max_tokens, show_thinking=show_thinking
    )


def events(*parts: Any, made: Blocks | None = None) -> list[dict[str, Any]]:
    made = made or blocks()
    return [*made.start(), *(event for part in parts for event in made.read(part))]


def message(*parts: Any, **options: Any) -> dict[str, Any]:
    made = blocks(**options)

    async def stream() -> AsyncGenerator[dict[str, Any] | None]:
        for event in events(*parts, made=made):
            yield event
            yield None

    return asyncio.run(whole_message(stream(), made))


def call(index: int, name: str, *arguments: str) -> list[Any]:
    return [
        ToolCallStart(index, name),
        *(ToolCallArguments(index, text) for text in arguments),
        ToolCallEnd(index),
    ]


def test_a_text_is_one_block_between_the_messages_start_and_its_end() -> None:
    made = events(TextPart("Hel"), TextPart("lo"), STOP)
    assert [e["type"] for e in made] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert made[0]["message"]["usage"]["input_tokens"] == 20
    assert made[0]["message"]["content"] == []
    assert [e["delta"] for e in made[3:5]] == [{"type": "text_delta", "text": t} for t in ("Hel", "lo")]
    assert made[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_thinking_text_and_calls_are_blocks_that_count_up_and_never_overlap() -> None:
    parts = [ReasoningPart("hm"), TextPart("I look."), *call(0, "weather", '{"city"', ': "Rome"}'), *call(1, "time")]
    made = events(*parts, Finish("tool_calls", None, USAGE, None))
    open_block = None
    starts: list[tuple[int, str]] = []
    for event in made:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
            starts.append((event["index"], event["content_block"]["type"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert starts == list(enumerate(["thinking", "text", "tool_use", "tool_use"]))
    deltas = [e["delta"]["type"] for e in made if e["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
    whole = message(*parts, Finish("tool_calls", None, USAGE, None))
    assert whole["stop_reason"] == "tool_use"
    thinking, text, weather, time = whole["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "I look.")
    assert thinking["signature"]
    assert (weather["name"], weather["input"], time["input"]) == ("weather", {"city": "Rome"}, {})
    assert weather["id"] != time["id"]


def test_white_space_before_a_call_is_no_block_and_before_text_it_belongs_to_it() -> None:
    whole = message(ReasoningPart("hm"), TextPart("\n\n"), *call(0, "time"), STOP)
    assert [b["type"] for b in whole["content"]] == ["thinking", "tool_use"]
    whole = message(TextPart("\n"), TextPart("\n"), TextPart("a"), TextPart("\n"), TextPart("b\n"), STOP)
    assert [b["text"] for b in whole["content"]] == ["\n\na\nb\n"]
    assert message(TextPart("\n"), TextPart(" "), STOP)["content"] == [{"type": "text", "text": "\n "}]
    whole = message(TextPart("\n"), *call(0, "time"), TextPart("a"), STOP)
    assert [b.get("text") for b in whole["content"]] == [None, "a"]
    assert message(STOP)["content"] == []


@pytest.mark.parametrize("arguments", [[], ['{"ci'], ['{"city": "Rome"}']])
def test_a_call_that_was_cut_off_is_left_out_of_the_whole_message(arguments: list[str]) -> None:
    cut = [ToolCallStart(1, "time"), *(ToolCallArguments(1, text) for text in arguments)]
    whole = message(TextPart("a"), *call(0, "weather", "{}"), *cut, CUT)
    assert [b.get("name", b["type"]) for b in whole["content"]] == ["text", "weather"]
    assert whole["stop_reason"] == "max_tokens"
    streamed = events(*cut, CUT)
    assert [e["type"] for e in streamed][-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_thinking_that_is_not_to_be_shown_leaves_an_empty_signed_block() -> None:
    whole = message(ReasoningPart("secret"), TextPart("a"), STOP, show_thinking=False)
    assert whole["content"][0]["thinking"] == ""
    assert whole["content"][0]["signature"]
    assert "secret" not in str(whole)


@pytest.mark.parametrize(
    ("finish", "max_tokens", "reason", "sequence"),
    [
        (STOP, 5, "end_turn", None),
        (Finish("stop", "END", USAGE, None), 5, "stop_sequence", "END"),
        (CUT, 5, "max_tokens", None),
        (CUT, 6, "model_context_window_exceeded", None),
        (Finish("tool_calls", None, USAGE, None), 5, "tool_use", None),
    ],
)
def test_the_reason_of_the_end_is_told(finish: Finish, max_tokens: int, reason: str, sequence: str | None) -> None:
    whole = message(TextPart("a"), finish, max_tokens=max_tokens)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_cached_tokens_are_counted_apart_from_the_input() -> None:
    usage = message(TextPart("a"), STOP)["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 16, 5)
    assert usage["output_tokens_details"] == {"thinking_tokens": 2}
