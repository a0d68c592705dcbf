"""Every architecture that mlx-lm can split, over real ranks: the greedy tokens of one process.

A seeded slice; all of them with `-m slow`, some ten minutes on two cores.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.cluster.architectures import SAME, WAYS, Suite, cases, cell, read_table

if TYPE_CHECKING:
    from collections.abc import Iterator

# One for each mechanism: windows and sinks, recurrent states, padded views, one row at a time.
REPRESENTATIVE = {
    ("gpt_oss", "TP2"),
    ("qwen3_5", "TP4"),
    ("deepseek_v3", "PP2"),
    ("minimax_m3_vl", "PP2"),
    ("qwen3_next", "PP3"),
    ("kimi_k3", "TP2 x PP2"),
}
MORE = 4  # drawn with SEED from the rest
SEED = 5


def pairs() -> list[object]:
    """Each case and way as a pytest parameter; what is beyond the slice is marked slow."""
    table = read_table()
    every = [(case, way.name) for case in table for way in WAYS]
    rest = [(case, way) for case, way in every if table[case][way] == SAME and (case, way) not in REPRESENTATIVE]
    chosen = REPRESENTATIVE | set(random.Random(SEED).sample(rest, MORE))
    return [
        pytest.param(*pair, id="-".join(pair), marks=[] if pair in chosen else [pytest.mark.slow]) for pair in every
    ]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    made = Suite(tmp_path_factory.mktemp("architectures"))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("case", "way"), pairs())
def test_ranks_say_what_one_process_says_or_are_refused(case: str, way: str, suite: Suite) -> None:
    (outcome,) = suite.outcomes(case, tuple(one for one in WAYS if one.name == way)).values()
    assert outcome == SAME or outcome.startswith(("refused: ", "needs Metal"))
    assert cell(outcome) == read_table()[case][way], "run `python -m tests.cluster.architectures`"


def test_the_table_has_every_architecture_that_can_be_split() -> None:
    assert list(read_table()) == list(cases())
