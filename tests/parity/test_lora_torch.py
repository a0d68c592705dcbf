"""Gradients and loss curves of LoRA, rsLoRA and DoRA against PEFT's in torch (make_lora_goldens.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.lora import TrainConfig, methods, train
from mlxinfer.lora.collate import collate
from mlxinfer.lora.losses import SupervisedLoss
from mlxinfer.lora.recompute import recomputed
from mlxinfer.lora.types import Example
from tests.parity.shapes import TRAINED
from tests.unit.lora.losses.batches import gradient
from tests.unit.lora.rows import Rows

FIXTURE = Path(__file__).parent.parent / "fixtures" / "lora_torch.npz"
CONFIG: dict[str, Any] = TRAINED | {"model_type": "llama"}
PROMPTS = (4, 2, 5, 1, 3, 2)
METHODS = ("lora", "rslora", "dora")
GRADIENTS = 2e-6
"""max |ours - theirs| / max |theirs|, of each tensor by itself."""
CURVE = 1e-4
"""Nats per supervised token, at each of the 50 updates."""

Goldens = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    with np.load(FIXTURE) as file:
        return dict(file)


def under(goldens: Goldens, prefix: str) -> dict[str, np.ndarray]:
    found = {name.removeprefix(prefix): a for name, a in goldens.items() if name.startswith(prefix)}
    return {name: a.astype(np.float32) if a.dtype == np.float16 else a for name, a in found.items()}


def config(method: Any, **changes: Any) -> TrainConfig:
    return TrainConfig(
        method=method, rank=4, alpha=8.0, updates=50, learning_rate=3e-3, weight_decay=0.01, beta1=0.9, beta2=0.98,
        max_grad_norm=0.5, max_tokens=32, **changes,
    )  # fmt: skip


def adapted(goldens: Goldens, method: Any) -> Any:
    model = upstream.build_model(CONFIG, {name: mx.array(a) for name, a in under(goldens, "base/").items()})
    paths = methods.apply(model, config(method).method_options)
    start = under(goldens, f"{method}/start/")
    assert sorted(paths) == sorted(start)
    model.load_weights([(name, mx.array(a)) for name, a in start.items()], strict=False)
    model.train()
    return model


def rows(goldens: Goldens) -> tuple[Example, ...]:
    return tuple(
        Example(tuple(row.tolist()), tuple(at >= prompt for at in range(len(row))), f"goldens.jsonl:{number + 1}")
        for number, (row, prompt) in enumerate(zip(under(goldens, "row/").values(), PROMPTS, strict=True))
    )


def check_gradients(goldens: Goldens, method: str, *, packed: bool = False) -> float:
    examples = rows(goldens)
    held = [examples[:3], examples[3:]] if packed else [(example,) for example in examples]
    batch = collate(held, max(sum(len(example.token_ids) for example in row) for row in held))
    total, slopes = gradient(adapted(goldens, method), SupervisedLoss(), batch)
    assert total / batch.num_targets == pytest.approx(float(goldens[f"{method}/loss"]), rel=1e-6)
    theirs = under(goldens, f"{method}/gradient/")
    assert slopes.keys() == theirs.keys()
    off: dict[str, float] = {}
    for name, wanted in theirs.items():
        ours = np.array(slopes[name]) / batch.num_targets
        off[name] = float(np.abs(ours - wanted).max() / np.abs(wanted).max())
    assert max(off.values()) <= GRADIENTS, off
    return max(off.values())


def check_curve(goldens: Goldens, method: str, **changes: Any) -> float:
    model = adapted(goldens, method)
    history = train(
        model, None, Rows(rows(goldens)), None, config(method, **changes), loss=SupervisedLoss(), model_config=CONFIG
    )
    wanted = goldens[f"{method}/curve"]
    assert wanted[-1] < 0.5 * wanted[0], "the curve says little where nothing is learnt"
    off = float(np.abs(np.array(history.losses) - wanted).max())
    assert off <= CURVE
    return off


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_peft_s(goldens: Goldens, method: str, packed: bool) -> None:
    check_gradients(goldens, method, packed=packed)


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_gradients_are_peft_s(goldens: Goldens, method: str) -> None:
    model = adapted(goldens, method)
    examples = rows(goldens)
    batch = collate([(example,) for example in examples], 32)
    with recomputed(model):
        _, slopes = gradient(model, SupervisedLoss(), batch)
    for name, wanted in under(goldens, f"{method}/gradient/").items():
        ours = np.array(slopes[name]) / batch.num_targets
        assert np.abs(ours - wanted).max() <= GRADIENTS * np.abs(wanted).max(), name


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"micro_batch_size": 6, "packing": "off"}, id="one micro-batch"),
        pytest.param({"micro_batch_size": 2, "grad_accumulation_steps": 3, "packing": "off"}, id="accumulated"),
        pytest.param({"micro_batch_size": 6, "packing": "on"}, id="packed"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_fifty_updates_follow_peft_s_curve(goldens: Goldens, method: str, changes: dict[str, Any]) -> None:
    check_curve(goldens, method, **changes)


def test_the_weights_after_fifty_updates_have_moved_in_every_tensor(goldens: Goldens) -> None:
    model = adapted(goldens, "dora")
    train(model, None, Rows(rows(goldens)), None, config("dora", micro_batch_size=6), loss=SupervisedLoss(),
          model_config=CONFIG)  # fmt: skip
    start = under(goldens, "dora/start/")
    now: Any = dict(tree_flatten(model.trainable_parameters()))
    assert all(np.abs(np.array(now[name]) - start[name]).max() > 1e-3 for name in start)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, 2])
def test_another_model_and_other_rows_give_what_peft_gives_now(seed: int) -> None:
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name, reason=f"needs {name}: pip install torch transformers peft")
    from tests.parity import make_lora_goldens

    now = make_lora_goldens.goldens(seed)
    for method in METHODS:
        gradients, curve = check_gradients(now, method), check_curve(now, method, micro_batch_size=6, packing="off")
        print(f"{method}: gradients {gradients:.1e}, curve {curve:.1e}")
