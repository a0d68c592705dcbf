"""Requests, steps and outputs survive JSON, and what is none of these is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest

from mlxinfer.distributed import wire
from mlxinfer.distributed.frames import ChannelError
from mlxinfer.engine.rows import Outputs, RowSpec
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.steps import DecodeRow, PrefillChunk, Release, Start, Step
from mlxinfer.types import Grammar, TokenLogprob


def through(body: Any) -> Any:
    return json.loads(json.dumps(body, allow_nan=False))


def test_a_step_with_every_part_survives() -> None:
    step = Step(
        7,
        (Release("a", (1, 2), final=False), Release("b")),
        (Start("c", 5, "d", (9,)), Start("e")),
        (PrefillChunk("c", 0, 64, checkpoint=True),),
        (DecodeRow("f", 3),),
        "style",
    )
    assert wire.step_in(through(wire.step_out(step))) == step
    assert wire.step_in(through(wire.step_out(Step(1)))) == Step(1)


def test_every_field_of_a_request_survives() -> None:
    sampling = RowSampling(0.5, 0.9, 40, 0.1, 1.1, 0.2, 0.3, ((5, -1.0), (6, 2.5)))
    spec = RowSpec("id", (1, 2, 3), sampling, 2**63, "key", 3, 2, "style")
    assert not [f.name for f in dataclasses.fields(spec) if f.name != "sampling" and not getattr(spec, f.name)]
    grammar = Grammar("json_schema", '{"type": "object"}')
    assert wire.spec_in(through(wire.spec_out(spec, grammar))) == (spec, grammar)
    assert wire.spec_in(through(wire.spec_out(spec, None))) == (spec, None)


def test_what_a_step_gave_survives_infinity_too() -> None:
    logprob = TokenLogprob(3, -math.inf, ((3, -0.5), (4, -math.inf)))
    out = Outputs([1, 2], {"a": logprob}, {"b"}, {"c": "stuck"}, {"d": (1, [logprob])})
    assert wire.outputs_in(through(wire.outputs_out(out))) == out
    assert wire.outputs_in(through(wire.outputs_out(Outputs()))) == Outputs()


def test_what_becomes_of_prefixes_survives() -> None:
    ops = wire.PrefixOps(
        [("cut", 1, 30, 2, 3)],
        {"a": wire.Restored([2, 7], None, 50), "b": wire.Restored([], 8, 12)},
        {"c": [("state", 9, 20), ("left", 10, 5, 20)]},
        {"d": [("running", 11, 0, 40)]},
        {1, 5},
    )
    assert wire.prefixes_in(through(wire.prefixes_out(ops))) == ops
    assert wire.prefixes_in(through(wire.prefixes_out(wire.PrefixOps()))) == wire.PrefixOps()
    for wrong in ({"before": [["cut", 1]]}, {"leave": {"a": [["burn", 1]]}}, {"restore": {"a": [1]}}, {"free": "x"}):
        with pytest.raises(ChannelError):
            wire.prefixes_in(wrong)


def test_what_is_no_message_is_refused_whatever_it_is() -> None:
    rng = random.Random(3)
    values: list[Any] = [None, 1, "x", [], {}, [[1]], {"number": "x"}, {"number": 1, "start": [[1, 2, 3, 4, 5, 6]]}]
    refused = 0
    for read in (wire.step_in, wire.spec_in, wire.outputs_in, wire.prefixes_in):
        for value in [*values, *({rng.choice(["number", "tokens", "start", "sampling"]): v} for v in values)]:
            try:
                read(value)
            except ChannelError:
                refused += 1
    assert refused > 30


@pytest.mark.parametrize("kind", [Step, RowSpec, RowSampling, Outputs, Release, Start, PrefillChunk, DecodeRow])
def test_no_field_is_added_without_a_look_at_the_wire(kind: Any) -> None:
    known = {
        Step: 6, RowSpec: 8, RowSampling: 8, Outputs: 5, Release: 3, Start: 4, PrefillChunk: 4, DecodeRow: 2,
    }  # fmt: skip
    assert len(dataclasses.fields(kind)) == known[kind]
