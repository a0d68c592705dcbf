"""Ollama's ways to say how to generate: `options`, `format`, `keep_alive` and `think`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.openai.structured import schema_grammar
from mlxinfer.server.shapes import renamed
from mlxinfer.types import Grammar, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Options that are honoured as they are, and what we call them."""
NAMES = {
    **{ours: f"options.{theirs}" for theirs, ours in NUMBERS.items()},
    "max_tokens": "options.num_predict",
    "top_k": "options.top_k",
    "seed": "options.seed",
    "stop": "options.stop",
    "grammar": "format",
    "response_format": "format",
}
MAX_OPTIONS = 64
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEP = re.compile(r"([0-9]{1,20}(?:\.[0-9]{0,20})?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?(?:{_STEP.pattern})+")
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}(?:\.[0-9]{0,20})?")
MAX_DURATION_CHARS = 64


def sampling(
    options: Mapping[str, Any], form: str | dict[str, Any] | None, logprobs: int | None
) -> tuple[SamplingParams, tuple[str, ...]]:
    """(parameters, names of the options that nothing heeds). Raises InvalidRequestError."""
    if len(options) > MAX_OPTIONS:
        raise InvalidRequestError(f"options has {len(options)} names; at most {MAX_OPTIONS}", param="options")
    given = {name: value for name, value in options.items() if value is not None}
    values: dict[str, Any] = {ours: given[theirs] for theirs, ours in NUMBERS.items() if theirs in given}
    values["max_tokens"] = _limit(_integer(given, "num_predict"))
    top_k = _integer(given, "top_k")
    # More than any vocabulary is all of it; the arrays behind hold 32 bits.
    values["top_k"] = None if top_k is None else min(top_k, 2**31 - 1)
    seed = _integer(given, "seed")
    values["seed"] = None if seed == -1 else seed
    values["stop"] = _stop(given.get("stop"))
    try:
        params = SamplingParams(**values, logprobs=logprobs, grammar=_grammar(form))
    except InvalidRequestError as error:
        raise renamed(error, NAMES) from None
    honoured = {*NUMBERS, "num_predict", "top_k", "seed", "stop"}
    # They end up in a header, which must not end with a space.
    return params, tuple(f"options.{ascii(name)[1:-1][:40].strip()}" for name in given if name not in honoured)


def _integer(options: Mapping[str, Any], name: str) -> int | None:
    """Ollama takes 40.0 for 40, and clients send it."""
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"options.{name} must be an integer, not {value!r:.80}", param=f"options.{name}")
    return value


def _limit(num_predict: int | None) -> int | None:
    """-1 is without end and -2 up to the end of the context, which is the same here."""
    return None if num_predict in (-1, -2) else num_predict


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise InvalidRequestError("options.stop must be a string or a list of strings", param="options.stop")
    return tuple(strings)


def _grammar(form: str | dict[str, Any] | None) -> Grammar | None:
    if form is None or form == "":
        return None
    if form == "json":
        return Grammar("json_object")
    if isinstance(form, str):
        raise InvalidRequestError(f'format is {form!r:.40}; it must be "json" or a JSON schema', param="format")
    return schema_grammar("format", form)


def keep_seconds(value: float | str | None) -> float | None:
    """`keep_alive` in seconds: a number of them, or Go's notation ("5m", "1h30m"); negative: infinity; None: not said.

    Raises InvalidRequestError.
    """
    if value is None:
        return None
    seconds = _duration(value) if isinstance(value, str) else float(value)
    return math.inf if seconds < 0 else seconds


def _duration(text: str) -> float:
    if len(text) <= MAX_DURATION_CHARS:
        if _NUMBER.fullmatch(text):
            return float(text)
        if _DURATION.fullmatch(text):
            total = sum(float(number) * _UNITS[unit] for number, unit in _STEP.findall(text))
            return -total if text.startswith("-") else total
    raise InvalidRequestError(
        f'keep_alive is {text!r:.80}; it must be a number of seconds or a duration like "5m" or "1h30m", 0 to unload '
        "after the answer, negative to keep the model",
        param="keep_alive",
    )


def think_kwargs(think: bool | str | None) -> dict[str, Any]:
    """What the chat template is told of `think`: a switch, or how much."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    return {"enable_thinking": True, "reasoning_effort": think}
