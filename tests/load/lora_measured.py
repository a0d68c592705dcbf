"""One training run of a made-up model in a process of its own, and its peak memory: what a plan is held against."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxinfer.lora import TrainConfig


@dataclass(frozen=True)
class Setup:
    """A model's config.json, options of TrainConfig, and rows by their lengths."""

    model: dict[str, Any]
    train: dict[str, Any]
    lengths: list[int]
    prompt: float = 0.0
    """The part of each row that isn't supervised."""


def config_of(setup: Setup) -> TrainConfig:
    """Its options."""
    from mlxinfer.lora import TrainConfig

    made: Any = TrainConfig
    return made(**{name: tuple(value) if isinstance(value, list) else value for name, value in setup.train.items()})


def measured(setup: Setup) -> tuple[int, float]:
    """(bytes at the peak, seconds of the last update). The setup has two updates or more."""
    command = [sys.executable, "-m", "tests.load.lora_measured", json.dumps(asdict(setup))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{setup}: {done.stderr[-2000:]}")
    peak, seconds = json.loads(done.stdout.splitlines()[-1])
    return peak, seconds


def main() -> None:
    import gc

    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map

    from mlxinfer import upstream
    from mlxinfer.lora import train
    from mlxinfer.lora.planner import items_of
    from tests.unit.lora.rows import Rows

    setup = Setup(**json.loads(sys.argv[1]))
    config = config_of(setup)
    model = upstream.empty_model(setup.model)
    if config.method == "qlora":
        nn.quantize(model, **setup.model["quantization"])
    model.update(tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
                          model.parameters()))  # fmt: skip
    mx.eval(model.parameters())
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    rows = Rows(items_of(setup.lengths, config.loss, setup.prompt))
    history = train(model, None, rows, None, config, model_config=setup.model)
    before, last = history.records[-2:]
    # The first update compiles kernels.
    print(json.dumps([mx.get_peak_memory(), (last["tokens"] - before["tokens"]) / last["tokens_per_second"]]))


if __name__ == "__main__":
    main()
