"""Plain data that crosses the rooms: sampling parameters, usage, timings, deltas, replies. No arrays here."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mlxinfer.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]
Message = Mapping[str, Any]
"""One chat message: `role` ("system", "user", "assistant" or "tool") and `content`."""

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]

MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 1 << 16
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 512
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a reply must be."""

    kind: GrammarKind
    text: str = ""
    """A JSON schema as JSON, a regular expression, a Lark grammar as llguidance reads it, or choices as a JSON list of
    strings; nothing for "json_object"."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise InvalidRequestError(
                f"a grammar's kind is {self.kind!r:.80}; it must be one of {kinds}", param="grammar"
            )
        if not isinstance(self.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequestError("a grammar's text must be a string", param="grammar")
        size = len(self.text.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            message = f"the {self.kind} grammar has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are read"
            raise InvalidRequestError(message, param="grammar")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was to the model itself, before bias, penalties and temperature. Natural logarithms."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob) of the likeliest tokens, the likeliest first."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    None means: what the model's own `generation_config.json` says, else the default in brackets. Filters are applied
    in the order logit_bias, penalties, temperature, top_k, top_p, min_p (the order of transformers).
    """

    max_tokens: int | None = None
    """Tokens to generate at most [up to the end of the context]."""
    temperature: float | None = None
    """0 is greedy [0.7]."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this much probability; 0 keeps the likeliest one [1.0]."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all [0]."""
    min_p: float | None = None
    """Keep tokens at least this likely relative to the likeliest [0.0]."""
    repetition_penalty: float | None = None
    """Divide positive and multiply negative logits of tokens in prompt or output [1.0], as in CTRL (2019)."""
    presence_penalty: float | None = None
    """Subtracted once from the logit of every token in the output [0.0]."""
    frequency_penalty: float | None = None
    """Subtracted per occurrence in the output [0.0]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to logits, by token id."""
    seed: int | None = None
    """Same seed, same text, alone or in any batch (exact in float32) [random]."""
    stop: tuple[str, ...] = ()
    """The text ends just before the first of these strings."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token; for benchmarks."""
    logprobs: int | None = None
    """Report each token's log probability, and those of this many of the likeliest tokens beside it, 0 to 20 [none]."""
    grammar: Grammar | None = None
    """Only text of this grammar is generated [any text]."""

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _check_stop(self.stop)
        _check_logit_bias(self.logit_bias)

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill each None from `defaults`; what is None there too stays None."""
        fills = {
            f.name: getattr(defaults, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) is None and getattr(defaults, f.name) is not None
        }
        return dataclasses.replace(self, **fills)


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r:.80}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} is {_short(value)}; it must be {limit}", param=name)


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {value!r:.80}", param=name)
    if not (low <= value <= high) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} is {_short(value)}; it must be between {low:g} and {high:g}", param=name)


def _check_stop(stop: object) -> None:
    if not isinstance(stop, tuple) or any(not isinstance(s, str) for s in stop):  # pyright: ignore[reportUnknownVariableType]
        raise InvalidRequestError("stop must be a tuple of strings", param="stop")
    strings: tuple[str, ...] = stop  # pyright: ignore[reportUnknownVariableType]
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS}", param="stop")
    for text in strings:
        if not text or len(text) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"a stop string has {len(text)} characters; it must have 1 to {MAX_STOP_CHARS}", param="stop"
            )


def _check_logit_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
    items: Mapping[object, object] = bias  # pyright: ignore[reportUnknownVariableType]
    if len(items) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias has {len(items)} ids; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    for token, value in items.items():
        _check_int("logit_bias", token, 0, 2**31 - 1)
        _check_float("logit_bias", value, -100.0, 100.0)


def _short(value: int | float) -> str:
    """A number for a message; Python refuses to print integers beyond 4300 digits."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >= 2**128 else str(value)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    reasoning_tokens: int = 0
    """Of the completion's, those that think; known to the server only, which tells them apart."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one request's time went, in seconds."""

    queue_s: float = 0.0
    """Waiting before the first work on it."""
    ttft_s: float = 0.0
    """Time to first token, counted from submission."""
    total_s: float = 0.0
    """From submission to the last token."""
    prefill_tok_s: float = 0.0
    """Prompt tokens per second between first work and first token."""
    decode_tok_s: float = 0.0
    """Output tokens per second after the first one; 0 when there is none."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a reply. Exactly one delta of a stream has a finish_reason, and it is the last."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, when they were asked for."""
    stop_string: str | None = None
    """On the last delta: the stop string that ended the text."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    """Set on the last delta."""
    timings: Timings | None = None
    """Set on the last delta."""


class Reply(str):
    """The text of a reply; it is a string, and carries how it came about.

    Attributes: `usage` (Usage), `timings` (Timings), `finish_reason`, `token_ids`, `logprobs`, `model`.
    """

    usage: Usage
    timings: Timings
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each of `token_ids`, when they were asked for."""
    model: str

    def __new__(
        cls,
        text: str = "",
        *,
        usage: Usage | None = None,
        timings: Timings | None = None,
        finish_reason: FinishReason = "stop",
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        model: str = "",
    ) -> Reply:
        self = super().__new__(cls, text)
        self.usage = usage or Usage()
        self.timings = timings or Timings()
        self.finish_reason = finish_reason
        self.token_ids = tuple(token_ids)
        self.logprobs = tuple(logprobs)
        self.model = model
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # str's own reduce would drop the attributes and call __new__ without keywords.
        return (str.__new__, (Reply, str(self)), self.__dict__)

    @property
    def stats(self) -> str:
        """One line: tokens, speed, time to first token and why it ended."""
        t, u = self.timings, self.usage
        rate = f"{t.decode_tok_s:.1f} tok/s" if t.decode_tok_s else "-"
        return (
            f"{u.prompt_tokens} prompt + {u.completion_tokens} new tokens · {rate} · "
            f"TTFT {t.ttft_s:.2f} s · {self.finish_reason}"
        )

    def _repr_markdown_(self) -> str:
        """Shown by Jupyter: the reply as Markdown, a line of figures under it."""
        return f"{self}\n\n<sub>{html.escape(self.model)} · {self.stats}</sub>"


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """One step of a long job: a download, a load, a conversion."""

    phase: Literal["resolve", "download", "verify", "unpack", "build", "load", "write"]
    done: int = 0
    """Bytes so far; of a build, files."""
    total: int | None = None
    """In all, when known."""
    label: str = ""
    """The file or model at work."""


Progress = Callable[[ProgressEvent], None]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is, for `show`, `/v1/models` and the notebook."""

    name: str
    model_type: str
    source: str
    """Where it came from: a path, a hub id or a package."""
    context_length: int
    vocab_size: int
    num_parameters: int
    weight_bytes: int
    dtype: str
    quantization: str
    """For example "affine 4-bit, group 32", or "none"."""
    tier: str
    """How it batches: "ragged", "batched-state" or "sequential"; "embedding" or "reranker" for what writes no text."""
    has_chat_template: bool
    kv_quantization: str = "none"
    """Of keys and values: for example "8-bit, group 64, in 5 of 6 layers", or "none"."""
    makes: Literal["text", "embeddings", "scores"] = "text"
    """Scores: it reranks."""
