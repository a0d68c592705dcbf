"""How likely tokens were: against the model's own logits, in every company."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

import mlxinfer
from mlxinfer import InvalidRequestError
from mlxinfer.engine.logprobs import Logprobs
from mlxinfer.types import Grammar, SamplingParams, TokenLogprob
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from mlxinfer import LLM

TEXT = "the quick brown fox jumps over the lazy dog and goes on until the text is long enough for several chunks"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")
    with mlxinfer.load(str(folder), max_num_seqs=4, prefill_chunk=16) as model:
        yield model


def reference(llm: LLM, ids: list[int]) -> NDArray[np.float64]:
    """log softmax of the model's logits after each of `ids`, [L, vocab]."""

    def run() -> NDArray[np.float64]:
        runner = llm._engine.runner
        logits = runner.forward([runner.new_sequence()], [ids])[0]
        return np.array(logits).astype(np.float64)

    logits = llm._engine.thread.call(run)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def check(found: TokenLogprob, expected: NDArray[np.float64], token: int, count: int) -> None:
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-4)
    assert [t for t, _ in found.top] == np.argsort(-expected, kind="stable")[:count].tolist()
    np.testing.assert_allclose([p for _, p in found.top], np.sort(expected)[::-1][:count], atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_each_token_has_the_probability_the_model_gave_it(llm: LLM, count: int) -> None:
    ids = llm.tokenizer.encode(TEXT)
    # Temperature, bias and penalties choose; what is reported is the model's own.
    reply = llm.generate(
        ids, max_tokens=9, temperature=1.3, seed=4, logprobs=count, logit_bias={3: 2.0}, repetition_penalty=1.5,
        ignore_eos=True,
    )  # fmt: skip
    assert len(reply.logprobs) == len(reply.token_ids) == 9
    expected = reference(llm, [*ids, *reply.token_ids])
    for i, token in enumerate(reply.token_ids):
        check(reply.logprobs[i], expected[len(ids) + i - 1], token, count)


def test_nothing_is_reported_unasked_and_the_text_is_the_same(llm: LLM) -> None:
    without, beside = (llm.generate(TEXT, max_tokens=9, temperature=1, seed=2, logprobs=n) for n in (None, 3))
    assert without == beside
    assert without.logprobs == ()


def test_rows_of_one_batch_get_what_each_asked_for(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    params = [
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=count, grammar=grammar)
        for count, grammar in ((None, None), (2, None), (0, Grammar("regex", "[ab]{5}")), (7, None))
    ]
    replies = [g.result() for g in [llm.submit(ids[i:], p) for i, p in enumerate(params)]]
    for i, (reply, p) in enumerate(zip(replies, params, strict=True)):
        assert len(reply.logprobs) == (0 if p.logprobs is None else len(reply.token_ids))
        if p.logprobs is not None:
            expected = reference(llm, [*ids[i:], *reply.token_ids])
            for j, token in enumerate(reply.token_ids):
                check(reply.logprobs[j], expected[len(ids) - i + j - 1], token, p.logprobs)


def test_a_prompt_is_scored_whole_whatever_the_cache_holds_and_who_else_runs(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    assert len(ids) > 40  # several chunks of 16
    expected = reference(llm, ids)
    others = [llm.submit(ids, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)) for _ in range(2)]
    for _ in range(2):
        generation = llm.submit(ids, SamplingParams(max_tokens=1, temperature=0), prompt_logprobs=3)
        reply = generation.result()
        assert reply.usage.cached_tokens == 0
        scored = generation.prompt_logprobs
        assert scored is not None
        assert scored[0] is None
        assert len(scored) == len(ids)
        for i, found in enumerate(scored[1:]):
            assert found is not None
            check(found, expected[i], ids[i + 1], 3)
    assert others[0].result() == others[1].result()


def test_a_prompt_of_one_token_has_no_probabilities(llm: LLM) -> None:
    generation = llm.submit([5], SamplingParams(max_tokens=1, temperature=0), prompt_logprobs=0)
    generation.result()
    assert generation.prompt_logprobs == (None,)


@pytest.mark.parametrize("count", [-1, 21])
def test_more_than_twenty_are_not_reported(llm: LLM, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{count}"):
        llm.submit([5], SamplingParams(), prompt_logprobs=count)
    with pytest.raises(InvalidRequestError, match=f"logprobs is {count}"):
        SamplingParams(logprobs=count)


def test_all_of_a_small_vocabulary_can_be_asked_for() -> None:
    logits = mx.array([[0.0, 2.0, 1.0]])
    (found,) = Logprobs.of(logits, mx.array([2]), [20]).read()
    assert [t for t, _ in found.top] == [1, 2, 0]
    assert found.logprob == pytest.approx(found.top[1][1])
    assert sum(np.exp(p) for _, p in found.top) == pytest.approx(1, abs=1e-6)
