"""From a name to the files of a model on this machine, fetched if need be. What a name means: `names.py`."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import TYPE_CHECKING

from mlxinfer.errors import ModelFileError, ModelNotFoundError, OfflineError, UnsupportedModelError
from mlxinfer.types import Progress, ProgressEvent
from mlxinfer.zoo.checks import total_size, weight_files
from mlxinfer.zoo.entries import CatalogEntry, catalog, find_entry
from mlxinfer.zoo.files import ModelFiles
from mlxinfer.zoo.hub import fetch_hub, is_offline
from mlxinfer.zoo.inventory import installed
from mlxinfer.zoo.names import ModelName, parse_name
from mlxinfer.zoo.packages import fetch_package, installed_package
from mlxinfer.zoo.stores import find_in_hub_cache, find_in_llama_cpp, find_in_lm_studio, find_in_ollama, list_llama_cpp
from mlxinfer.zoo.transfer import report

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from mlxinfer.config import Settings


def resolve(
    name: str,
    settings: Settings,
    *,
    fetch: bool = True,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> ModelFiles:
    """The files of the model `name`. What is on this machine is used, and the network is not asked about it.

    Only what is nowhere here is fetched, and only if `fetch`. Raises ModelNotFoundError (with names that come
    close), OfflineError, GatedModelError, DownloadError, ModelFileError or UnsupportedModelError.
    """
    parsed = parse_name(name)
    if parsed.kind == "unknown":
        raise _not_found(name, settings)
    if found := find_local(parsed, settings):
        report(progress, ProgressEvent("resolve", label=found.origin))
        return found
    if not fetch:
        raise OfflineError(f"{name} is not on this machine; run `mlxinfer pull {name}`{_offers(parsed, settings)}")
    return _fetch(parsed, settings, progress, cancel)


def pull(
    name: str, settings: Settings, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> ModelFiles:
    """Make sure the model is here, and if it comes from the hub, whole and at the revision the hub has now.

    What another program or a package has already brought is not fetched again. Progress comes as bytes of the whole
    model. `cancel` may be set from any thread; what arrived is kept and the next pull goes on from there. Raises as
    `resolve` does.
    """
    parsed = parse_name(name)
    entry = find_entry(name) if parsed.kind == "alias" else None
    repo = entry.hub if entry else parsed.repo
    found = find_local(parsed, settings) if parsed.kind != "unknown" else None
    if found is None or found.origin != "hub cache" or not repo or is_offline():
        return resolve(name, settings, progress=progress, cancel=cancel)
    try:
        newest = fetch_hub(repo, parsed.revision, parsed.file, progress=progress, cancel=cancel)
    except OfflineError:
        return found
    return dataclasses.replace(newest, name=entry.alias) if entry else newest


def find_local(parsed: ModelName, settings: Settings) -> ModelFiles | None:
    """The model if it is on this machine; None when it would have to be fetched.

    Raises for a name that can only be local and isn't there or isn't a model.
    """
    if parsed.kind == "path":
        assert parsed.path is not None, "parse_name gives paths a path"
        return _from_path(parsed.text, parsed.path)
    if parsed.kind == "store":
        return _from_store(parsed, settings)
    if parsed.kind == "alias":
        entry = find_entry(parsed.text)
        assert entry is not None, "parse_name found the alias"
        return find_local_entry(entry, settings)
    return _find_hub_id(parsed.repo, parsed.revision, parsed.file)


def find_local_entry(entry: CatalogEntry, settings: Settings) -> ModelFiles | None:
    """Any source of a catalogue entry that is already here, under the entry's alias."""
    found = installed_package(entry, settings)
    if found is None and entry.hub:
        found = _find_hub_id(entry.hub, "main", "")
        if found:
            found = dataclasses.replace(found, name=entry.alias)
    return found


