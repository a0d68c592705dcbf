"""Requests, steps and what they gave, as JSON between engine and ranks. No pickle: every field is named here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from mlxinfer.distributed.frames import ChannelError
from mlxinfer.engine.rows import Outputs, RowSpec
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.steps import DecodeRow, PrefillChunk, Release, Start, Step
from mlxinfer.types import Grammar, TokenLogprob

PREFIX_OPS = {"cut": 4, "left": 3, "running": 3, "state": 2}
"""What may be done to what the prefix cache holds, and how many numbers each takes."""


@dataclass(slots=True)
class Restored:
    """What a row starts from: spans one after the other, and a state."""

    spans: list[int]
    state: int | None
    length: int


@dataclass(slots=True)
class PrefixOps:
    """What ranks do with what their prefix caches hold, around one step. Operations are (name, *numbers)."""

    before: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    restore: dict[str, Restored] = field(default_factory=dict[str, Restored])
    """By request, as it starts."""
    leave: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    """By request, as it ends."""
    checkpoint: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    """By request, after its chunk."""
    free: set[int] = field(default_factory=set[int])
    """Let go of after the step."""

    @property
    def empty(self) -> bool:
        return not (self.before or self.restore or self.leave or self.checkpoint or self.free)


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


def prefixes_out(ops: PrefixOps) -> dict[str, Any]:
    """What is to be done with prefixes; parts that are empty are left out."""
    body: dict[str, Any] = {
        "before": ops.before,
        "restore": {name: list(_values(one)) for name, one in ops.restore.items()},
        "leave": ops.leave,
        "checkpoint": ops.checkpoint,
        "free": sorted(ops.free),
    }
    return {name: part for name, part in body.items() if part}


def prefixes_in(body: Any) -> PrefixOps:
    """Raises ChannelError for anything else."""
    try:
        restore = {
            name: Restored(list(map(int, spans)), None if state is None else int(state), int(length))
            for name, (spans, state, length) in body.get("restore", {}).items()
        }
        leave, checkpoint = (
            {name: _ops_in(ops) for name, ops in body.get(part, {}).items()} for part in ("leave", "checkpoint")
        )
        return PrefixOps(
            _ops_in(body.get("before", ())), restore, leave, checkpoint, set(map(int, body.get("free", ())))
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ChannelError(f"a message is nothing to do with prefixes: {error}") from error


def _ops_in(body: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for name, *numbers in body:
        if PREFIX_OPS[name] != len(numbers):
            raise ValueError(f"{name} takes {PREFIX_OPS[name]} numbers")
        found.append((name, *map(int, numbers)))
    return found


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
