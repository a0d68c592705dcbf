"""A plan by sensitivity against the same bits throughout: which is kept, and that its name says so."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import mlx.nn as nn
import pytest

from mlxinfer.convert import calibration, contest, measure, sensitivity
from mlxinfer.convert.quantizing import min_max
from mlxinfer.convert.recipes import Plan
from mlxinfer.convert.sources.base import Packing
from mlxinfer.tokenizer import Tokenizer
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS = [calibration.Document("prose", "paris is the capital of france. " * 4)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny.write_folder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny.build_model(tiny.config())


@pytest.fixture(scope="module")
def found(model: nn.Module, tokenizer: Tokenizer) -> sensitivity.Sensitivity:
    rows = calibration.packed_rows(TEXTS, tokenizer, 24)
    return sensitivity.measure_sensitivity(model, rows)


def best(model: nn.Module, tokenizer: Tokenizer, found: sensitivity.Sensitivity, target: float) -> Plan:
    return contest.best_plan(model, tokenizer, found, target, texts=TEXTS, quantizer=min_max, scale_bits=16)


def test_the_rival_is_the_largest_form_within_the_target(found: sensitivity.Sensitivity) -> None:
    shapes = {"a": (8, 256), "b": (8, 64)}
    plain = sensitivity.Sensitivity(shapes, found.offers, other_bits=0, other_weights=0)
    for target, bits, group in ((4.6, 4, 64), (4.49, 4, 128), (5.3, 5, 128), (5.2, 4, 32), (99.0, 8, 32)):
        rival = contest.uniform_rival(plain, target, 16)
        assert rival is not None
        assert rival.default == Packing(bits, group), target
    assert contest.uniform_rival(plain, 2.1, 16) is None
    norms = sensitivity.Sensitivity({"a": (4096, 256)}, found.offers, other_bits=16 * 256, other_weights=256)
    rival = contest.uniform_rival(norms, 4.5, 16)
    assert rival is not None
    assert rival.default == Packing(4, 64), "4.503 bits with the norms are 4.5 still"


def test_the_trial_is_the_divergence_of_the_packed_model(
    model: nn.Module, tokenizer: Tokenizer, found: sensitivity.Sensitivity
) -> None:
    packed = copy.deepcopy(model)
    nn.quantize(packed, 64, 3, class_predicate=lambda path, m: hasattr(m, "to_quantized") and path != "lm_head")
    plan = Plan("p", Packing(3, 64), [("lm_head", None)])
    tried = contest.divergence(model, tokenizer, plan, found, texts=TEXTS, quantizer=min_max)
    expected = measure.compare(model, packed, tokenizer, texts=TEXTS, max_tokens=contest.MAX_TOKENS).kl_mean
    assert tried == pytest.approx(expected, rel=1e-3)
    assert tried > 0


@pytest.mark.parametrize(
    ("by_sensitivity", "throughout", "kept"), [(0.2, 0.5, "mixed"), (0.5, 0.2, "rival"), (math.nan, 0.2, "rival")]
)
def test_the_plan_that_loses_less_is_kept_and_names_both_figures(
    by_sensitivity: float,
    throughout: float,
    kept: str,
    model: nn.Module,
    tokenizer: Tokenizer,
    found: sensitivity.Sensitivity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def divergence(
        model: nn.Module, tokenizer: Tokenizer, plan: Plan, found: object, **rest: Sequence[object]
    ) -> float:
        return by_sensitivity if plan.patterns else throughout

    monkeypatch.setattr(contest, "divergence", divergence)
    plan = best(model, tokenizer, found, 5.0)
    assert bool(plan.patterns) == (kept == "mixed")
    mixed, rival = f"{by_sensitivity:.4g}", f"{throughout:.4g}"
    first, second = (mixed, rival) if kept == "mixed" else (rival, mixed)
    assert f"(KL {first} on the calibration text; " in plan.name
    assert plan.name.endswith(f": {second})")
    assert "5 bits per weight by sensitivity" in plan.name
    assert "4-bit affine, groups of 64, throughout" in plan.name


def test_what_is_kept_stays_within_the_target(
    model: nn.Module, tokenizer: Tokenizer, found: sensitivity.Sensitivity
) -> None:
    plan = best(model, tokenizer, found, 5.5)
    used = found.other_bits
    for path, shape in found.shapes.items():
        packing = plan.decide(path, shape)
        assert packing is not None
        used += sensitivity.bits_of(shape, packing)
    weights = found.other_weights + sum(math.prod(shape) for shape in found.shapes.values())
    assert used / weights <= 5.5 + contest.ROUNDING


def test_below_every_uniform_form_there_is_no_trial(
    model: nn.Module, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"a": (8, 64)}
    offers = {"a": [sensitivity.Offer(Packing(2, 128), 8 * 64 * 2, 1.0)]}
    problem = sensitivity.Sensitivity(shapes, offers, other_bits=0, other_weights=0)
    monkeypatch.setattr(contest, "divergence", None)
    assert best(model, tokenizer, problem, 2.1).default == Packing(2, 128)
