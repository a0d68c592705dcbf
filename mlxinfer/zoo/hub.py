"""Downloads from the Hugging Face hub into the hub's own cache.

The hub client (2.4, read and measured) writes to a fresh temporary name per call and deletes it on any failure, so a
broken download of many gigabytes starts again. Weights therefore come through `blobs.py`, which resumes and checks
SHA-256; the client still does names, tokens, metadata, small files and the layout of the cache. The ref of a
revision moves only when every file of it is there, so an interrupted update leaves the old revision usable.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import (
    DownloadError,
    GatedModelError,
    MlxinferError,
    ModelFileError,
    ModelNotFoundError,
    OfflineError,
    UnsupportedModelError,
)
from mlxinfer.types import Progress, ProgressEvent
from mlxinfer.zoo.checks import pick_gguf, plain_name
from mlxinfer.zoo.stores import find_in_hub_cache, hub_cache, hub_folder
from mlxinfer.zoo.transfer import check_cancelled, check_space, disk_errors, report

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from mlxinfer.zoo.files import ModelFiles

PATTERNS = ("*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.jinja", "*.txt")
"""Data only. Code (*.py) and pickles (*.bin, *.pt) of a repository are never fetched."""
NESTED_PATTERNS = ("[0-9]_*/*.json", "[0-9]_*/*.safetensors")
"""The extra modules of an embedding model, for example 1_Pooling/config.json."""
SKIPPED = ("consolidated*",)
"""A second copy of the same weights that some repositories keep."""
TIMEOUT_S = 10.0
PLAIN_HTTP_LIMIT = 50_000_000_000
"""The hub serves larger files through its Xet client only."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at one commit."""

    repo: str
    commit: str
    name: str
    size: int
    sha256: str | None
    """Of files in large-file storage; the hub states none for small ones."""

    @property
    def pointer(self) -> Path:
        return hub_folder(self.repo) / "snapshots" / self.commit / self.name

    @property
    def present(self) -> bool:
        return self.pointer.is_file() and self.pointer.stat().st_size == self.size


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """True when HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def fetch_hub(
    repo: str,
    revision: str = "main",
    file: str = "",
    *,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> ModelFiles:
    """Bring a model of the hub into its cache; what is there already is not fetched again.

    `file` chooses one GGUF, by name or quantization. Raises OfflineError, GatedModelError, ModelNotFoundError,
    UnsupportedModelError, DownloadError or ModelFileError.
    """
    if is_offline():
        raise OfflineError(
            f"{repo} is not on this machine and HF_HUB_OFFLINE is set; unset it to download, or see `mlxinfer ls`"
        )
    report(progress, ProgressEvent("resolve", label=repo))
    with hub_errors(repo, revision):
        commit, files = _list_files(repo, revision)
    chosen = _choose(repo, files, file)
    missing = [f for f in chosen if not f.present]
    total = sum(f.size for f in chosen)
    done = total - sum(f.size for f in missing)
    needed = sum(f.size for f in missing)
    with disk_errors(repo, needed), hub_errors(repo, revision):
        cache = hub_cache()
        cache.mkdir(parents=True, exist_ok=True)
        if missing:
            from mlxinfer.zoo.blobs import bytes_on_disk

            check_space(cache, needed - sum(bytes_on_disk(f) for f in missing))
        for each in sorted(missing, key=lambda f: f.size):
            check_cancelled(cancel, repo)
            _fetch_file(each, _shifted(progress, done, total), cancel)
            done += each.size
        _write_ref(repo, revision, commit)
    report(progress, ProgressEvent("verify", total, total, repo))
    found = find_in_hub_cache(repo, revision, file or (chosen[0].name if chosen[0].name.endswith(".gguf") else ""))
    if found is None:
        raise ModelFileError(
            f"{repo}@{commit[:12]} was downloaded but is not whole: config.json, a shard that the index names, or a "
            f"link that leaves {hub_cache()}; remove it with `mlxinfer rm {repo}` and pull again"
        )
    return found


def peek(repo: str, revision: str = "main") -> tuple[Path, int]:
    """(config.json in the cache, bytes of the weights that a pull would fetch), without fetching the weights."""
    if is_offline():
        raise OfflineError(f"{repo} is not on this machine and HF_HUB_OFFLINE is set, so its size is not known")
    with hub_errors(repo, revision), disk_errors(repo, 0):
        _, files = _list_files(repo, revision)
        chosen = _choose(repo, files, "")
        config = next((f for f in chosen if f.name == "config.json"), None)
        if config is None:
            raise UnsupportedModelError(f"{repo} has no config.json; pull it to see what is in it")
        _fetch_file(config, None, None)
        return config.pointer, sum(f.size for f in chosen if f.name.endswith(".safetensors"))


def _shifted(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Progress of one file, told as progress of the whole model."""
    if progress is None:
        return None
    return lambda e: progress(ProgressEvent(e.phase, min(done + e.done, total), total, e.label))


