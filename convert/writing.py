"""A folder that appears whole or not at all: built up beside its place, resumed where it was cut off, renamed last.

The state file in the work folder says for which plan it is and how many items are safely on the disk. It is replaced
after the data that it speaks of were synced, so that whatever it says holds after a kill or a power failure.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any

from mlxinfer.convert.places import check_space, locked, set_aside, sync_folder, work_folder
from mlxinfer.convert.planning import DTYPES
from mlxinfer.errors import ConversionError, ModelFileError
from mlxinfer.formats.files import read_json_object, replace_file
from mlxinfer.zoo.files import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from mlxinfer.convert.making import Made
    from mlxinfer.convert.planning import Item, Plan

STATE = "conversion-state.json"
INDEX = "model.safetensors.index.json"
SYNC_BYTES = 256 << 20
"""Written at most before it is synced and counted as done."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def working(plan: Plan, destination: Path) -> Iterator[Work]:
    """The work folder beside `destination`, locked, with what an earlier run of the same plan left there.

    Raises ConversionError when another conversion holds it, or for anything that goes wrong with the disk; what is
    done by then stays for the next run.
    """
    folder = work_folder(destination)
    work = Work(folder, plan)
    try:
        with locked(folder):
            try:
                work.take_over()
                yield work
            finally:
                # Whatever ended it, the next run need not do again what is written.
                with contextlib.suppress(OSError):
                    work.sync()
                work.close()
    except OSError as error:
        raise _explained(error, work) from error


def _explained(error: OSError, work: Work) -> ConversionError:
    rest = work.rest_bytes
    if error.errno in FULL:
        return ConversionError(
            f"the disk of {work.folder.parent} is full, with {human_bytes(rest)} still to write; what is done is kept "
            f"in {work.folder}: free that much and run the same command again, or delete the folder"
        )
    kept = f"; what is done is kept in {work.folder}" if work.folder.is_dir() else ""
    return ConversionError(f"{error.filename or work.folder}: {error.strerror or error}{kept}")


