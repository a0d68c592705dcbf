"""Sampling against distributions written out by hand, and batch against solo."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.engine.sampling import BatchSampler, RowSampling, RowState, uniform

VOCAB = 50


def draw(sampling: RowSampling, logits: list[float], u: float, prompt=(), output=()) -> int:
    state = RowState(sampling, prompt, len(logits), output)
    return BatchSampler([state])(mx.array([logits]), [u]).item()


def frequencies(sampling: RowSampling, logits: list[float], n: int = 4000) -> np.ndarray:
    """Sweep u over a grid: the share of each token is its probability, to 1/n."""
    rows = [RowState(sampling, (), len(logits)) for _ in range(n)]
    tokens = BatchSampler(rows)(mx.array([logits] * n), [(i + 0.5) / n for i in range(n)])
    return np.bincount(np.array(tokens), minlength=len(logits)) / n


def softmax(x):
    e = np.exp(np.array(x) - max(x))
    return e / e.sum()


def test_temperature_scales_the_logits():
    logits = [1.0, 2.0, 0.5, -1.0]
    expected = softmax([x / 0.7 for x in logits])
    assert np.allclose(frequencies(RowSampling(temperature=0.7), logits), expected, atol=1e-3)


def test_top_k_keeps_the_k_likeliest():
    expected = softmax([2.0, 1.0])
    got = frequencies(RowSampling(temperature=1.0, top_k=2), [1.0, 2.0, 0.5, -1.0])
    assert np.allclose(got, [expected[1], expected[0], 0, 0], atol=1e-3)


@pytest.mark.parametrize("top_k", [0, -1, 4, 10**9])
def test_top_k_of_nothing_or_of_more_than_the_vocabulary_keeps_all(top_k):
    logits = [1.0, 2.0, 0.5, -1.0]
    assert np.allclose(frequencies(RowSampling(temperature=1.0, top_k=top_k), logits), softmax(logits), atol=1e-3)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    # Probabilities 0.5, 0.3, 0.2: 0.5 is short of 0.6, so the second is kept and the third is not.
    logits = [math.log(p) for p in (0.3, 0.5, 0.2)]
    got = frequencies(RowSampling(temperature=1.0, top_p=0.6), logits)
    assert np.allclose(got, [0.375, 0.625, 0], atol=1e-3)


def test_top_p_of_zero_keeps_the_likeliest_token():
    assert frequencies(RowSampling(temperature=1.0, top_p=0.0), [1.0, 2.0, 0.5]).tolist() == [0, 1, 0]


def test_min_p_is_relative_to_the_likeliest():
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    got = frequencies(RowSampling(temperature=1.0, min_p=0.4), logits)
    assert np.allclose(got, [2 / 3, 1 / 3, 0], atol=1e-3)


def test_penalties_follow_their_formulas():
    logits = [2.0, -2.0, 1.0, 1.0]
    greedy = RowSampling(temperature=0.0)
    assert draw(greedy, logits, 0.0) == 0
    # 2.0 / 4 = 0.5 falls behind 1.0; prompt tokens count for the repetition penalty only.
    repeated = RowSampling(temperature=0.0, repetition_penalty=4.0)
    assert draw(repeated, logits, 0.0, prompt=[0]) == 2
    present = RowSampling(temperature=0.0, presence_penalty=1.5)
    assert draw(present, logits, 0.0, prompt=[0]) == 0
    assert draw(present, logits, 0.0, output=[0]) == 2
    frequent = RowSampling(temperature=0.0, frequency_penalty=0.6)
    assert draw(frequent, logits, 0.0, output=[0]) == 0
    assert draw(frequent, logits, 0.0, output=[0, 0]) == 2


def test_a_negative_logit_is_multiplied_by_the_repetition_penalty():
    sampling = RowSampling(temperature=0.0, repetition_penalty=2.0)
    assert draw(sampling, [-1.0, -1.5], 0.0, prompt=[0]) == 1


def test_logit_bias_is_added():
    sampling = RowSampling(temperature=0.0, logit_bias=((3, 5.0),))
    assert draw(sampling, [2.0, 1.0, 0.0, 0.0], 0.0) == 3


def test_penalties_see_the_tokens_drawn_so_far():
    state = RowState(RowSampling(temperature=0.0, presence_penalty=10.0), (), 4)
    sampler = BatchSampler([state])
    logits = mx.array([[4.0, 3.0, 2.0, 1.0]])
    assert [sampler(logits, [0.0]).item() for _ in range(4)] == [0, 1, 2, 3]


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    rng = np.random.default_rng(0)
    kinds = [
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.8),
        RowSampling(temperature=1.2, top_k=7),
        RowSampling(temperature=1.0, top_p=0.7, min_p=0.05),
        RowSampling(temperature=0.5, repetition_penalty=1.3, presence_penalty=0.4),
        RowSampling(temperature=0.0, logit_bias=((5, 3.0),)),
    ]
    for trial in range(30):
        chosen = [kinds[i] for i in rng.permutation(len(kinds))]
        logits = rng.normal(size=(len(chosen), VOCAB)).astype(np.float32) * 3
        us = rng.random(len(chosen)).astype(np.float32).tolist()
        states = [RowState(s, [1, 2, 3], VOCAB, output=[4, 5]) for s in chosen]
        together = BatchSampler(states)(mx.array(logits), us).tolist()
        alone = [draw(s, logits[i].tolist(), us[i], prompt=[1, 2, 3], output=[4, 5]) for i, s in enumerate(chosen)]
        assert together == alone, trial


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_draw_a_token_that_was_kept(u):
    logits = [-50.0, 3.0, 2.0, -80.0]
    assert draw(RowSampling(temperature=1.0, top_k=2), logits, u) in (1, 2)
    assert draw(RowSampling(temperature=1e-3), logits, u) == 1


def test_a_tiny_temperature_is_greedy_and_not_nan():
    assert draw(RowSampling(temperature=1e-30), [1.0, 5.0, 2.0], 0.999) == 1


def test_uniform_numbers_are_reproducible_distinct_and_below_one():
    numbers = [uniform(7, i) for i in range(2000)]
    assert numbers == [uniform(7, i) for i in range(2000)]
    assert numbers != [uniform(8, i) for i in range(2000)]
    assert 0 <= min(numbers) < max(numbers) < 1
    assert abs(float(np.mean(numbers)) - 0.5) < 0.03


def test_top_p_stops_exactly_where_the_sum_is_reached():
    # 0.5 + 0.25 reaches 0.75, so the third token is out; powers of two keep the sums exact.
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    got = frequencies(RowSampling(temperature=1.0, top_p=0.75), logits)
    assert np.allclose(got[:2], [2 / 3, 1 / 3], atol=1e-3)


def test_min_p_keeps_a_token_that_is_exactly_as_likely_as_asked():
    got = frequencies(RowSampling(temperature=1.0, min_p=0.5), [1.0, 1.0 + math.log(0.5) + 1e-4, -3.0])
    assert np.allclose(got, [2 / 3, 1 / 3, 0], atol=1e-3)


def test_top_p_counts_the_mass_that_top_k_left():
    # Of 0.4, 0.3, 0.2, 0.1 top_k 2 leaves 4/7 and 3/7; 4/7 is above 0.5, so only one token stays.
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert frequencies(RowSampling(temperature=1.0, top_k=2, top_p=0.5), logits).tolist() == [1, 0, 0, 0]


def test_different_seeds_and_positions_give_different_numbers_even_where_their_digits_join_alike():
    assert uniform(1, 23) != uniform(12, 3)
    assert len({uniform(s, p) for s in range(50) for p in range(50)}) > 2490
