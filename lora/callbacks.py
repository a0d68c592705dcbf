"""What is told how a run goes: the JSONL log always, TensorBoard and wandb where they are asked for."""

from __future__ import annotations

import errno
import importlib
import json
import math
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError, TrainingError
from mlxinfer.formats.files import json_bytes, replace_file

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
        kept = [line for line, record in _lines(path) if record["update"] <= resumed_at] if resumed_at else []
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, "".join(f"{line}\n" for line in kept).encode())
            # Without a buffer nothing is left for closing it, which may come after a full disk.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._failed(error) from error

    def on_record(self, record: Record) -> None:
        # JSON has no infinity, and a perplexity may be one.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()}
        line = json_bytes(finite) + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "the line was written in part")
        except OSError as error:
            raise self._failed(error) from error

    def on_end(self) -> None:
        self._file.close()

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(f"{self._path}: the log cannot be written: {error}. Make room, and resume the run")


def _lines(path: Path) -> list[tuple[str, Record]]:
    """The whole lines; a killed run may have left half of one."""
    found: list[tuple[str, Record]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # Not `splitlines`: a sample may hold other characters that separate lines.
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("update"), int) and isinstance(record.get("kind"), str):
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
