"""The chunked supervised loss is the plain one: value, gradients, and much less memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxinfer import upstream
from mlxinfer.lora.losses import SupervisedLoss, chunked
from mlxinfer.lora.losses.log_probs import log_prob
from mlxinfer.lora.losses.split import Split
from tests import tiny
from tests.conformance.examine import tiny_model
from tests.unit.lora.losses.batches import collate, example, gradient, off_by, plain

# Tied and untied heads, capped, scaled, biased, wrapped; a cut, a masked and a nested one; recurrent layers.
CASES = (
    "llama",
    "llama/tied",
    "cohere",
    "gemma2",
    "gemma3",
    "granite",
    "gpt_oss",
    "deepseek_v3",
    "minicpm",
    "phi",
    "plamo",
    "phi3small",
    "qwen3_next",
    "rwkv7",
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "MIN_ROWS", 5)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 0)
    monkeypatch.setattr("mlxinfer.lora.attention.QUERY_BLOCK", 6)


def batch(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return collate([[example(rng, 16)], [example(rng, 11)]], 16)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_whole_logits(case: str) -> None:
    model = tiny_model(case)
    model.unfreeze()
    model.train()
    expected, theirs = gradient(model, plain, batch())
    found, ours = gradient(model, SupervisedLoss(), batch())
    assert found == pytest.approx(expected, rel=2e-6)
    assert off_by(ours, theirs) <= 2e-6


def frozen_but_layers(model: Any) -> None:
    model.freeze()
    for layer in model.layers:
        layer.unfreeze()


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("training", [True, False])
def test_with_a_frozen_head_gradients_are_the_same_in_either_mode(case: str, training: bool) -> None:
    model = tiny_model(case)
    frozen_but_layers(model)
    model.train(training)
    _, theirs = gradient(model, plain, batch())
    _, ours = gradient(model, SupervisedLoss(), batch())
    assert off_by(ours, theirs) <= 2e-6


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_head_is_run_apart_too(tied: bool) -> None:
    model = tiny.build_model(tiny.config(tie_word_embeddings=tied), scale=1.0)
    nn.quantize(model, group_size=32, bits=4)
    model.freeze()
    for layer in model.layers:
        layer.input_layernorm.unfreeze()
    model.train()
    assert not Split(model).whole
    _, theirs = gradient(model, plain, batch())
    _, ours = gradient(model, SupervisedLoss(), batch())
    assert off_by(ours, theirs) <= 2e-6


def test_a_new_adapter_on_the_head_gets_its_gradient() -> None:
    from mlx_lm.tuner.lora import LoRALinear

    model = tiny.build_model(tiny.config())
    model.freeze()
    model.lm_head = LoRALinear.from_base(model.lm_head, r=4)
    model.lm_head.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    model.train()
    loss = SupervisedLoss()
    for _ in range(2):
        _, theirs = gradient(model, plain, batch())
        _, ours = gradient(model, loss, batch())
        assert off_by(ours, theirs) <= 2e-6
        # In the first round A has no slope, for B is zero.
        model.lm_head.lora_b = mx.random.normal(model.lm_head.lora_b.shape, key=mx.random.key(1))
    assert mx.any(ours["lm_head.lora_a"] != 0).item()


def test_what_is_trained_may_change_between_two_calls() -> None:
    model = tiny_model("llama")
    model.train()
    loss = SupervisedLoss()
    frozen_but_layers(model)
    gradient(model, loss, batch())
    model.unfreeze()
    _, theirs = gradient(model, plain, batch())
    _, ours = gradient(model, loss, batch())
    assert off_by(ours, theirs) <= 2e-6


def test_one_loss_serves_one_model_after_another() -> None:
    loss = SupervisedLoss()
    for case in ("llama", "gemma2", "llama"):
        model = tiny_model(case)
        found, _ = loss(model, batch())
        expected, _ = plain(model, batch())
        assert found.item() == pytest.approx(expected.item(), rel=2e-6)


def test_a_batch_without_supervised_tokens_gives_zero_and_a_zero_gradient() -> None:
    model = tiny_model("llama")
    model.train()
    rng = np.random.default_rng(0)
    value, slopes = gradient(model, SupervisedLoss(), collate([[example(rng, 8, prompt=8)]], 8))
    assert value == 0
    assert all(mx.all(slope == 0).item() for slope in slopes.values())


def test_the_head_sees_supervised_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    held = Split.head

    def head(self: Split, hidden: mx.array) -> mx.array:
        seen.append(hidden.shape[0])
        return held(self, hidden)

    model = tiny_model("llama")
    frozen_but_layers(model)
    model.train()
    loss = SupervisedLoss()
    gradient(model, loss, batch())
    monkeypatch.setattr(Split, "head", head)
    gradient(model, loss, batch())
    assert sum(seen) == batch().num_targets
    assert max(seen) <= 5


def test_a_model_that_is_no_body_with_a_head_is_run_whole() -> None:
    assert Split(tiny_model("plamo")).whole
    assert not Split(tiny_model("llama")).whole


def test_a_head_that_looks_at_its_neighbours_is_not_taken_apart() -> None:
    class Mixing(type(tiny_model("llama"))):
        def __call__(self, *args: Any, **options: Any) -> mx.array:
            logits = super().__call__(*args, **options)
            return logits + 0.1 * mx.roll(logits, 1, axis=1)

    model = tiny.build_model(tiny.config())
    model.__class__ = Mixing
    assert Split(model).whole
    model.train()
    _, theirs = gradient(model, plain, batch())
    _, ours = gradient(model, SupervisedLoss(), batch())
    assert off_by(ours, theirs) <= 2e-6


def test_modules_keep_class_and_mode() -> None:
    model = tiny.build_model(tiny.config())
    model.train()
    model.layers[0].eval()
    classes = [type(module) for module in model.modules()]
    gradient(model, SupervisedLoss(), batch())
    assert [type(module) for module in model.modules()] == classes
    assert model.training
    assert not model.layers[0].training


@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
def test_memory_grows_with_the_chunk_and_not_with_the_positions(trained: bool) -> None:
    model = tiny.build_model(tiny.config(vocab_size=20_000, num_hidden_layers=1), scale=1.0)
    if not trained:
        frozen_but_layers(model)
    model.train()
    loss = SupervisedLoss()
    rng = np.random.default_rng(0)

    def peak(positions: int) -> int:
        held = collate([[example(rng, positions, prompt=1)]], positions)
        gradient(model, loss, held)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        gradient(model, loss, held)
        return mx.get_peak_memory() - before

    small, large = peak(128), peak(640)
    # 512 more rows of float32 logits would be 41 MB.
    assert large - small < 512 * 20_000 * 4 / 2


def test_log_prob_and_its_slope_are_those_of_the_derived_form() -> None:
    logits = mx.random.normal((7, 50), key=mx.random.key(0)) * 5
    targets = mx.random.randint(0, 50, (7,), key=mx.random.key(1))
    seed = mx.random.normal((7,), key=mx.random.key(2))

    def derived(logits: mx.array) -> list[mx.array]:
        return [nn.log_softmax(logits)[mx.arange(7), targets]]

    values, slopes = mx.vjp(derived, [logits], [seed])
    found, ours = mx.vjp(lambda x: [log_prob(x, targets)], [logits], [seed])
    assert mx.allclose(found[0], values[0], rtol=1e-6, atol=1e-6).item()
    assert mx.allclose(ours[0], slopes[0], rtol=1e-6, atol=1e-6).item()


def test_an_infinite_logit_of_another_token_does_no_harm() -> None:
    logits = mx.array([[0.5, -mx.inf, 1.0]])
    value, slope = mx.value_and_grad(lambda x: log_prob(x, mx.array([2])).sum())(logits)
    assert np.isfinite(value.item())
    assert np.isfinite(np.array(slope)).all()


def test_upstream_routes_attention_once_however_often_it_is_asked() -> None:
    import mlx_lm.models.llama as module

    def takes(cache: object) -> bool:
        return cache == "mine"

    before = vars(module)["scaled_dot_product_attention"]
    try:
        for _ in range(3):
            upstream.route_attention(takes, lambda *_args, **_options: mx.array(7.0))
        routed = vars(module)["scaled_dot_product_attention"]
        assert routed.before is before
        q = mx.ones((1, 1, 2, 4))
        assert routed(q, q, q, "mine", scale=1.0, mask=None).item() == 7
        assert routed(q, q, q, None, scale=1.0, mask=None).shape == (1, 1, 2, 4)
    finally:
        vars(module)["scaled_dot_product_attention"] = before


def test_a_weight_weighs_its_position_in_sum_and_count() -> None:
    net, held = tiny_model("llama"), batch()
    total, count = SupervisedLoss()(net, held)
    halved = dataclasses.replace(held, weights=held.weights * 0.5)
    assert [value.item() for value in SupervisedLoss()(net, halved)] == pytest.approx(
        [total.item() / 2, count.item() / 2]
    )


def test_what_does_not_move_the_head_is_no_parameter_of_it() -> None:
    net = tiny.build_model(tiny.config(tie_word_embeddings=False), scale=1.0)
    net.freeze()
    net.model.embed_tokens.unfreeze()
    assert Split(net).parameters() == {}
    net.lm_head.unfreeze()
    assert list(Split(net).parameters()) == ["lm_head.weight"]
