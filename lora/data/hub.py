"""Data sets of the Hugging Face hub: the files of one split, downloaded; reading them is files.py's."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import DownloadError, GatedModelError, InvalidRequestError, ModelNotFoundError, OfflineError
from mlxinfer.lora.data.files import SUFFIXES, Record, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<config>[\w.-]+))?", re.ASCII)
_ALIASES = {"valid": ("validation", "valid", "dev"), "train": ("train",), "test": ("test",)}


def is_dataset_id(source: str) -> bool:
    """Whether `source` reads as "owner/name" or "owner/name:config", and no such path exists here."""
    return _ID.fullmatch(source) is not None and not source.endswith(SUFFIXES) and not Path(source).exists()


def hub_records(source: str, split: str) -> Iterator[Record]:
    """Rows of a split of "owner/name" or "owner/name:config", through `datasets` where it is installed.

    Raises OfflineError, ModelNotFoundError, GatedModelError or DownloadError, and InvalidRequestError for a split
    that isn't there.
    """
    match = _ID.fullmatch(source)
    assert match is not None
    repo, config = match["repo"], match["config"]
    if importlib.util.find_spec("datasets") is not None:
        yield from _through_datasets(source, repo, config, split)
        return
    for path in _download(source, repo, config, split):
        yield from read_records(path)


def _through_datasets(source: str, repo: str, config: str | None, split: str) -> Iterator[Record]:
    datasets: Any = importlib.import_module("datasets")
    name = {"valid": "validation"}.get(split, split)
    try:
        rows = datasets.load_dataset(repo, config, split=name)
    except OSError as error:
        raise OfflineError(f"the data set {source} is not on this machine and the hub gave none: {error}") from error
    except ValueError as error:
        raise InvalidRequestError(f"the data set {source}: {error}", param="data") from error
    for number, row in enumerate(rows, 1):
        yield Record(f"{source}/{name}:{number}", dict(row))


def _download(source: str, repo: str, config: str | None, split: str) -> list[Path]:
    # They take a while to import, and only this needs them.
    import httpx
    from huggingface_hub import HfApi, errors, hf_hub_download

    offline = f"the data set {source} cannot be fetched: the hub cannot be reached, or HF_HUB_OFFLINE is set"
    try:
        files = HfApi().list_repo_files(repo, repo_type="dataset")
        names = choose_files(files, config, split)
        if not names:
            raise InvalidRequestError(
                f"the data set {source} has no {' / '.join(SUFFIXES)} file of the split {split!r}; its files: "
                f"{', '.join(files[:8])}",
                param="data",
            )
        return [Path(hf_hub_download(repo, name, repo_type="dataset")) for name in names]
    except errors.HFValidationError as error:
        raise InvalidRequestError(
            f"{source} is neither a file here nor a name on the hub: {error}", param="data"
        ) from error
    except errors.GatedRepoError as error:
        raise GatedModelError(f"the data set {source} wants its licence accepted, or a token, first") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"neither a file or folder here nor a data set of the hub: {source}") from error
    except (
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,
        httpx.ConnectError,
        httpx.TimeoutException,
    ) as e:
        raise OfflineError(offline) from e
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise DownloadError(f"the data set {source}: {error}") from error


def choose_files(files: list[str], config: str | None, split: str) -> list[str]:
    """Files of a split, of one format (Parquet first), by the hub's naming: the split is the beginning of the file's
    name or a folder above it, the config a folder."""
    names = _ALIASES.get(split, (split,))
    pattern = re.compile(rf"({'|'.join(map(re.escape, names))})([-_.]\d.*)?")
    found: list[PurePosixPath] = []
    for path in map(PurePosixPath, files):
        in_split = pattern.fullmatch(path.stem) is not None or any(p in names for p in path.parts[:-1])
        if in_split and (config is None or config in path.parts[:-1]):
            found.append(path)
    for suffix in (".parquet", ".jsonl", ".json", ".csv"):
        if chosen := sorted(str(p) for p in found if p.suffix == suffix):
            return chosen
    return []
