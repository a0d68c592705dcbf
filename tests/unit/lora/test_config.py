"""One definition of the options: Python, TOML and YAML agree, and nothing is taken in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.config import TrainConfig
from mlxinfer.lora.job import OPTIONS, plan_of
from mlxinfer.lora.options import read_file
from mlxinfer.lora.schedules import learning_rate

if TYPE_CHECKING:
    from pathlib import Path


def test_toml_yaml_and_python_give_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('method = "rslora"\nlearning_rate = 1e-3\ntargets = ["q_proj", "v_proj"]\n')
    (tmp_path / "a.yaml").write_text("method: rslora\nlearning_rate: 1e-3\ntargets: [q_proj, v_proj]\n")
    wanted = TrainConfig(method="rslora", learning_rate=1e-3, targets=("q_proj", "v_proj"))
    for name in ("a.toml", "a.yaml"):
        values = OPTIONS.checked(read_file(tmp_path / name))
        assert OPTIONS.build(TrainConfig, values) == wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1}, "a.toml: unknown option 'learning_rat'; did you mean 'learning_rate'?"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": True}, "rank is True; it is a whole number"),
        ({"rank": "8"}, "rank is '8'"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"method": "ia3"}, "method is 'ia3'; it is one of lora, qlora, dora, rslora, full"),
        ({"method": "full", "rank": 4}, "rank has no effect with method full"),
        ({"momentum": 0.5}, "momentum has no effect with optimizer adamw"),
        ({"optimizer": "sgd", "beta1": 0.5}, "beta1 has no effect with optimizer sgd"),
        ({"min_learning_rate": 1e-6}, "min_learning_rate has no effect with schedule constant"),
        ({"patience": 2}, "patience has no effect with no eval_every"),
        ({"sample_tokens": 3}, "sample_tokens has no effect with no sample_prompts"),
        ({"beta": 0.2}, "beta has no effect with loss sft"),
        ({"loss": "dpo", "margin": 2}, "margin has no effect with loss dpo"),
        ({"loss": "dpo", "label_smoothing": 0.7}, "label_smoothing is 0.7; it is at least 0 and below 0.5"),
        ({"loss": "kto", "method": "full"}, "kto compares with the model whose adapters are off"),
        ({"teacher": "t"}, "teacher has no effect with loss sft"),
        ({"supervise": "user"}, "supervise is 'user'; it is one of assistant, last, all"),
        ({"valid": ["v"], "valid_fraction": 0.1}, "valid and valid_fraction exclude each other"),
        ({"data": ()}, "data is missing"),
    ],
)
def test_what_is_unknown_wrong_or_without_effect_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_of({"model": "m", "data": "d.jsonl", **values}, "a.toml")
    assert message in str(caught.value)
    assert caught.value.param == next(reversed(values))


def test_a_file_that_is_no_config_is_an_error_that_names_it(tmp_path: Path) -> None:
    for name, text in (("a.toml", "rank = "), ("a.yaml", "a: [b"), ("b.yaml", "- 1"), ("a.json", "{}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidRequestError, match=name):
            read_file(tmp_path / name)


def test_every_option_has_a_help_text_and_a_default() -> None:
    plan = plan_of({"model": "m", "data": "d.jsonl"})
    for name, option in OPTIONS.by_name.items():
        assert option.help.endswith((".", "]."))
        if name not in ("model", "data"):
            part = next(one for one in (plan.job, plan.data, plan.train) if hasattr(one, name))
            assert getattr(part, name) == option.default


def test_the_rate_rises_then_falls_by_update() -> None:
    def rates(schedule: Any) -> list[float]:
        return [learning_rate(update, peak=1.0, schedule=schedule, total=6, warmup=2, floor=0.0) for update in range(6)]

    assert rates("constant") == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    assert rates("linear") == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])
    assert rates("cosine") == pytest.approx([1 / 3, 2 / 3, 1, 0.8535533906, 0.5, 0.1464466094])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_falls_from_the_peak_towards_its_floor(schedule: Any) -> None:
    def at(update: int) -> float:
        return learning_rate(update, peak=1.0, schedule=schedule, total=10, warmup=2, floor=0.2)

    assert at(2) == 1.0
    assert at(6) == pytest.approx(0.6)
    assert at(10) == pytest.approx(0.2)
    assert at(99) == pytest.approx(0.2)
