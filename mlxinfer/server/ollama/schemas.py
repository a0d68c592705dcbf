"""What a request to Ollama's API may hold."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.openai.fields import RequestFields, Strict
from mlxinfer.types import MAX_GRAMMAR_BYTES, MAX_TOP_LOGPROBS

MAX_TOOLS = 256
MAX_INPUTS = 2048
Ids = Annotated[list[Any], Field(max_length=0)]
"""A list that has to be empty: images, a context."""


class _Asks(RequestFields):
    # The prompt is never truncated and the context never shifted: one that is too long is an error.
    harmless: ClassVar[frozenset[str]] = frozenset({"shift", "truncate"})

    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class Generates(_Asks):
    """What /api/chat and /api/generate share."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def streams(self) -> bool:
        """They do unless told not to."""
        return self.stream is not False

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CalledFunction(Strict):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class ToolCall(Strict):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    images: Ids | None = None


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and (size := len(json.dumps(schema))) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"the schema has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are read")
        return schema


class Tool(Strict):
    function: Function
    type: Literal["function"] = "function"


class ChatRequest(Generates):
    messages: list[Message] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class GenerateRequest(Generates):
    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context": ([],),
        "height": (0,),
        "images": ([],),
        "steps": (0,),
        "suffix": ("",),
        "template": ("",),
        "width": (0,),
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class EmbedRequest(_Asks):
    harmless: ClassVar[frozenset[str]] = frozenset()

    input: Any = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    def texts(self) -> list[str]:
        """Raises InvalidRequestError."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError("input must be a string or a list of strings", param="input")
        if len(texts) > MAX_INPUTS:
            raise InvalidRequestError(f"input has {len(texts)} texts; at most {MAX_INPUTS}", param="input")
        return texts


class EmbeddingsRequest(_Asks):
    """The older form: one text."""

    prompt: str | None = None


class ShowRequest(RequestFields):
    harmless: ClassVar[frozenset[str]] = frozenset({"options", "verbose"})
    off: ClassVar[dict[str, tuple[Any, ...]]] = {"system": ("",), "template": ("",)}

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""
