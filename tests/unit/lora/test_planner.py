"""Plans: against the peaks of real runs, and what they propose. tests/load/lora_plan.py holds thirty against runs."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora import TrainConfig, probe, train
from mlxinfer.lora.planner import items_of, plan
from mlxinfer.lora.probe import Trial
from tests import tiny
from tests.load.lora_measured import measured
from tests.load.lora_plan import LIMIT, draw, predicted
from tests.unit.lora.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 1 << 30


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_plan_is_not_under_the_run(checkpointing: bool) -> None:
    config = tiny.config(num_hidden_layers=9)
    options = TrainConfig(updates=2, micro_batch_size=4, grad_checkpointing=checkpointing, packing="off")
    items = items_of([200, 90, 190, 160], "sft")
    need = plan(config, options, items, GIB).need
    model = tiny.build_model(config)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    train(model, None, Rows(items), None, options, model_config=config)
    assert mx.get_peak_memory() - before <= need.peak - need.weights
    assert need.updates == 2


def fake(_: Any, options: TrainConfig, items: Sequence[Any], layers: int, **__: Any) -> Trial:
    """What is kept grows with rows and their width, and hardly where layers are recomputed."""
    longest = max(len(example.token_ids) for example in items)
    kept = options.micro_batch_size * longest * min(layers, options.num_layers or layers) * 8192
    kept //= 8 if options.grad_checkpointing else 1
    return Trial(layers, kept, 0, 0, 1000 * layers, 1.0 + layers, longest, 1, longest, 1)


def test_what_is_proposed_begins_with_what_costs_least_and_ends_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "try_layers", fake)
    config = tiny.config(num_hidden_layers=64)
    options = TrainConfig(updates=3, micro_batch_size=4, max_tokens=1024)
    items = items_of([1024] * 4, "sft")
    whole = plan(config, options, items, GIB)
    assert not whole.fits
    assert [change.options for change in whole.changes] == [{"grad_checkpointing": True}]
    assert whole.changes[0].need.peak <= 0.9 * GIB < whole.need.peak
    small = plan(config, options, items, 40 << 20)
    assert [list(change.options)[-1] for change in small.changes] == [
        "grad_checkpointing", "grad_accumulation_steps", "max_tokens", "num_layers",
    ]  # fmt: skip
    assert small.changes[-1].options["grad_accumulation_steps"] == 4
    peaks = [small.need.peak, *(change.need.peak for change in small.changes)]
    assert peaks == sorted(peaks, reverse=True)
    assert plan(config, options, items, 100 * GIB).changes == ()
    assert plan(config, options, items, GIB, advise=False).changes == ()


def test_a_plan_is_told_in_words_and_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "try_layers", fake)
    options = TrainConfig(updates=3, micro_batch_size=4, max_tokens=1024)
    made = plan(tiny.config(num_hidden_layers=64), options, items_of([1024] * 4, "sft"), GIB)
    told = json.loads(json.dumps(made.to_json()))
    assert told["peak_bytes"] == told["weights_bytes"] + told["trained_bytes"] + told["activations_bytes"]
    assert told["seconds"][0] < told["seconds"][1]
    assert not told["fits"]
    assert "does not fit" in made.text()
    assert "with grad_checkpointing on" in made.text()


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no row"):
        plan(tiny.config(), TrainConfig(), (), GIB)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_drawn_runs_peak_at_most_at_what_was_planned(seed: int) -> None:
    setup = draw(random.Random(seed))
    peak, _ = predicted(setup)
    real, _ = measured(setup)
    assert real <= peak <= (1 + LIMIT) * real + (8 << 20)
