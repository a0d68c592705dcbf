"""Step times are predicted from what was seen."""

import random

import pytest

from mlxinfer.engine.pace import FIRST_CHUNK, TRUST, Load, Pace


def truth(load: Load) -> float:
    """A machine: 46 ms a forward, 2 ms a prompt token, 6.5 ms a row, 20 ns a pair."""
    return 0.046 * load.forwards + 0.002 * load.tokens + 0.0065 * load.rows + 2e-8 * load.pairs


def learned(rng: random.Random, *, noise: float = 0.0) -> Pace:
    pace = Pace()
    for _ in range(60):
        tokens = rng.choice([0, 0, 20, 64])
        load = Load(1, tokens, rng.choice([0, 1, 4]), 500 * tokens)
        pace.observe(load, truth(load) * (1 + noise * rng.random()))
    return pace


def test_a_step_is_predicted_within_a_few_per_cent_once_some_were_seen():
    pace = learned(random.Random(0))
    for load in (Load(1, 0, 1, 500), Load(1, 40, 4, 22_000), Load(1, 100, 0, 50_000)):
        assert pace.seconds(load) == pytest.approx(truth(load), rel=0.1)


def test_a_chunk_that_is_chosen_takes_the_time_it_was_chosen_for():
    pace = learned(random.Random(1), noise=0.2)
    for rows, seconds in ((4, 0.16), (0, 0.2)):
        beside = Load(1, 0, rows, 0)
        size = pace.tokens_within(seconds, beside, 500)
        taken = truth(Load(1, size, rows, size * 500))
        assert 0.75 * seconds < taken < 1.1 * seconds


def test_equal_chunks_do_not_make_prompt_tokens_look_free():
    # 75 tokens in every step: forwards alone explain them all, and the next chunk would be of any size.
    pace = Pace()
    for _ in range(100):
        pace.observe(Load(1, 75, 0, 75 * 300), 0.2)
    assert pace.tokens_within(0.2, Load(1, 0, 0, 0), 300) <= 90


def test_a_chunk_is_never_far_beyond_what_was_seen():
    pace = Pace()
    pace.observe(Load(1, 40, 0, 0), 0.001)
    assert pace.tokens_within(10.0, Load(1, 0, 0, 0), 0) == TRUST * 40


def test_with_nothing_seen_the_first_chunk_is_small():
    assert Pace().tokens_within(10.0, Load(1, 0, 0, 0), 0) == FIRST_CHUNK


def test_a_step_that_was_noticed_too_late_weighs_no_more_than_others():
    pace = learned(random.Random(2))
    before = pace.seconds(Load(1, 0, 4, 0))
    pace.observe(Load(1, 0, 4, 0), 0.0005)
    assert pace.seconds(Load(1, 0, 4, 0)) > 0.7 * before


def test_a_machine_that_becomes_slow_is_noticed():
    pace = learned(random.Random(3))
    for _ in range(40):
        pace.observe(Load(1, 30, 4, 0), 3 * truth(Load(1, 30, 4, 0)))
        pace.observe(Load(1, 0, 4, 0), 3 * truth(Load(1, 0, 4, 0)))
    assert pace.seconds(Load(1, 0, 4, 0)) == pytest.approx(3 * truth(Load(1, 0, 4, 0)), rel=0.15)


def test_an_empty_step_teaches_nothing():
    pace = Pace()
    pace.observe(Load(0, 0, 0, 0), 1.0)
    assert pace.observed == 0