def _list_files(repo: str, revision: str) -> tuple[str, list[HubFile]]:
    """(commit, its files with size and SHA-256)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi(endpoint=endpoint(), library_name="mlxinfer")
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except HFValidationError:
        raise
    except (ValueError, KeyError, TypeError) as error:  # for example the login page of a hotel's network
        raise OfflineError(f"{endpoint()} does not answer as a hub does ({type(error).__name__})") from error
    if not info.sha:
        raise DownloadError(f"the hub names no commit for {repo}@{revision}")
    files: list[HubFile] = []
    for sibling in info.siblings or []:
        if not plain_name(sibling.rfilename):
            raise ModelFileError(f"{repo} lists a file {sibling.rfilename!r:.120} that would leave the store")
        size = sibling.lfs.size if sibling.lfs else sibling.size
        files.append(HubFile(repo, info.sha, sibling.rfilename, size or 0, sibling.lfs.sha256 if sibling.lfs else None))
    return info.sha, files


def _choose(repo: str, files: list[HubFile], file: str) -> list[HubFile]:
    """The files to fetch: a safetensors model whole, or exactly one GGUF."""
    names = [f.name for f in files]
    weights = [n for n in names if n.endswith(".safetensors") and "/" not in n and not _matches(n, SKIPPED)]
    if not file and weights:
        return [f for f in files if _wanted(f.name)]
    if file or any(n.lower().endswith(".gguf") for n in names):
        wanted = pick_gguf(names, file, repo)
        return [f for f in files if f.name == wanted]
    others = ", ".join(sorted({Path(n).suffix for n in names if Path(n).suffix in (".bin", ".pt", ".onnx", ".npz")}))
    raise UnsupportedModelError(
        f"{repo} holds no .safetensors and no .gguf weights" + (f" (only {others})" if others else "")
    )


def _wanted(name: str) -> bool:
    if "/" in name:
        return _matches(name, NESTED_PATTERNS)
    return _matches(name, PATTERNS) and not _matches(name, SKIPPED)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _fetch_file(file: HubFile, progress: Progress | None, cancel: threading.Event | None) -> None:
    from huggingface_hub import hf_hub_download

    from mlxinfer.zoo.blobs import fetch_blob

    if file.sha256 is not None and file.size <= PLAIN_HTTP_LIMIT:
        fetch_blob(file, progress, cancel)
    # With the blob there, this only links it into the snapshot; small files it fetches itself.
    hf_hub_download(
        file.repo,
        file.name,
        revision=file.commit,
        cache_dir=hub_cache(),
        endpoint=endpoint(),
        etag_timeout=TIMEOUT_S,
        library_name="mlxinfer",
        tqdm_class=_silent_bar(file, progress, cancel),
    )
    if not file.present:
        raise DownloadError(f"{file.name} of {file.repo} is not the {file.size} bytes that were announced")


def _silent_bar(file: HubFile, progress: Progress | None, cancel: threading.Event | None) -> type[Any]:
    """A tqdm that draws nothing, reports bytes and stops the transfer when cancelled."""
    from tqdm.std import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for mine in ("name", "file", "disable"):
                kwargs.pop(mine, None)
            super().__init__(*args, **kwargs, file=io.StringIO(), disable=False)

        def update(self, n: float | None = 1) -> bool | None:
            check_cancelled(cancel, file.name)
            result = super().update(n)
            report(progress, ProgressEvent("download", int(self.n), file.size, file.name))
            return result

    return SilentBar


def _write_ref(repo: str, revision: str, commit: str) -> None:
    """Point the revision at the commit, in one rename."""
    if revision == commit:
        return
    ref = hub_folder(repo) / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    temporary = ref.with_name(f".{ref.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(commit, encoding="ascii")
    temporary.replace(ref)


@contextlib.contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Map the hub client's exceptions onto mlxinfer's, with what to do about each."""
    from huggingface_hub import errors as hub

    transport: type[Exception] = hub.HTTPError  # pyright: ignore[reportPrivateImportUsage]  # httpx's, of either major version
    at = "" if revision == "main" else f"@{revision}"
    try:
        yield
    except MlxinferError:
        raise
    except hub.GatedRepoError as error:
        raise gated(repo) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub knows no model {repo}; if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except (hub.RevisionNotFoundError, hub.RemoteEntryNotFoundError) as error:
        raise ModelNotFoundError(f"{repo} has no revision or file {revision!r:.120}") from error
    except hub.HFValidationError as error:
        raise ModelNotFoundError(f"{repo}{at} is not a valid name on the hub: {error}") from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise gated(repo) from error
        raise DownloadError(f"the hub answered {status} for {repo}{at}; try again later") from error
    except (
        hub.OfflineModeIsEnabled,
        hub.LocalEntryNotFoundError,
        hub.FileMetadataError,
        transport,
        ConnectionError,
        TimeoutError,
    ) as error:
        raise OfflineError(
            f"{repo}{at} is not on this machine and {endpoint()} cannot be reached ({type(error).__name__}); "
            f"check the connection, or use a model that `mlxinfer ls` lists"
        ) from error


def gated(repo: str) -> GatedModelError:
    return GatedModelError(
        f"{repo} asks for its licence to be accepted: open {endpoint()}/{repo}, accept it, then log in with "
        f"`hf auth login` or set HF_TOKEN to a token of that account, and run the same command again"
    )
