"""What is told how a run goes: the JSONL log always, TensorBoard and wandb where they are asked for."""

from __future__ import annotations

import importlib
import json
import math
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Record = dict[str, Any]
"""One line of the log: "kind" is "update", "evaluation" or "sample", "update" counts from 1."""


class Callback:
    """Base class: each method is called on rank 0 and does nothing here. What it raises ends the run."""

    def on_begin(self, total_updates: int, config: Mapping[str, Any]) -> None:
        """Before the first update."""

    def on_record(self, record: Record) -> None:
        """After an update, an evaluation or a sample."""

    def on_checkpoint(self, path: Path) -> None:
        """After a checkpoint was written."""

    def on_end(self) -> None:
        """After the last update, and when a run is broken off."""


class JsonLog(Callback):
    """Appends each record as a line. A resumed run first drops what came after its checkpoint."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line, record in _lines(path) if record.get("update", 0) <= resumed_at] if resumed_at else []
        self._file = path.open("w", encoding="utf-8")
        self._file.write("".join(kept))
        self._file.flush()

    def on_record(self, record: Record) -> None:
        # JSON has no infinity, and a perplexity may be one.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()}
        self._file.write(json.dumps(finite, ensure_ascii=False) + "\n")
        self._file.flush()

    def on_end(self) -> None:
        self._file.close()


def _lines(path: Path) -> list[tuple[str, Record]]:
    """The whole lines; a killed run may have left half of one."""
    found: list[tuple[str, Record]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("update"), int):
            found.append((line, record))
    return found


def read_log(path: Path) -> list[Record]:
    """The records of a log."""
    return [record for _, record in _lines(path)]


class TensorBoard(Callback):
    """Scalars for TensorBoard. Raises InvalidRequestError where the package is missing."""

    def __init__(self, folder: Path) -> None:
        self._writer = _package("tensorboardX").SummaryWriter(str(folder))

    def on_record(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["update"])

    def on_end(self) -> None:
        self._writer.close()


class Wandb(Callback):
    """A run at Weights & Biases. Raises InvalidRequestError where the package is missing."""

    def __init__(self, project: str) -> None:
        self._wandb = _package("wandb")
        self._project = project

    def on_begin(self, total_updates: int, config: Mapping[str, Any]) -> None:
        self._wandb.init(project=self._project, config=dict(config))

    def on_record(self, record: Record) -> None:
        self._wandb.log(numbers(record), step=record["update"])

    def on_end(self) -> None:
        self._wandb.finish()


def numbers(record: Record) -> dict[str, float]:
    """kind/name → value of what can be drawn."""
    kept = {name: value for name, value in record.items() if name != "update" and isinstance(value, int | float)}
    return {f"{record['kind']}/{name}": value for name, value in kept.items()}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidRequestError(f"{name} is not installed: pip install {name}") from error
