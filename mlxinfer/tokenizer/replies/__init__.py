"""What a model's reply says: text, reasoning and tool calls, told apart while the text arrives; docs/replies.md."""

from mlxinfer.tokenizer.replies.detect import reply_format
from mlxinfer.tokenizer.replies.events import (
    Part,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from mlxinfer.tokenizer.replies.format import ReplyFormat, ReplyParser

__all__ = [
    "Part",
    "ReasoningPart",
    "ReplyFormat",
    "ReplyParser",
    "TextPart",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "reply_format",
]
