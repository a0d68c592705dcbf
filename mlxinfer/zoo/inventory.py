"""What is on this machine, and removing what mlxinfer or the hub's cache owns."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
from itertools import chain
from typing import TYPE_CHECKING

from mlxinfer.errors import InvalidRequestError, ModelNotFoundError
from mlxinfer.zoo.entries import catalog, find_entry
from mlxinfer.zoo.names import parse_name
from mlxinfer.zoo.packages import installed_package, package_folder
from mlxinfer.zoo.stores import (
    find_in_llama_cpp,
    find_in_lm_studio,
    hub_cache,
    hub_folder,
    list_hub_cache,
    list_llama_cpp,
    list_lm_studio,
    list_ollama,
)

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.zoo.files import ModelFiles


def installed(settings: Settings) -> list[ModelFiles]:
    """Every whole model on this machine: own packages, the hub's cache, LM Studio, llama.cpp and Ollama."""
    packages = (installed_package(entry, settings) for entry in catalog())
    everything = chain((m for m in packages if m), list_hub_cache(), list_lm_studio(), list_llama_cpp(), list_ollama())
    unique: dict[tuple[str, str], ModelFiles] = {}
    for model in everything:
        unique.setdefault((model.name, model.origin), model)
    return list(unique.values())


def remove(name: str, settings: Settings) -> int:
    """Delete a model that mlxinfer or the hub's cache holds, its partial downloads too. Returns the bytes freed.

    An alias loses its package and its hub copy. Raises InvalidRequestError for files that belong to the user or to
    another program, ModelNotFoundError when nothing is there.
    """
    parsed = parse_name(name)
    if parsed.kind == "path":
        raise InvalidRequestError(f"{name} is your own folder or file; mlxinfer doesn't delete it", param="model")
    if parsed.kind == "store":
        owner = f"`ollama rm {parsed.file}`" if parsed.store == "ollama" else "llama.cpp's cache folder"
        raise InvalidRequestError(f"{name} belongs to another program; remove it with {owner}", param="model")
    freed = 0
    repo, revision, file = parsed.repo, parsed.revision, parsed.file
    if parsed.kind == "alias":
        entry = find_entry(name)
        assert entry is not None, "parse_name found the alias"
        freed += _remove_package(entry.alias, settings)
        repo = entry.hub or ""
    if repo:
        freed += _remove_hub(repo, None if revision == "main" else revision, file)
    if freed == 0:
        if repo and (find_in_lm_studio(repo, file) or find_in_llama_cpp(repo, file)):
            raise InvalidRequestError(f"{name} belongs to LM Studio or llama.cpp; remove it there", param="model")
        raise ModelNotFoundError(f"{name} is not on this machine; see `mlxinfer ls`")
    return freed


def _remove_package(alias: str, settings: Settings) -> int:
    folder = package_folder(alias, settings)
    if not folder.is_dir() or folder.is_symlink():
        return 0
    # Renamed first: a half-deleted folder is never taken for a model. To a name of our own: two may remove at once.
    doomed = folder.with_name(f".fetch-removed-{alias}-{secrets.token_hex(4)}")
    try:
        folder.rename(doomed)
    except FileNotFoundError:  # the other one was first
        return 0
    size = sum(p.lstat().st_size for p in doomed.rglob("*") if os.path.isfile(p))
    shutil.rmtree(doomed)
    return size


def _remove_hub(repo: str, revision: str | None, file: str) -> int:
    """Delete one revision, or all of them; a GGUF of several is deleted by file, so that the others stay."""
    folder = hub_folder(repo)
    if not folder.is_dir():
        return 0
    partial = _remove_partials(repo)
    if file:
        return partial + _remove_hub_file(repo, file)
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(hub_cache())
        cached = next((r for r in cache.repos if r.repo_id == repo), None)
        if cached is None:
            return partial
        wanted = [
            r.commit_hash for r in cached.revisions if revision is None or revision in (r.commit_hash, *sorted(r.refs))
        ]
        if not wanted:
            return partial
        # Of this repository alone: a copy of it under another name has the same commits.
        strategy = dataclasses.replace(cache, repos=frozenset({cached})).delete_revisions(*wanted)
    except CacheNotFound:
        return partial
    strategy.execute()
    return partial + strategy.expected_freed_size


def _remove_partials(repo: str) -> int:
    freed = 0
    for path in (hub_folder(repo) / "blobs").glob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # a pull may be giving it its final name
            size = path.lstat().st_size
            path.unlink()
            freed += size
    return freed


def _remove_hub_file(repo: str, file: str) -> int:
    """Delete the snapshot links of one file and their blob."""
    from mlxinfer.zoo.checks import pick_gguf

    freed = 0
    folder = hub_folder(repo)
    for snapshot in (folder / "snapshots").glob("*"):
        names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*.gguf")]
        try:
            link = snapshot / pick_gguf(names, file, repo)
        except ModelNotFoundError:
            continue
        blob = link.resolve()
        if blob.is_relative_to(folder.resolve()) and blob.is_file():
            freed += blob.stat().st_size
            blob.unlink()
        link.unlink(missing_ok=True)
    return freed