def _find_hub_id(repo: str, revision: str, file: str) -> ModelFiles | None:
    found = find_in_hub_cache(repo, revision, file)
    # The other stores keep no revisions, so they can answer only for the newest one.
    if found is None and revision == "main":
        found = find_in_lm_studio(repo, file) or find_in_llama_cpp(repo, file)
    return found


def _fetch(
    parsed: ModelName, settings: Settings, progress: Progress | None, cancel: threading.Event | None
) -> ModelFiles:
    if parsed.kind == "hub":
        try:
            return fetch_hub(parsed.repo, parsed.revision, parsed.file, progress=progress, cancel=cancel)
        except OfflineError as error:
            raise OfflineError(f"{error}{_offers(parsed, settings)}") from error
    entry = find_entry(parsed.text)
    assert entry is not None, "the other kinds are found locally or raise"
    if entry.package and (entry.package.first or not entry.hub or is_offline()):
        return fetch_package(entry, settings, progress=progress, cancel=cancel)
    assert entry.hub is not None, "an entry has a hub id or a package"
    try:
        found = fetch_hub(entry.hub, progress=progress, cancel=cancel)
    except OfflineError as error:
        if entry.package:
            return fetch_package(entry, settings, progress=progress, cancel=cancel)
        raise OfflineError(f"{error}{_offers(parsed, settings)}") from error
    return dataclasses.replace(found, name=entry.alias)


def _from_path(text: str, path: Path) -> ModelFiles:
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(f"{text} is a file but no .gguf; name a model folder or a .gguf file")
        return ModelFiles(text, "gguf", path, "file", path.stat().st_size)
    if not os.path.isdir(path):
        raise ModelNotFoundError(f"there is no model at {text}")
    weights = weight_files(path)
    if weights is not None:
        return ModelFiles(text, "folder", path, "folder", total_size(weights))
    ggufs = sorted(p for p in path.glob("*.gguf") if os.path.isfile(p))
    if len(ggufs) == 1:
        return ModelFiles(text, "gguf", ggufs[0], "file", ggufs[0].stat().st_size)
    if ggufs:
        raise ModelNotFoundError(f"{text} holds {len(ggufs)} .gguf files; name one: {', '.join(map(str, ggufs[:8]))}")
    if not os.path.isfile(path / "config.json"):
        raise ModelFileError(f"{text} is no model folder: it has no config.json")
    raise ModelFileError(
        f"{text} has a config.json but not all of its weights "
        "(model*.safetensors or pytorch_model*.bin, and their index)"
    )


def _from_store(parsed: ModelName, settings: Settings) -> ModelFiles:
    if parsed.store == "ollama":
        found = find_in_ollama(parsed.file)
    else:
        found = next((m for m in list_llama_cpp() if m.path.name == parsed.file), None)
    if found is None:
        raise _not_found(parsed.text, settings)
    return found


def _not_found(name: str, settings: Settings) -> ModelNotFoundError:
    close = close_names(name, settings)
    hint = f"; did you mean {' or '.join(close)}?" if close else "; see `mlxinfer ls --all` for the catalogue"
    return ModelNotFoundError(
        f"no model is called {name!r:.160}{hint} (a model is an alias, org/name on the hub, a folder or a .gguf file)"
    )


def close_names(name: str, settings: Settings, count: int = 3) -> list[str]:
    """Aliases and models on this machine whose names come close to `name`."""
    known = {e.alias: e.alias for e in catalog()} | {m.name.lower(): m.name for m in installed(settings)}
    return [known[match] for match in difflib.get_close_matches(name.lower(), known, n=count, cutoff=0.5)]


def _offers(parsed: ModelName, settings: Settings) -> str:
    """A sentence about models on this machine that could serve instead."""
    word = (parsed.repo or parsed.text).rpartition("/")[2]
    close = [n for n in close_names(word, settings) if n != parsed.text]
    here = [m.name for m in installed(settings) if m.name in close] or [m.name for m in installed(settings)][:3]
    return f". On this machine: {', '.join(here)}" if here else ""
