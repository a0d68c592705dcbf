"""What a request may hold. A field is honoured, or harmless and named in a header, or refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.state import PRIORITIES
from mlxinfer.types import SamplingParams

MAX_N = 8
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS_OR_IDS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _TOKEN_ID, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
    ]
}
"""For the OpenAPI document: what prompts and inputs of embeddings are."""
IGNORED_HEADER = "x-mlxinfer-ignored"

_UNION_TAGS = frozenset({"str", "int", "float", "bool", "none", "dict"})


class Strict(BaseModel):
    """No conversions, no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid")


class RequestFields(Strict):
    """A request's body. `parse` reads it by these two lists."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that change nothing about the answer; ignored, and named in the IGNORED_HEADER."""
    off: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported; these values, and null, ask for nothing and pass."""

    model: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted: nothing is obfuscated here."""


class SamplingFields(RequestFields):
    """How the next token is chosen and when to stop. None is the model's default."""

    # The bounds are SamplingParams' own, here for the OpenAPI document.
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-PRIORITIES, le=PRIORITIES)] | None = None
    """Before others in the queue; absent: what the header x-mlxinfer-priority says."""

    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field, its value)."""
        raise NotImplementedError

    def sampling(self, **more: Any) -> SamplingParams:
        """With `more` fields of SamplingParams. Raises InvalidRequestError naming the field that is out of range."""
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
                **more,
            )
        except InvalidRequestError as error:
            if error.param == "max_tokens":
                raise InvalidRequestError(str(error).replace("max_tokens", name), param=name) from None
            raise


class CompletionFields(SamplingFields):
    """What chat and text completions share."""

    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream_options: StreamOptions | None = None

    def token_limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


RequestT = TypeVar("RequestT", bound=RequestFields)


def parse(kind: type[RequestT], body: dict[str, Any]) -> tuple[RequestT, tuple[str, ...]]:
    """(the request, names of ignored fields). Raises InvalidRequestError naming the first field that is wrong."""
    taken: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if name in kind.model_fields:
            taken[name] = value
        elif name in kind.harmless:
            ignored.append(name)
        elif name not in kind.off:
            raise InvalidRequestError(f"unknown or unsupported field {name!r:.80}", param=_ascii(name))
        elif value is not None and not any(type(value) is type(off) and value == off for off in kind.off[name]):
            raise InvalidRequestError(f"{name} is not supported by this server; leave it out", param=name)
    return validated(kind, taken), tuple(ignored)


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(kind: type[ModelT], value: dict[str, Any], inside: str = "") -> ModelT:
    """`value` as a `kind`. Raises InvalidRequestError whose param is the path of what is wrong, under `inside`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        # Of an object of an unknown type, the type is what is wrong and not the fields it lacks.
        first = min(found, key=lambda one: one["loc"][-1:] != ("type",))
        where = _path(first["loc"], inside)
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequestError(f"{where}: {message}", param=where) from None
    except OverflowError:  # an integer of hundreds of digits where a float is wanted
        raise InvalidRequestError("a number is too large", param=inside or None) from None


def _path(location: tuple[int | str, ...], path: str) -> str:
    """messages[0].content out of ("messages", 0, "content", "str")."""
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
