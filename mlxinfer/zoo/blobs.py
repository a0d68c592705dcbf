"""One large file of the hub: resumed with Range requests, hashed on the way, named only when whole.

A partial file lies beside its final name as `SHA256.mlxinfer.incomplete` and survives a cancel, a lost connection, a
full disk and a killed process; the hub client's own cache tools ignore it.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from mlxinfer.errors import DownloadError, OfflineError
from mlxinfer.types import Progress, ProgressEvent
from mlxinfer.zoo.stores import hub_cache, hub_folder
from mlxinfer.zoo.transfer import check_cancelled, locked, report

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from mlxinfer.zoo.hub import HubFile

TRIES = 5
"""Broken connections in a row, without a byte between them, before the download gives up."""
BACKOFF_S = 1.0
TIMEOUT_S = 20.0
BLOCK = 1 << 20
BUSY = (408, 429, 500, 502, 503, 504)


def blob_path(file: HubFile) -> Path:
    return hub_folder(file.repo) / "blobs" / str(file.sha256)


def partial_path(file: HubFile) -> Path:
    blob = blob_path(file)
    return blob.with_name(f"{blob.name}.mlxinfer.incomplete")


def bytes_on_disk(file: HubFile) -> int:
    """How much of the file an earlier try left."""
    if file.sha256 is None:
        return 0
    for path in (blob_path(file), partial_path(file)):
        if path.is_file():
            return min(path.stat().st_size, file.size)
    return 0


def fetch_blob(file: HubFile, progress: Progress | None, cancel: threading.Event | None) -> None:
    """Bring `file` to its place among the blobs, from where an earlier try stopped.

    Raises DownloadError for a wrong checksum (the partial file is dropped) or a connection that breaks TRIES times
    without progress (it is kept), OfflineError when there never was a connection.
    """
    blob, path = blob_path(file), partial_path(file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock = hub_cache() / ".locks" / hub_folder(file.repo).name / f"{file.sha256}.mlxinfer.lock"
    # The others wait, and then find the blob.
    with locked(lock, cancel, file.name):
        if blob.is_file() and blob.stat().st_size == file.size:
            return
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.unlink()  # not ours: a link would be written through, a device never ends
        with path.open("ab+") as out:
            partial = _Partial(out, file, progress, cancel)
            partial.read_existing()
            _download(partial)
            out.flush()
            os.fsync(out.fileno())
        if partial.digest.hexdigest() != file.sha256:
            path.unlink(missing_ok=True)
            raise DownloadError(
                f"{file.name} of {file.repo} has SHA-256 {partial.digest.hexdigest()}, the hub says {file.sha256}; it "
                f"was thrown away, run the same command again"
            )
        path.replace(blob)


@dataclass(slots=True)
class _Partial:
    """A file that grows at its end, with the hash of what it holds."""

    out: IO[bytes]
    file: HubFile
    progress: Progress | None
    cancel: threading.Event | None
    done: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def read_existing(self) -> None:
        """Hash what an earlier try left; more than the whole file is a mistake and dropped."""
        if self.out.seek(0, os.SEEK_END) > self.file.size:
            self.restart()
        self.out.seek(0)
        while block := self.out.read(BLOCK):
            check_cancelled(self.cancel, self.file.name)
            self._count(block)

    def append(self, block: bytes) -> None:
        check_cancelled(self.cancel, self.file.name)
        if self.done + len(block) > self.file.size:
            self.restart()
            raise DownloadError(
                f"{self.file.name} of {self.file.repo} is longer than the {self.file.size} bytes the hub announced"
            )
        self.out.write(block)
        self._count(block)

    def restart(self) -> None:
        self.out.truncate(0)
        self.digest, self.done = hashlib.sha256(), 0

    def _count(self, block: bytes) -> None:
        self.digest.update(block)
        self.done += len(block)
        report(self.progress, ProgressEvent("download", self.done, self.file.size, self.file.name))


def _download(partial: _Partial) -> None:
    """Ask until the last byte is there. Errors of the hub other than "busy" go to the caller at once."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

    file, failures = partial.file, 0
    while partial.done < file.size:
        before = partial.done
        try:
            _stream(partial)
            reason = "the connection closed early"
        except HfHubHTTPError as error:
            if error.response.status_code not in BUSY:
                raise
            reason = f"the hub answered {error.response.status_code}"
        except HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
        if partial.done >= file.size:
            return
        failures = 1 if partial.done > before else failures + 1
        if failures >= TRIES:
            kind = DownloadError if partial.done else OfflineError
            raise kind(
                f"{file.name} of {file.repo} broke off at {partial.done} of {file.size} bytes ({reason}); what "
                f"arrived is kept, run the same command again to go on"
            )
        _pause(BACKOFF_S * 2 ** (failures - 1), file, partial.cancel)


def _stream(partial: _Partial) -> None:
    """One request from the end of what is there; returns when the body ends, whole or not."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    from mlxinfer.zoo.hub import endpoint

    file, start = partial.file, partial.done
    url = hf_hub_url(file.repo, file.name, revision=file.commit, endpoint=endpoint())
    headers = build_hf_headers(library_name="mlxinfer") | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    # The client drops the token when a redirect leaves the hub's host.
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if start and not _starts_at(response, start):
            partial.restart()
        # As they come off the socket: gathering larger blocks would lose what a broken connection had brought.
        for block in response.iter_raw():
            partial.append(block)


def _starts_at(response: Any, start: int) -> bool:
    """Whether the server honoured the Range; some proxies answer with the whole file."""
    return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _pause(seconds: float, file: HubFile, cancel: threading.Event | None) -> None:
    if cancel is None:
        time.sleep(seconds)
    elif cancel.wait(seconds):
        check_cancelled(cancel, file.name)
