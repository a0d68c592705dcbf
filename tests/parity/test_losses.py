"""Losses and gradients against their published formulas in torch (make_loss_goldens.py), padded and packed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from mlxinfer import upstream
from mlxinfer.lora.losses import (
    DistillLoss,
    DpoLoss,
    KtoLoss,
    OrpoLoss,
    SimpoLoss,
    SupervisedLoss,
    mismatched,
)
from mlxinfer.lora.losses import chunked as chunks
from mlxinfer.lora.objectives import units_of
from mlxinfer.lora.recompute import recomputed
from mlxinfer.lora.types import Example, Judged, Pair
from tests.unit.lora.losses.batches import collate, gradient, off_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.lora.types import Batch

GOLDENS = Path(__file__).parent.parent / "fixtures" / "losses.npz"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BETA, SMOOTHING, WEIGHT, MARGIN, TEMPERATURE = 0.3, 0.1, 0.25, 0.5, 2.0
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def goldens() -> dict[str, np.ndarray]:
    with np.load(GOLDENS) as file:
        return dict(file)


def weights(goldens: dict[str, np.ndarray], prefix: str) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): mx.array(a) for name, a in goldens.items() if name.startswith(prefix)}


def model(goldens: dict[str, np.ndarray], name: str) -> Any:
    built = upstream.build_model(CONFIG, weights(goldens, f"{name}/"))
    built.train()
    return built


def pairs(goldens: dict[str, np.ndarray]) -> list[Pair]:
    def example(ids: np.ndarray, prompt: int) -> Example:
        return Example(tuple(int(i) for i in ids), (False,) * prompt + (True,) * (len(ids) - prompt), "goldens.jsonl:1")

    return [
        Pair(
            *(example(goldens[f"pair/{k}/{side}"], int(goldens[f"pair/{k}/prompt"])) for side in ("chosen", "rejected"))
        )
        for k in range(3)
    ]


def batch(goldens: dict[str, np.ndarray], packed: bool) -> Batch:
    held = pairs(goldens)
    answers = [example for unit in units_of(held) for example in unit]
    judged = [Judged(e, i % 2 == 0) for i, e in enumerate(answers)]
    wrong = mismatched(judged)

    def rows(examples: list[Example]) -> list[list[Example]]:
        # A pair may be torn over two rows: only the order counts.
        return [examples[:3], examples[3:]] if packed else [[e] for e in examples]

    width = 36 if packed else 14
    return collate(
        rows(answers),
        width,
        wanted=mx.array([j.wanted for j in judged]),
        mismatched=collate(rows(wrong), width),
    )


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["sft", "dpo", "dpo_smooth", "orpo", "simpo", "kto", "distill", "distill_hard"])
def test_loss_and_gradients_are_those_of_the_published_formula(
    goldens: dict[str, np.ndarray], name: str, packed: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks, the last one shorter.
    monkeypatch.setattr(chunks, "MIN_ROWS", 4)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 0)
    held, base = model(goldens, "policy"), weights(goldens, "reference/")

    @contextlib.contextmanager
    def reference(held: Any) -> Iterator[None]:
        now = held.parameters()
        held.update(tree_unflatten(list(base.items())))
        yield
        held.update(now)

    losses: dict[str, Any] = {
        "sft": lambda: SupervisedLoss(),
        "dpo": lambda: DpoLoss(reference, beta=BETA),
        "dpo_smooth": lambda: DpoLoss(reference, beta=BETA, label_smoothing=SMOOTHING),
        "orpo": lambda: OrpoLoss(weight=WEIGHT),
        "simpo": lambda: SimpoLoss(beta=BETA, margin=MARGIN),
        "kto": lambda: KtoLoss(reference, beta=BETA, wanted_weight=1.5, unwanted_weight=0.75),
        "distill": lambda: DistillLoss(model(goldens, "reference"), temperature=TEMPERATURE),
        "distill_hard": lambda: DistillLoss(model(goldens, "reference"), temperature=TEMPERATURE, hard_weight=0.4),
    }
    with recomputed(held) if checkpointing else contextlib.nullcontext():
        loss, slopes = gradient(held, losses[name](), batch(goldens, packed))
    assert loss == pytest.approx(float(goldens[f"{name}/loss"]), rel=TOLERANCE)
    assert off_by(slopes, weights(goldens, f"{name}/gradient/")) <= TOLERANCE
