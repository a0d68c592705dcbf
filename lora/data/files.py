"""Rows of JSONL, CSV and Parquet files, one at a time, each with its place. A bad row is a value, not an exception."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_ROW_BYTES = 64 << 20
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_NAMES = {"train": ("train",), "valid": ("valid", "validation", "dev", "eval"), "test": ("test",)}


@dataclass(frozen=True, slots=True)
class Record:
    """A row as the file has it, or what is wrong with it."""

    where: str
    value: dict[str, Any] | None
    problem: str | None = None
    blank: bool = False


def read_records(path: Path) -> Iterator[Record]:
    """The rows of a file, by its suffix. Raises InvalidRequestError for a file that isn't there or is of no known
    format."""
    if path.suffix not in SUFFIXES:
        raise InvalidRequestError(f"{path}: training data is read from {', '.join(SUFFIXES)} files", param="data")
    if not path.is_file():
        raise InvalidRequestError(f"{path}: no such file", param="data")
    try:
        if path.suffix == ".csv":
            yield from _csv_records(path)
        elif path.suffix == ".parquet":
            yield from _parquet_records(path)
        else:
            yield from _jsonl_records(path)
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot be read: {error.strerror or error}", param="data") from error


def split_files(folder: Path, split: str) -> list[Path]:
    """Files of a split in a folder: `train.jsonl`, `train-00000-of-00002.parquet`, …, also below `data/`."""
    names = _NAMES.get(split, (split,))
    pattern = re.compile(rf"({'|'.join(map(re.escape, names))})([-_.]\d[\w-]*)?")
    for place in (folder, folder / "data"):
        if place.is_dir():
            found = sorted(p for p in place.iterdir() if p.suffix in SUFFIXES and pattern.fullmatch(p.stem))
            if found:
                return found
    return []


def _jsonl_records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_ROW_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MAX_ROW_BYTES)):
                    pass
                yield Record(where, None, f"the line is longer than {MAX_ROW_BYTES >> 20} MiB")
                continue
            if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                line = line[3:]
            if number == 1 and line.lstrip().startswith(b"["):
                yield Record(where, None, "this is a JSON list; write one JSON object a line (JSONL)")
                return
            yield _json_record(line, where)


def _json_record(line: bytes, where: str) -> Record:
    if not line.strip():
        return Record(where, None, "the line is blank", blank=True)
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Record(where, None, f"the line is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}")
    except json.JSONDecodeError as error:
        return Record(where, None, f"the line is not JSON: {error.msg} at column {error.colno}")
    except (RecursionError, ValueError) as error:
        return Record(where, None, f"the line is not usable JSON: {error or type(error).__name__}")
    if not isinstance(value, dict):
        return Record(where, None, f"the line holds a {type(value).__name__}, not a JSON object")
    return Record(where, value)


def _csv_records(path: Path) -> Iterator[Record]:
    csv.field_size_limit(MAX_ROW_BYTES)
    # A byte that is not UTF-8 becomes a lone surrogate, so that the row it is in can be named.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            where = f"{path}:{line}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield Record(where, None, f"the line is not CSV: {error}")
                continue
            if cells is None:
                return
            if header is None:
                header = [name.strip() for name in cells]
                if not header or "" in header or len(set(header)) < len(header):
                    raise InvalidRequestError(
                        f"{where}: the first line must name each column once, not {cells!r:.120}", param="data"
                    )
                continue
            yield _csv_record(header, cells, where)


def _csv_record(header: list[str], cells: list[str], where: str) -> Record:
    if not cells:
        return Record(where, None, "the line is blank", blank=True)
    if len(cells) != len(header):
        return Record(where, None, f"the line has {len(cells)} cells, the header {len(header)}")
    if any("\udc80" <= c <= "\udcff" for cell in cells if not cell.isascii() for c in cell):
        return Record(where, None, "the line is not UTF-8")
    return Record(where, dict(zip(header, cells, strict=True)))


def _parquet_records(path: Path) -> Iterator[Record]:
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidRequestError(
            f"{path}: Parquet files need the package pyarrow: pip install pyarrow, or write JSONL", param="data"
        )
    parquet: Any = importlib.import_module("pyarrow.parquet")
    errors: Any = importlib.import_module("pyarrow.lib")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                number += 1
                yield Record(f"{path}:{number}", value)
    except errors.ArrowException as error:
        raise InvalidRequestError(f"{path}:{number + 1}: not a readable Parquet file: {error}", param="data") from error
