"""Requests, steps and what they gave, as JSON between engine and ranks. No pickle: every field is named here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mlxinfer.distributed.frames import ChannelError
from mlxinfer.engine.rows import Outputs, RowSpec
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.steps import DecodeRow, PrefillChunk, Release, Start, Step
from mlxinfer.types import Grammar, TokenLogprob

_PARTS: dict[str, Any] = {"release": Release, "start": Start, "prefill": PrefillChunk, "decode": DecodeRow}


def step_out(step: Step) -> dict[str, Any]:
    """A step; parts that are empty are left out."""
    body: dict[str, Any] = {"number": step.number}
    if step.adapter:
        body["adapter"] = step.adapter
    for name in _PARTS:
        if parts := getattr(step, name):
            body[name] = [list(_values(part)) for part in parts]
    return body


def step_in(body: Any) -> Step:
    """Raises ChannelError for what is no step."""
    try:
        parts = {name: tuple(kind(*map(_tuples, part)) for part in body.get(name, ())) for name, kind in _PARTS.items()}
        return Step(int(body["number"]), **parts, adapter=str(body.get("adapter", "")))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ChannelError(f"a message is no step: {error}") from error


def spec_out(spec: RowSpec, grammar: Grammar | None) -> dict[str, Any]:
    """A request as the ranks are told of it."""
    body = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.name != "sampling"}
    body["sampling"] = list(_values(spec.sampling))
    if grammar is not None:
        body["grammar"] = [grammar.kind, grammar.text]
    return body


def spec_in(body: Any) -> tuple[RowSpec, Grammar | None]:
    """Raises ChannelError for what is no request."""
    try:
        held = dict(body)
        grammar = held.pop("grammar", None)
        sampling = RowSampling(*map(_tuples, held.pop("sampling")))
        held["prompt_token_ids"] = tuple(map(int, held["prompt_token_ids"]))
        return RowSpec(sampling=sampling, **held), None if grammar is None else Grammar(*grammar)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ChannelError(f"a message is no request: {error}") from error


def outputs_out(out: Outputs) -> dict[str, Any]:
    """What a step gave."""
    body: dict[str, Any] = {"tokens": out.tokens}
    if out.complete:
        body["complete"] = sorted(out.complete)
    if out.errors:
        body["errors"] = out.errors
    if out.logprobs:
        body["logprobs"] = {name: _logprob_out(one) for name, one in out.logprobs.items()}
    if out.prompts:
        body["prompts"] = {
            name: [start, [_logprob_out(one) for one in found]] for name, (start, found) in out.prompts.items()
        }
    return body


def outputs_in(body: Any) -> Outputs:
    """Raises ChannelError for what are no outputs."""
    try:
        return Outputs(
            [int(token) for token in body["tokens"]],
            {name: _logprob_in(one) for name, one in body.get("logprobs", {}).items()},
            set(body.get("complete", ())),
            dict(body.get("errors", {})),
            {
                name: (int(start), [_logprob_in(one) for one in found])
                for name, (start, found) in body.get("prompts", {}).items()
            },
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ChannelError(f"a message is no outputs: {error}") from error


def _values(row: Any) -> Any:
    """Of a dataclass's fields, in order."""
    return (getattr(row, field.name) for field in dataclasses.fields(row))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _logprob_out(one: TokenLogprob) -> list[Any]:
    return [one.token_id, _number(one.logprob), [[token, _number(value)] for token, value in one.top]]


def _logprob_in(body: Any) -> TokenLogprob:
    token, value, top = body
    return TokenLogprob(int(token), _read(value), tuple((int(one), _read(held)) for one, held in top))


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


def _read(value: float | str) -> float:
    return float(value)