class Work:
    """The work folder of one conversion. Made by `working`."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.plan = plan
        self.done = 0
        """Items that are safely on the disk."""
        self.rounded: set[str] = set()
        """Parameters of which a value didn't survive a change of dtype."""
        self._written = 0
        """Items that are written, synced or not."""
        self._file: int | None = None
        self._shard = -1
        self._start = 0
        """Of the data in the shard's file."""
        self._unsynced = 0

    @property
    def done_bytes(self) -> int:
        return sum(item.nbytes for item in self.plan.items[: self.done])

    @property
    def rest_bytes(self) -> int:
        """Still to be written."""
        return self.plan.total_bytes - self.done_bytes

    def take_over(self) -> None:
        """Go on with what is there for this very plan; anything else there is deleted."""
        state = _read_state(self.folder)
        if state and state["plan"] == self.plan.hash and self._holds(state["done"]):
            self.done = self._written = state["done"]
            self.rounded = set(state["rounded"])
        else:
            _empty(self.folder)
        try:
            check_space(self.folder, self.rest_bytes)
        except ConversionError:
            # Nothing is left behind, unless it is something that a later run can go on from.
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            raise
        if not self.done:
            self._save()

    def _holds(self, done: int) -> bool:
        """Whether the first `done` items are there still: someone may have deleted shards to make room."""
        if done > len(self.plan.items):
            return False
        ends: dict[int, int] = {}
        for item in self.plan.items[:done]:
            ends[item.shard] = item.tensors[-1].offset + item.tensors[-1].nbytes
        for shard, end in ends.items():
            try:
                found = os.lstat(self.folder / self.plan.shards[shard])
            except FileNotFoundError:
                return False
            if not stat.S_ISREG(found.st_mode) or found.st_size < len(header(self.plan, shard)) + end:
                return False
        return True

    def write(self, item: Item, made: Iterable[Made]) -> Iterator[int]:
        """Write the next item. Yields the bytes of each piece of it when that is written."""
        if item.shard != self._shard:
            self.sync()
            self._open(item.shard)
        assert self._file is not None
        places = [self._start + tensor.offset for tensor in item.tensors]
        ends = [place + tensor.nbytes for place, tensor in zip(places, item.tensors, strict=True)]
        for piece in made:
            for number, array in enumerate(piece.arrays):
                if places[number] + array.nbytes > ends[number]:
                    raise ModelFileError(f"{item.output.name}: more values were read than its shape has")
                _write_all(self._file, array.data.cast("B"), places[number])
                places[number] += array.nbytes
            if piece.rounded:
                self.rounded.add(item.output.name)
            yield sum(array.nbytes for array in piece.arrays)
        if places != ends:
            raise ModelFileError(f"{item.output.name}: fewer values were read than its shape has")
        self._written += 1
        self._unsynced += item.nbytes
        if self._unsynced >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Put what is written on the disk and count it as done."""
        if self._file is not None and self._written > self.done:
            os.fsync(self._file)
            self.done = self._written
            self._unsynced = 0
            self._save()

    def finish(self, files: Mapping[str, bytes], destination: Path, *, overwrite: bool) -> None:
        """Write the other files, the index last, and put the folder in its place."""
        self.sync()
        self.close()
        index = json.dumps(_index(self.plan), indent=2).encode()
        for name, data in [*files.items(), (INDEX, index)]:
            replace_file(self.folder / name, data)
        (self.folder / STATE).unlink()
        sync_folder(self.folder)
        _put(self.folder, destination, overwrite=overwrite)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._shard = -1

    def _open(self, shard: int) -> None:
        self.close()
        path = self.folder / self.plan.shards[shard]
        # Not truncated: what an earlier run wrote there is kept.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._shard = shard
        head = header(self.plan, shard)
        _write_all(self._file, memoryview(head), 0)
        self._start = len(head)

    def _save(self) -> None:
        state = {"plan": self.plan.hash, "done": self.done, "rounded": sorted(self.rounded)}
        replace_file(self.folder / STATE, json.dumps(state).encode())
        sync_folder(self.folder)


def header(plan: Plan, shard: int) -> bytes:
    """The head of a shard: its length and a JSON object, padded to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    for item in plan.items:
        if item.shard == shard:
            for t in item.tensors:
                entries[t.name] = {
                    "dtype": DTYPES[t.dtype],
                    "shape": list(t.shape),
                    "data_offsets": [t.offset, t.offset + t.nbytes],
                }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(plan: Plan) -> dict[str, Any]:
    places = {t.name: plan.shards[item.shard] for item in plan.items for t in item.tensors}
    return {
        "metadata": {"total_size": plan.total_bytes, "total_parameters": plan.num_weights},
        "weight_map": dict(sorted(places.items())),
    }


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _read_state(folder: Path) -> dict[str, Any] | None:
    """What an earlier run left, or None when it isn't there or isn't readable."""
    try:
        state = read_json_object(folder / STATE)
    except ModelFileError:
        return None
    if state is None or not isinstance(state.get("plan"), str):
        return None
    done, rounded = state.get("done"), state.get("rounded")
    if type(done) is not int or done < 0 or not isinstance(rounded, list):
        return None
    return state


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _put(folder: Path, destination: Path, *, overwrite: bool) -> None:
    """Rename the finished folder to its place. A model that is replaced waits beside it until that is done."""
    aside = set_aside(destination)
    if overwrite and destination.is_dir():
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(destination, aside)
    elif os.path.lexists(destination):
        raise ConversionError(f"{destination} appeared while it was made; move it away and run the same command again")
    try:
        os.rename(folder, destination)
    except OSError:
        if aside.exists() and not destination.exists():
            os.rename(aside, destination)
        raise
    sync_folder(destination.parent)
    if aside.exists():
        shutil.rmtree(aside)
