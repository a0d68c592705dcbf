"""Run by test_parallel under mlx.launch: one update, or two epochs, on each rank; prints what the test compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxinfer.errors import TrainingError
from mlxinfer.lora import TrainConfig, train
from mlxinfer.lora.parallel import Ranks
from tests.unit.lora.rows import cross_entropy, model, rows


def main(folder: Path, size: int, steps: int) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    net = model()
    config = TrainConfig(
        optimizer="sgd",
        momentum=0.0,
        learning_rate=1.0,
        updates=1,
        micro_batch_size=size,
        grad_accumulation_steps=steps,
    )
    train(net, None, rows(8), None, config, group)
    weights = {name: np.array(value) for name, value in tree_flatten(net.trainable_parameters())}
    np.savez(folder / f"weights-{group.rank()}.npz", **weights)

    seen: list[list[int]] = []

    def counting(held: object, batch: object) -> object:
        for row, segment in zip(np.array(batch.inputs), np.array(batch.segments), strict=True):  # type: ignore[attr-defined]
            seen.extend(row[segment == number].tolist() for number in range(1, segment.max() + 1))
        return cross_entropy(held, batch)  # type: ignore[arg-type]

    config = TrainConfig(epochs=2, micro_batch_size=size, grad_accumulation_steps=steps, verify_every=1)
    digest = train(model(), None, rows(11), rows(5), config, group, loss=counting).digest
    try:
        Ranks(group).check_equal({"w": mx.array([1.0 * (group.rank() == 1)])}, 7)
        differ = ""
    except TrainingError as error:
        differ = str(error)
    out = {"digest": digest, "seen": seen, "differ": differ, "size": group.size()}
    (folder / f"rank-{group.rank()}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
