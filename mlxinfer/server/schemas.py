"""What a request may hold. A field is honoured, or harmless and named in a header, or refused by its name."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mlxinfer.errors import InvalidRequestError
from mlxinfer.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_N = 8
MAX_CHOICES = 128
"""Prompts times n of one text completion."""
IGNORED_HEADER = "x-mlxinfer-ignored"

HARMLESS = frozenset(
    {
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user", "verbosity",
    }
)  # fmt: skip
"""Fields that change nothing about the text; ignored, and named in the IGNORED_HEADER of the answer."""

OFF: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
"""Fields that are not supported yet; these values, and null, ask for nothing and pass."""

TEMPLATE_RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "system",
        "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_TEXT = 256
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_UNION_TAGS = frozenset({"str", "int", "float", "bool", "none", "dict"})


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted: nothing is obfuscated here."""


class SamplingFields(_Strict):
    """What both kinds of completion share. None is the model's default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field, its value)."""
        return "max_tokens", self.max_tokens

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequestError naming the field that is out of range."""
        name, limit = self.token_limit()
        try:
            return SamplingParams(
                # -1 is "no limit", as LM Studio and Ollama have it.
                max_tokens=None if limit == -1 else limit,
                temperature=self.temperature,
                top_p=self.top_p,
                # More than any vocabulary is all of it; the arrays behind hold 32 bits.
                top_k=None if self.top_k is None else min(self.top_k, 2**31 - 1),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=_token_biases(self.logit_bias or {}),
                seed=self.seed,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                ignore_eos=bool(self.ignore_eos),
            )
        except InvalidRequestError as error:
            if error.param == "max_tokens":
                raise InvalidRequestError(str(error).replace("max_tokens", name), param=name) from None
            raise


class FunctionCall(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    # What a client that sends an answer back may leave in it, empty.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list) or not content:
            raise ValueError("must be a string or a list of text parts")
        for part in content:
            if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
                raise ValueError("each part must be an object with a type")
            if kind != "text":
                raise ValueError(f"a part is of type {kind!r:.40}; this model reads text only")
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise ValueError("a text part must have a string as its text, and nothing else")
        return content

    def for_template(self, index: int) -> dict[str, Any]:
        """The message as chat templates read it: without absent keys, tool arguments as objects."""
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidRequestError(
                f"messages[{index}].content is missing; only an assistant message with tool_calls may have none",
                param=f"messages[{index}].content",
            )
        message = self.model_dump(
            exclude_none=True, include={"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
        )
        if self.role == "developer":
            message["role"] = "system"
        message.setdefault("content", None)
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        return message


class ChatRequest(SamplingFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Handed to the chat template, where those that know it read it."""

    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().token_limit()
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; send one",
                param="max_tokens",
            )
        return "max_completion_tokens", self.max_completion_tokens

    def template_kwargs(self) -> dict[str, Any]:
        """Plain values for the chat template. Raises InvalidRequestError for a name or value that is not allowed."""
        kwargs = self.chat_template_kwargs or {}
        if len(kwargs) > MAX_TEMPLATE_KWARGS:
            raise _bad_kwargs(f"has {len(kwargs)} names; at most {MAX_TEMPLATE_KWARGS}")
        for name, value in kwargs.items():
            if not _IDENTIFIER.fullmatch(name) or name in TEMPLATE_RESERVED or name.endswith("_token"):
                raise _bad_kwargs(f"cannot set {name!r:.80}")
            if not isinstance(value, bool | int | float | str | None):
                raise _bad_kwargs(f"{name} must be a string, a number, true, false or null")
            if isinstance(value, str) and (len(value) > MAX_TEMPLATE_TEXT or "{{" in value or "{%" in value):
                raise _bad_kwargs(f"{name} must be plain text of at most {MAX_TEMPLATE_TEXT} characters")
        if self.reasoning_effort is not None:
            return {"reasoning_effort": self.reasoning_effort, **kwargs}
        return kwargs


class CompletionRequest(SamplingFields):
    prompt: Any = None

    def prompts(self) -> Sequence[str | list[int]]:
        """One entry per prompt: text, or token ids. Raises InvalidRequestError."""
        value = self.prompt
        if isinstance(value, str) or _is_ids(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise InvalidRequestError(
                "prompt must be a string, a list of strings, a list of token ids or a list of such lists; not empty",
                param="prompt",
            )
        if not (all(isinstance(p, str) for p in value) or all(_is_ids(p) for p in value)):
            raise InvalidRequestError(
                "prompt mixes kinds, or holds something else than strings or token ids", param="prompt"
            )
        if any(not p for p in value):
            raise InvalidRequestError("prompt is empty; at least one token is needed", param="prompt")
        if len(value) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(value)} prompts times n = {self.n or 1} are more than {MAX_CHOICES} choices", param="prompt"
            )
        return value


RequestT = TypeVar("RequestT", bound=SamplingFields)


def parse(kind: type[RequestT], body: dict[str, Any]) -> tuple[RequestT, tuple[str, ...]]:
    """(the request, names of ignored fields). Raises InvalidRequestError naming the first field that is wrong."""
    taken: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if name in kind.model_fields:
            taken[name] = value
        elif name in HARMLESS:
            ignored.append(name)
        elif name not in OFF:
            raise InvalidRequestError(f"unknown or unsupported field {name!r:.80}", param=_ascii(name))
        elif value is not None and not any(type(value) is type(off) and value == off for off in OFF[name]):
            raise InvalidRequestError(f"{name} is not supported by this server yet; leave it out", param=name)
    try:
        return kind.model_validate(taken), tuple(ignored)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = _path(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequestError(f"{where}: {message}", param=where) from None
    except OverflowError:  # an integer of hundreds of digits where a float is wanted
        raise InvalidRequestError("a number is too large", param=None) from None


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].content out of ("messages", 0, "content", "str")."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_TAGS or "[" in part:
            break
        else:
            path += f".{part}" if path else part
    return _ascii(path)


def _ascii(text: str) -> str:
    return ascii(text[:80])[1:-1]


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequestError(
                f"logit_bias: {key!r:.40} is not a token id; write it in digits without leading zeros",
                param="logit_bias",
            )
        found[int(key)] = value
    return found


def _arguments(text: str) -> Any:
    """Templates print a tool call's arguments as an object; what is not one stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _bad_kwargs(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"chat_template_kwargs {message}", param="chat_template_kwargs")
