"""Preference losses on a model with adapters, whose reference is the model with them switched off."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.losses import DistillLoss, DpoLoss, KtoLoss, OrpoLoss, SimpoLoss, mismatched
from mlxinfer.lora.losses.distill import _divergence
from mlxinfer.lora.losses.log_probs import Supervised
from mlxinfer.lora.losses.preference import _log_one_less
from mlxinfer.lora.types import Example, Judged
from tests import tiny
from tests.unit.lora.losses.batches import collate, example, gradient

if TYPE_CHECKING:
    from collections.abc import Iterator


def adapted(dropout: float = 0.0) -> Any:
    model = tiny.build_model(tiny.config())
    model.freeze()
    linear_to_lora_layers(model, 3, {"rank": 4, "scale": 2.0, "dropout": dropout})
    model.train()
    return model


@contextlib.contextmanager
def off(model: Any) -> Iterator[None]:
    layers = [module for module in model.modules() if "lora_b" in module]
    scales = [layer.scale for layer in layers]
    for layer in layers:
        layer.scale = 0.0
    yield
    for layer, scale in zip(layers, scales, strict=True):
        layer.scale = scale


def train_a_little(model: Any) -> None:
    changed = [
        (name, array + 0.3 * mx.random.normal(array.shape, key=mx.random.key(i)))
        for i, (name, array) in enumerate(tree_flatten(model.trainable_parameters()))  # type: ignore[arg-type]
    ]
    model.load_weights(changed, strict=False)


def answers(count: int = 4) -> list[Example]:
    rng = np.random.default_rng(0)
    return [example(rng, 8 + i) for i in range(count)]


def judged_batch(count: int = 4) -> Any:
    held = [Judged(e, i % 3 == 0) for i, e in enumerate(answers(count))]
    return collate(
        [[j.example] for j in held],
        16,
        wanted=mx.array([j.wanted for j in held]),
        mismatched=collate([[e] for e in mismatched(held)], 16),
    )


def test_dpo_is_ln_2_before_anything_is_learnt() -> None:
    model = adapted()
    total, count = DpoLoss(off)(model, collate([[e] for e in answers()], 16))
    assert count.item() == 2
    assert total.item() / 2 == pytest.approx(math.log(2), abs=1e-6)


def test_kto_is_half_of_the_weights_before_anything_is_learnt() -> None:
    total, count = KtoLoss(off, wanted_weight=3.0)(adapted(), judged_batch())
    assert count.item() == 4
    assert total.item() == pytest.approx(0.5 * (3 + 1 + 1 + 3), abs=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ktos_baseline_is_the_mean_over_mismatched_answers_and_never_below_0(sign: float) -> None:
    model, held, loss = adapted(), judged_batch(), KtoLoss(off, beta=0.7)

    def of_mismatched(net: Any, batch: Any) -> Any:
        return loss._answers(net, batch, Supervised(batch)).sum(), mx.array(1.0)

    slopes = gradient(model, of_mismatched, held.mismatched)[1]
    now: Any = dict(tree_flatten(model.trainable_parameters()))
    model.load_weights([(name, now[name] + sign * 0.01 * slope) for name, slope in slopes.items()], strict=False)

    def ratios(batch: Any) -> mx.array:
        supervised = Supervised(batch)
        now = loss._answers(model, batch, supervised)
        return now - loss._answers.of_reference(model, batch, supervised, off)

    mean = float(np.array(ratios(held.mismatched)).mean())
    z = max(mean, 0.0)
    assert (mean > 0) == (sign > 0)
    gain = 0.7 * (np.array(ratios(held)) - z)
    expected = 1 / (1 + np.exp(np.where(np.array(held.wanted), gain, -gain)))
    assert loss(model, held)[0].item() == pytest.approx(float(expected.sum()), rel=1e-4)


def test_ktos_baseline_has_no_dropout() -> None:
    model = adapted(dropout=0.5)
    train_a_little(model)
    held, loss = judged_batch().mismatched, KtoLoss(off)
    first, second = (loss._baseline(model, held) for _ in range(2))
    assert mx.array_equal(first, second).item()
    assert model.training


def test_what_teacher_and_student_both_rule_out_costs_nothing() -> None:
    teacher, student = mx.array([[0.0, 1.0, -math.inf]]), mx.array([[1.0, 1.0, -math.inf]])
    value, slope = mx.value_and_grad(lambda s: _divergence(teacher, s, 2.0).sum())(student)
    short, slope_of_two = mx.value_and_grad(lambda s: _divergence(teacher[:, :2], s, 2.0).sum())(student[:, :2])
    assert value.item() == pytest.approx(short.item(), rel=1e-6)
    assert mx.allclose(slope[:, :2], slope_of_two).item()
    assert slope[0, 2].item() == 0


def test_a_step_along_the_gradient_widens_the_margin() -> None:
    model = adapted()
    held = collate([[e] for e in answers()], 16)
    loss = DpoLoss(off)
    before, slopes = gradient(model, loss, held)
    now: Any = dict(tree_flatten(model.trainable_parameters()))
    model.load_weights([(name, now[name] - 0.01 * slope) for name, slope in slopes.items()], strict=False)
    assert loss(model, held)[0].item() < before


def test_the_reference_has_no_dropout_and_the_policy_keeps_its_own() -> None:
    model = adapted(dropout=0.5)
    train_a_little(model)
    held = collate([[e] for e in answers()], 16)
    sums = DpoLoss(off)._answers
    first, second = (sums.of_reference(model, held, Supervised(held), contextlib.nullcontext) for _ in range(2))
    assert mx.array_equal(first, second).item()
    first, second = (sums(model, held, Supervised(held)) for _ in range(2))
    assert not mx.array_equal(first, second).item()


@pytest.mark.parametrize("loss", [DpoLoss(off), OrpoLoss(), SimpoLoss()], ids=["dpo", "orpo", "simpo"])
def test_packed_pairs_give_what_padded_ones_give(loss: Any) -> None:
    model = adapted()
    train_a_little(model)
    held = answers()
    padded, slopes = gradient(model, loss, collate([[e] for e in held], 16))
    packed, others = gradient(model, loss, collate([held[:3], held[3:]], 40))
    assert packed == pytest.approx(padded, rel=1e-5)
    for name, slope in slopes.items():
        assert mx.allclose(others[name], slope, rtol=1e-4, atol=1e-4 * mx.abs(slope).max().item()).item()


def test_no_second_copy_of_the_base_is_held() -> None:
    model = tiny.build_model(tiny.config(hidden_size=256, intermediate_size=2048, num_hidden_layers=12), scale=1.0)
    model.freeze()
    linear_to_lora_layers(model, 3, {"rank": 2, "scale": 2.0, "dropout": 0.0})
    model.train()
    size = sum(array.nbytes for _, array in tree_flatten(model.parameters()))  # type: ignore[misc]
    held = collate([[e] for e in answers(2)], 16)
    loss = DpoLoss(off)
    gradient(model, loss, held)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    gradient(model, loss, held)
    assert mx.get_peak_memory() - before < 0.5 * size


@pytest.mark.parametrize("log_p", [-1e-9, -1e-5, -0.1, -0.7, -5.0, -80.0])
def test_log_of_one_less_keeps_its_digits(log_p: float) -> None:
    expected = math.log(-math.expm1(min(log_p, -1e-7)))
    value, slope = mx.value_and_grad(_log_one_less)(mx.array(log_p))
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert math.isfinite(slope.item())


def test_an_answer_without_supervised_tokens_is_named() -> None:
    rng = np.random.default_rng(0)
    held = collate([[example(rng, 8)], [example(rng, 8, prompt=8)]], 8)
    with pytest.raises(InvalidRequestError, match="answer 2 of 2 in the batch has no supervised token"):
        OrpoLoss()(adapted(), held)


def test_an_answer_without_a_partner_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="holds 3 answers"):
        SimpoLoss()(adapted(), collate([[e] for e in answers(3)], 16))


def test_kto_needs_its_labels_and_its_mismatched_answers() -> None:
    with pytest.raises(InvalidRequestError, match="needs `wanted` and `mismatched`"):
        KtoLoss(off)(adapted(), collate([[e] for e in answers()], 16))


def test_mismatched_prompts_go_round_and_learn_the_answer_only() -> None:
    held = [Judged(Example((1, 2, 30), (False, False, True), "a:1"), True)]
    held.append(Judged(Example((4, 50, 60), (False, True, True), "a:2"), False))
    first, second = mismatched(held)
    assert (first.token_ids, first.supervised) == ((1, 2, 50, 60), (False, False, True, True))
    assert (second.token_ids, second.supervised) == ((4, 30), (False, True))
    with pytest.raises(InvalidRequestError, match="at least two rows"):
        mismatched(held[:1])


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: DpoLoss(off, beta=0), "beta"),
        (lambda: DpoLoss(off, label_smoothing=0.5), "label_smoothing"),
        (lambda: DpoLoss(off, beta=math.nan), "beta"),
        (lambda: OrpoLoss(weight=-1), "weight"),
        (lambda: SimpoLoss(margin=-1), "margin"),
        (lambda: KtoLoss(off, unwanted_weight=0), "unwanted_weight"),
        (lambda: DistillLoss(tiny.build_model(tiny.config()), temperature=0), "temperature"),
        (lambda: DistillLoss(tiny.build_model(tiny.config()), hard_weight=2), "hard_weight"),
    ],
)
def test_a_value_out_of_range_is_named(make: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.param == param


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    model = tiny.build_model(tiny.config())
    model.train()
    teacher = tiny.build_model(tiny.config())
    held = collate([[e] for e in answers()], 16)
    value, slopes = gradient(model, DistillLoss(teacher, temperature=3.0), held)
    assert abs(value) < 1e-4
    other = gradient(model, DistillLoss(tiny.build_model(tiny.config(), seed=1)), held)[1]
    largest = max(float(mx.abs(slope).max().item()) for slope in other.values())
    assert all(mx.abs(slope).max().item() < 1e-4 * largest for slope in slopes.values())


def test_a_teacher_has_no_dropout() -> None:
    teacher = adapted(dropout=0.5)
    DistillLoss(teacher)
    assert not any(module.training for module in teacher.modules())


def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    loss = DistillLoss(tiny.build_model(tiny.config(vocab_size=300)))
    with pytest.raises(InvalidRequestError, match="the teacher has 300 tokens, the student 320"):
        loss(tiny.build_model(tiny.config()), collate([[e] for e in answers()], 16))
