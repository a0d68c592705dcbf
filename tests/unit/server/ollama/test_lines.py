"""From the parts of a reply to Ollama's lines, and from those to one answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mlxinfer.server.chat import Finish
from mlxinfer.server.ollama.lines import Lines, whole_answer
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart
from mlxinfer.types import Timings, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

USAGE = Usage(prompt_tokens=20, completion_tokens=5)
STOP = Finish("stop", None, USAGE, Timings(queue_s=0.5, ttft_s=1.5, total_s=4.0))
CALL = [ToolCallStart(0, "time"), ToolCallArguments(0, '{"zone"'), ToolCallArguments(0, ': "UTC"}'), ToolCallEnd(0)]


def lines(*parts: Any, is_chat: bool = True) -> list[dict[str, Any]]:
    made = Lines(model="tiny", is_chat=is_chat, begun=0.0, load_s=0.25)
    return [line for part in parts for line in made.read(part)]


def whole(*parts: Any, is_chat: bool = True) -> dict[str, Any]:
    async def stream() -> AsyncGenerator[dict[str, Any] | None]:
        for line in lines(*parts, is_chat=is_chat):
            yield line
            yield None

    return asyncio.run(whole_answer(stream(), is_chat))


def test_only_the_last_line_is_done_and_it_has_the_figures() -> None:
    made = lines(TextPart("Hel"), TextPart("lo"), STOP)
    assert [line["done"] for line in made] == [False, False, True]
    assert [line["message"]["content"] for line in made] == ["Hel", "lo", ""]
    last = made[-1]
    assert last["done_reason"] == "stop"
    assert (last["prompt_eval_count"], last["eval_count"]) == (20, 5)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (1_000_000_000, 2_500_000_000)
    assert last["load_duration"] == 250_000_000
    assert last["total_duration"] > 0


def test_durations_are_never_zero_because_clients_divide_by_them() -> None:
    last = lines(Finish("length", None, USAGE, None))[-1]
    assert last["done_reason"] == "length"
    assert min(last[name] for name in last if name.endswith("_duration")) >= 1


def test_thinking_and_whole_calls_come_beside_the_text() -> None:
    made = lines(ReasoningPart("hm"), TextPart("I look."), *CALL, Finish("tool_calls", None, USAGE, None))
    assert len(made) == 4, "a call is one line"
    assert made[0]["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    (call,) = made[2]["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "time", "arguments": {"zone": "UTC"}}
    assert made[-1]["done_reason"] == "stop"


def test_a_call_that_was_cut_off_is_never_shown() -> None:
    answer = lines(*CALL[:-1], Finish("length", None, USAGE, None))
    assert "tool_calls" not in str(answer)


def test_a_whole_answer_is_all_lines_as_one() -> None:
    made = whole(ReasoningPart("h"), ReasoningPart("m"), TextPart("a"), *CALL, TextPart("b"), STOP)
    message = made["message"]
    assert (message["thinking"], message["content"], len(message["tool_calls"])) == ("hm", "ab", 1)
    assert (made["done"], made["done_reason"], made["eval_count"]) == (True, "stop", 5)
    assert "logprobs" not in made


def test_a_prompts_text_is_the_response() -> None:
    made = whole(ReasoningPart("hm"), TextPart("a"), TextPart("b"), STOP, is_chat=False)
    assert (made["response"], made["thinking"], "message" in made, "content" in made) == ("ab", "hm", False, False)
    assert whole(STOP, is_chat=False)["response"] == ""
    assert whole(STOP)["message"]["content"] == ""
