"""Recipes and plans: which matrix gets which form, and what is refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from mlx_lm.convert import mixed_quant_predicate_builder

from mlxinfer import upstream
from mlxinfer.convert.recipes import MIXED, Plan, ends, named, names, read_plan, uniform
from mlxinfer.convert.sensitivity import packable
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import InvalidRequestError
from tests import tiny

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.nn as nn

LAYERS = 16


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny.build_model(tiny.config(num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def modules(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {path: tuple(module.weight.shape) for path, module in packable(model).items()}


@pytest.mark.parametrize("name", sorted(MIXED))
def test_the_mixed_recipes_decide_as_mlx_lms_do(name: str, model: nn.Module, modules: dict) -> None:
    theirs = mixed_quant_predicate_builder(name, model, 64)
    plan = named(name, modules)
    for path, module in packable(model).items():
        expected = theirs(path, module)
        decided = plan.decide(path, modules[path])
        assert decided is not None
        assert {"bits": decided.bits, "group_size": decided.group_size, "mode": decided.mode} == expected, path


def test_every_named_recipe_matches_something(modules: dict) -> None:
    for name in names():
        plan = named(name, modules)
        plan.check(modules)
        assert len({plan.decide(path, shape) for path, shape in modules.items()}) == 2


def test_an_unknown_recipe_is_answered_with_those_there_are(modules: dict) -> None:
    with pytest.raises(InvalidRequestError, match="mixed_4_6"):
        named("mixed_9", modules)


def test_a_model_without_down_projections_is_refused_by_mixed_recipes() -> None:
    with pytest.raises(InvalidRequestError, match="down_proj"):
        named("mixed_3_6", {"layers.0.fc": (8, 64)})


def test_embeddings_and_head_can_have_a_form_of_their_own(modules: dict) -> None:
    assert ends(modules) == ["model.embed_tokens", "lm_head"]
    plan = uniform(Packing(4, 64), modules, embeddings=Packing(8, 64), head=Packing(6, 32))
    assert plan.decide("model.embed_tokens", (1, 64)) == Packing(8, 64)
    assert plan.decide("lm_head", (1, 64)) == Packing(6, 32)
    assert plan.decide("model.layers.0.mlp.up_proj", (1, 64)) == Packing(4, 64)
    tied = {path: shape for path, shape in modules.items() if path != "lm_head"}
    with pytest.raises(InvalidRequestError, match="no head"):
        uniform(None, tied, head=Packing(6, 64))


def test_of_the_patterns_that_match_the_last_decides() -> None:
    plan = Plan("p", Packing(4, 64), [("*_proj", Packing(3, 64)), ("*.v_proj", None), ("a.1.*", Packing(8, 64))])
    assert plan.decide("a.0.v_proj", (1, 64)) is None
    assert plan.decide("a.1.v_proj", (1, 64)) == Packing(8, 64)
    assert plan.decide("a.0.q_proj", (1, 64)) == Packing(3, 64)
    assert plan.decide("other", (1, 64)) == Packing(4, 64)


def test_a_plan_survives_being_written_and_read(tmp_path: Path, modules: dict) -> None:
    plan = Plan(
        'a "quoted" name',
        Packing(4, 32),
        [("*.v_proj", Packing(6, 64)), ("lm_head", None), ("*embed*", Packing(4, 32, "mxfp4"))],
    )
    file = tmp_path / "plan.toml"
    file.write_text(plan.to_toml(), encoding="utf-8")
    assert read_plan(file, modules) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[layers]\n"*.v_prj" = { bits = 6 }', "'\\*.v_prj' matches no module"),
        ('[layers]\n"*.v_proj" = { bit = 6 }', "layers.\"\\*.v_proj\": unknown key 'bit'"),
        ("default = { bits = 7 }", "default: bits is 7"),
        ("default = { bits = true }", "default.bits is True"),
        ("default = { group_size = 48 }", "default: the group size is 48"),
        ('default = { mode = "mxfp4", bits = 8 }', "mxfp4 has 4 bits"),
        ('default = "none"', "default is 'none'"),
        ("colour = 1", "unknown key 'colour'"),
        ("layers = 3", "a table"),
        ("default = {", "no TOML"),
    ],
)
def test_a_wrong_plan_is_an_error_that_names_the_key(tmp_path: Path, modules: dict, text: str, message: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        read_plan(file, modules)


def test_a_plan_that_is_no_file_or_has_too_many_patterns_is_refused(tmp_path: Path, modules: dict) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(InvalidRequestError, match="is no regular file"):
        read_plan(tmp_path / "pipe.toml", modules)
    many = "".join(f'"a{number}" = "float"\n' for number in range(10_001))
    (tmp_path / "many.toml").write_text(f"[layers]\n{many}")
    with pytest.raises(InvalidRequestError, match="10,001 patterns"):
        read_plan(tmp_path / "many.toml", modules)


@pytest.mark.parametrize("form", ["{ bits = 0 }", "{ group_size = 0 }"])
def test_a_zero_is_not_taken_for_the_default(tmp_path: Path, modules: dict, form: str) -> None:
    (tmp_path / "plan.toml").write_text(f"default = {form}\n")
    with pytest.raises(InvalidRequestError, match="0"):
        read_plan(tmp_path / "plan.toml", modules)


def test_a_plan_that_is_missing_or_huge_is_refused(tmp_path: Path, modules: dict) -> None:
    with pytest.raises(InvalidRequestError, match="can't be read"):
        read_plan(tmp_path / "none.toml", modules)
    (tmp_path / "large.toml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(InvalidRequestError, match="has more than"):
        read_plan(tmp_path / "large.toml", modules)


def test_the_plan_decides_as_the_core_asks(modules: dict) -> None:
    assert upstream.versions()
    assert Plan("floats", None).decide("x", (2, 64)) is None
