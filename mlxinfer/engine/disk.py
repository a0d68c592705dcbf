"""The prefix cache's disk tier: one file per entry, in a folder per model fingerprint.

It never fails a request: a file that isn't what was written is removed and was never there, and a disk that is full or
broken ends writing for a while. Several processes may share the folder. The files hold what was said, readable by
their owner only; they are not encrypted, and `key` stands in them as it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.engine.disk_files import SUFFIX, make_private, remove_abandoned, stored_files, subfolders, write_file
from mlxinfer.engine.disk_format import (
    DamagedError,
    ForeignError,
    Head,
    StoredArray,
    aligned,
    encode_head,
    open_entry,
    read_body,
    read_head,
)
from mlxinfer.engine.prefix_node import shared_length, token_array

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

PAUSE_S = 60.0
"""How long nothing is written after a write failed."""
MAX_ENTRIES = 4096
"""Entries in the index at start; older files stay on disk unseen until the cap takes them."""
MAX_INDEX_TOKENS = 1 << 25
"""Tokens in the index at start, 4 bytes each."""


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """What the index knows of a file. `nbytes` is the file's size, and about what reading it takes in memory."""

    path: Path
    key: str
    tokens: array[int]
    checkpoints: tuple[int, ...]
    meta: dict[str, Any]
    nbytes: int
    digest: bytes


@dataclass(slots=True)
class DiskCounters:
    """Sums since the start. `skipped`: while writing was paused; `covered`: a longer entry was there already."""

    written: int = 0
    bytes_written: int = 0
    read: int = 0
    bytes_read: int = 0
    damaged: int = 0
    foreign: int = 0
    refused: int = 0
    covered: int = 0
    superseded: int = 0
    evicted: int = 0
    skipped: int = 0
    write_errors: int = 0
    read_errors: int = 0


