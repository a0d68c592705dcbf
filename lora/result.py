"""What a run leaves in its folder: the adapter, a card, a report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx.utils import tree_flatten

from mlxinfer.errors import TrainingError
from mlxinfer.formats.files import read_json_object, replace_file
from mlxinfer.lora import checkpoint
from mlxinfer.lora.adapter import save_adapter
from mlxinfer.lora.card import adapter_card
from mlxinfer.lora.runs import CARD, REPORT

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.core as mx
    import mlx.nn as nn

    from mlxinfer.lora.config import TrainConfig
    from mlxinfer.lora.history import History
    from mlxinfer.lora.state import State


def write_result(
    folder: Path, model: nn.Module, config: TrainConfig, state: State, history: History, extra: Mapping[str, Any]
) -> None:
    """The adapter is the best one where rows were held out, else the last; `model` keeps the last."""
    last: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    best = folder / checkpoint.FOLDER / checkpoint.BEST
    if state.best_loss is not None and state.best_update != state.update:
        if _is_best(best, state):
            checkpoint.load_weights(model, checkpoint.read_tensors(best / "weights.safetensors"), str(best))
        else:
            # Said where it is read: the adapter is the last one, and no figure of another is beside it.
            state = dataclasses.replace(state, best_loss=None, best_update=0)
    told = {"updates": state.update, "best_update": state.best_update or None}
    ours = {**extra.get("mlxinfer", {}), **told}
    try:
        save_adapter(folder, model, config.method_options, {**extra, "mlxinfer": ours})
        replace_file(folder / CARD, _card(folder, model, config, state, history, extra).encode())
        history.write_report(folder / REPORT, f"Training of {folder.name}")
    except OSError as error:
        message = (
            f"{folder}: the result cannot be written: {error}. The checkpoint is kept: make room, and resume the run"
        )
        raise TrainingError(message) from error
    finally:
        model.load_weights(list(last.items()), strict=False)


def _is_best(best: Path, state: State) -> bool:
    """Whether the folder holds what the state calls its best; not where someone has deleted or replaced it."""
    held = read_json_object(best / "state.json") or {}
    return held.get("update") == state.best_update and held.get("fingerprint") == state.fingerprint


def _card(
    folder: Path, model: nn.Module, config: TrainConfig, state: State, history: History, extra: Mapping[str, Any]
) -> str:
    layers = tuple(path for path, module in model.named_modules() if "lora_a" in module)
    options = dataclasses.replace(config.method_options, targets=layers)
    facts: dict[str, object] = {"loss": config.loss, "updates": state.update, "tokens": state.tokens}
    facts |= {"rows": history.facts["rows"], "seed": config.seed}
    if state.best_loss is not None:
        facts["held-out loss"] = f"{state.best_loss:.4f} after update {state.best_update}"
    base = str(extra.get("model", ""))
    # A folder or file of this machine is no name that others know it by.
    return adapter_card(options, name=folder.name, base="" if Path(base).exists() else base, facts=facts)
