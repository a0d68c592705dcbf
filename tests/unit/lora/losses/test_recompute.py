"""Gradient checkpointing changes memory and nothing else, and is gone afterwards."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.lora.losses import SupervisedLoss
from mlxinfer.lora.recompute import recomputed
from tests import tiny
from tests.conformance.examine import tiny_model
from tests.unit.lora.losses.batches import collate, example, gradient, off_by, plain


def batch(width: int = 24) -> Any:
    rng = np.random.default_rng(0)
    return collate([[example(rng, width)], [example(rng, width - 5)]], width)


@pytest.mark.parametrize(
    "case", ["llama", "llama/sliding", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma4_text"]
)
def test_gradients_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Attention in blocks of queries, with masks, sinks and additive scores among its arguments.
    monkeypatch.setattr("mlxinfer.lora.attention.QUERY_BLOCK", 6)
    model = tiny_model(case)
    model.unfreeze()
    model.train()
    _, expected = gradient(model, plain, batch())
    with recomputed(model):
        _, found = gradient(model, plain, batch())
        _, ours = gradient(model, SupervisedLoss(), batch())
    assert off_by(found, expected) <= 2e-6
    assert off_by(ours, expected) <= 2e-6


def test_classes_are_what_they_were_and_others_of_the_class_are_left_alone() -> None:
    one, other = (tiny.build_model(tiny.config()) for _ in range(2))
    own = type(one.layers[0])
    with recomputed(one):
        assert type(other.layers[0]) is own
        assert type(one.layers[0]) is not own
    assert all(type(layer) is own for layer in one.layers)
    with pytest.raises(ZeroDivisionError), recomputed(one):
        raise ZeroDivisionError
    assert all(type(layer) is own for layer in one.layers)


def test_five_runs_in_one_process_run_each_layer_equally_often() -> None:
    calls = [0]
    model = tiny.build_model(tiny.config())
    model.train()
    own: Any = type(model.layers[0])

    class Counting(own):
        def __call__(self, *args: Any, **options: Any) -> Any:
            calls[-1] += 1
            return own.__call__(self, *args, **options)

    for layer in model.layers:
        layer.__class__ = Counting
    loss = SupervisedLoss()
    loss(model, batch())
    calls.clear()
    for _ in range(5):
        calls.append(0)
        with recomputed(model), recomputed(model):
            gradient(model, loss, batch())
    # Once forward, once going back.
    assert calls == [2 * len(model.layers)] * 5


def test_memory_of_layers_and_scores_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.lora.attention.QUERY_BLOCK", 64)
    model = tiny.build_model(tiny.config(num_hidden_layers=12), scale=1.0)
    model.train()
    loss, held = SupervisedLoss(), batch(320)

    def peak() -> int:
        gradient(model, loss, held)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        gradient(model, loss, held)
        return mx.get_peak_memory() - before

    kept = peak()
    with recomputed(model):
        assert peak() < 0.6 * kept
    assert peak() == pytest.approx(kept, rel=0.1)