class DiskTier:
    """Entries of the model `fingerprint` below `folder`; `max_bytes` is for all models in `folder` together.

    Every method may be called from any thread; `read` and `write` take as long as the disk does.
    """

    def __init__(
        self, folder: Path, fingerprint: str, max_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not (fingerprint.isascii() and fingerprint.isalnum()):
            raise ValueError(f"the fingerprint {fingerprint!r:.80} must be letters and digits: it names a folder")
        self.root = folder
        self.folder = folder / fingerprint
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self.counters = DiskCounters()
        self._clock = clock
        self._paused_until = float("-inf")
        self._warned = False
        self._lock = threading.Lock()
        self._entries: dict[str, dict[Path, DiskEntry]] = {}
        """By key, and by path."""

    def load_index(self) -> int:
        """Read the heads of the newest files, remove what is damaged or was left half written; how many there are."""
        tokens = 0
        remove_abandoned(self.folder)
        for file in stored_files(self.folder)[: -MAX_ENTRIES - 1 : -1]:
            entry = self._load(file.path) if file.nbytes <= self.max_bytes else None
            if entry is not None:
                tokens += len(entry.tokens)
                if tokens > MAX_INDEX_TOKENS:
                    break
                self._add(entry)
        # The cap may be lower than it was.
        self._make_room(0)
        return len(self)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(entries) for entries in self._entries.values())

    def lookup(self, key: str, tokens: Sequence[int], limit: int, needs_state: bool) -> tuple[DiskEntry, int] | None:
        """The entry that restores most of the first `limit` tokens, and how many; from the index, without the disk."""
        ids = token_array(tokens)[: max(0, limit)]
        with self._lock:
            entries = list(self._entries.get(key, {}).values())
        best: tuple[DiskEntry, int] | None = None
        for entry in entries:
            length = shared_length(entry.tokens, ids)
            if needs_state:
                length = max((p for p in entry.checkpoints if p <= length), default=0)
            if length > (0 if best is None else best[1]):
                best = entry, length
        return best

    def read(self, entry: DiskEntry) -> list[StoredArray] | None:
        """The arrays of an entry, whole and verified, or None when it is gone, damaged or not readable."""
        try:
            with _opened(entry.path) as descriptor:
                head = self._own_head(descriptor)
                arrays = read_body(descriptor, head) if head.digest == entry.digest else None
        except (OSError, DamagedError, ForeignError) as error:
            self._lose(entry, error)
            return None
        if arrays is None:
            # Another process wrote the same tokens anew, perhaps with other checkpoints.
            self._drop(entry)
            if (newer := self._load(entry.path)) is not None:
                self._add(newer)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry.path)
        self.counters.read += 1
        self.counters.bytes_read += entry.nbytes
        return arrays

    def write(
        self,
        key: str,
        tokens: Sequence[int],
        arrays: Sequence[StoredArray],
        meta: Mapping[str, Any],
        *,
        checkpoints: Sequence[int] = (),
    ) -> bool:
        """Store an entry; True when it, or a longer one that serves as well, is on disk.

        Shorter entries of the same key that it serves as well are removed. Raises ValueError only for arguments that no
        file can hold: an unknown dtype, checkpoints out of order, meta that isn't JSON.
        """
        ids = token_array(tokens)
        if self._clock() < self._paused_until:
            self.counters.skipped += 1
            return False
        head_of = functools.partial(encode_head, self.fingerprint, key, ids, checkpoints, arrays, meta)
        head_bytes = len(head_of(bytes(32)))
        size = head_bytes + sum(aligned(one.data.nbytes) for one in arrays)
        if size > self.max_bytes:
            self.counters.refused += 1
            return False
        if self._is_covered(key, ids, checkpoints):
            self.counters.covered += 1
            return True
        path = self.folder / (_name(key, ids) + SUFFIX)
        try:
            make_private(self.root)
            make_private(self.folder)
            if not self._make_room(size):
                self.counters.refused += 1
                return False
            write_file(path, arrays, head_bytes, head_of)
        except IsADirectoryError:
            # Somebody's folder has the name of this one entry; the others can be written.
            self.counters.write_errors += 1
            log.warning("%s is a folder; the entry of that name isn't kept", path)
            return False
        except OSError as error:
            self._pause(error)
            return False
        self.counters.written += 1
        self.counters.bytes_written += size
        if (entry := self._load(path)) is not None:
            self._add(entry)
            self._remove_superseded(entry)
        return True

    def _own_head(self, descriptor: int) -> Head:
        head = read_head(descriptor)
        if head.fingerprint != self.fingerprint:
            raise ForeignError(f"an entry of {head.fingerprint!r:.80}")
        return head

    def _load(self, path: Path) -> DiskEntry | None:
        """The entry in a file, from its head; what is damaged is removed."""
        entry = DiskEntry(path, "", token_array([]), (), {}, 0, b"")
        try:
            with _opened(path) as descriptor:
                head = self._own_head(descriptor)
        except (OSError, DamagedError, ForeignError) as error:
            self._lose(entry, error)
            return None
        nbytes = head.body_start + head.body_bytes
        return DiskEntry(path, head.key, head.tokens, head.checkpoints, head.meta, nbytes, head.digest)

    def _add(self, entry: DiskEntry) -> None:
        with self._lock:
            self._entries.setdefault(entry.key, {})[entry.path] = entry

    def _drop(self, entry: DiskEntry) -> None:
        with self._lock:
            entries = self._entries.get(entry.key, {})
            entries.pop(entry.path, None)
            if not entries:
                self._entries.pop(entry.key, None)

    def _lose(self, entry: DiskEntry, error: Exception) -> None:
        """A file can't be used: out of the index, and off the disk if nobody can ever use it."""
        self._drop(entry)
        if isinstance(error, ForeignError):
            self.counters.foreign += 1
        elif isinstance(error, DamagedError):
            self.counters.damaged += 1
            log.warning("the cache file %s is damaged (%s) and is removed", entry.path, error)
            _unlink(entry.path)
        elif not isinstance(error, FileNotFoundError):
            self.counters.read_errors += 1
            log.warning("the cache file %s can't be read: %s", entry.path, error)

    def _is_covered(self, key: str, ids: array[int], checkpoints: Sequence[int]) -> bool:
        """Whether an entry on disk begins with these tokens and has the last of these checkpoints."""
        with self._lock:
            entries = list(self._entries.get(key, {}).values())
        for entry in entries:
            if entry.tokens[: len(ids)] == ids and set(checkpoints[-1:]) <= set(entry.checkpoints):
                try:
                    os.utime(entry.path)
                except OSError:
                    self._drop(entry)
                else:
                    return True
        return False

    def _remove_superseded(self, new: DiskEntry) -> None:
        """Remove the shorter entries that `new` begins with, unless they are the only ones with a checkpoint there."""
        with self._lock:
            entries = list(self._entries.get(new.key, {}).values())
        for old in entries:
            length = len(old.tokens)
            serves = not old.checkpoints or any(position <= length for position in new.checkpoints)
            if length < len(new.tokens) and serves and new.tokens[:length] == old.tokens:
                self._drop(old)
                self.counters.superseded += _unlink(old.path)

    def _make_room(self, size: int) -> bool:
        """Remove the entries that were used longest ago, of any model, until `size` bytes fit under the cap."""
        files = sorted(file for folder in subfolders(self.root) for file in stored_files(folder))
        total = sum(file.nbytes for file in files) + size
        with self._lock:
            own = {path: entry for entries in self._entries.values() for path, entry in entries.items()}
        for file in files:
            if total <= self.max_bytes:
                break
            if _unlink(file.path):
                self.counters.evicted += 1
                total -= file.nbytes
            if file.path in own:
                self._drop(own[file.path])
        return total <= self.max_bytes

    def _pause(self, error: OSError) -> None:
        self.counters.write_errors += 1
        self._paused_until = self._clock() + PAUSE_S
        if not self._warned:
            self._warned = True
            log.warning(
                "the prefix cache can't be written to %s (%s); trying again every %d s, without another word",
                self.folder,
                error,
                PAUSE_S,
            )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = open_entry(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> bool:
    with contextlib.suppress(OSError):
        os.unlink(path)
        return True
    return False


def _name(key: str, ids: array[int]) -> str:
    digest = hashlib.sha256(len(key.encode()).to_bytes(8, "little") + key.encode() + ids.tobytes())
    return digest.hexdigest()[:40]
