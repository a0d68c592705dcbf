"""Models that other programs have already downloaded: the hub's cache, LM Studio, llama.cpp and Ollama.

Each store has a finder (one model by name) and a lister (all of them). Nothing here writes or fetches, and no name
leads out of its store; a model that is not whole is not found, and what can't be read is passed over.

Links are another matter. The hub's cache and Ollama's are laid out by a program, out of names that come from the
network: a link there that leaves the store is not followed. LM Studio's and llama.cpp's folders are the user's to
arrange, and people link models into them from other disks: those links are followed, to regular files.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlxinfer.config import expand_user
from mlxinfer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from mlxinfer.formats.files import open_regular, read_json_object, read_regular
from mlxinfer.zoo.checks import pick_gguf, stays_inside, total_size, weight_files
from mlxinfer.zoo.files import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

OLLAMA_MODEL_LAYER = "application/vnd.ollama.image.model"
OLLAMA_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_JSON = 4 << 20
MAX_LINE = 4096
"""Bytes of a file that holds a commit or a path."""


def hub_cache() -> Path:
    """The hub's cache by its own rules: HF_HUB_CACHE, else HF_HOME/hub, else under XDG_CACHE_HOME or ~/.cache."""
    for variable, inside in (
        ("HF_HUB_CACHE", "."),
        ("HUGGINGFACE_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := os.environ.get(variable):
            return expand_user(value, variable) / inside
    return expand_user("~/.cache", "the default of HF_HOME") / "huggingface" / "hub"


def hub_folder(repo: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def hub_snapshot(repo: str, revision: str) -> Path | None:
    """The snapshot folder a revision points at, when it is there; it may be incomplete."""
    folder = hub_folder(repo)
    commit = revision
    if not COMMIT.fullmatch(revision):
        commit = _line(folder / "refs" / revision)
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and os.path.isdir(snapshot) else None


def _line(path: Path) -> str:
    """What a one-line file says; "" when it says nothing that can be read."""
    try:
        return (read_regular(path, MAX_LINE) or b"").decode("utf-8").strip()
    except (ModelFileError, UnicodeDecodeError):
        return ""


def find_in_hub_cache(repo: str, revision: str = "main", file: str = "") -> ModelFiles | None:
    snapshot = hub_snapshot(repo, revision)
    if snapshot is None:
        return None
    at = "" if revision == "main" else f"@{revision}"
    return _in_repo(snapshot, f"{repo}{at}", file, "hub cache", roots=(hub_folder(repo), hub_cache()))


def _in_repo(folder: Path, name: str, file: str, origin: str, roots: tuple[Path, ...] = ()) -> ModelFiles | None:
    """The model of one repository's folder: safetensors, or the GGUF that `file` chooses."""
    weights = None if file else weight_files(folder)
    if weights is not None:
        if roots and not stays_inside([*weights, folder / "config.json"], roots):
            return None
        return ModelFiles(name, "folder", folder, origin, total_size(weights))
    try:
        chosen = pick_gguf(_ggufs(folder), file, name)
    except (ModelNotFoundError, UnsupportedModelError):
        return None
    path = folder / chosen
    if not os.path.isfile(path) or (roots and not stays_inside([path], roots)):
        return None
    return ModelFiles(f"{name}:{chosen}", "gguf", path, origin, path.stat().st_size)


def _ggufs(folder: Path) -> list[str]:
    """GGUF files of a folder and its direct subfolders, as relative names."""
    return [
        p.relative_to(folder).as_posix() for pattern in ("*.gguf", "*/*.gguf") for p in sorted(folder.glob(pattern))
    ]


def list_hub_cache() -> Iterator[ModelFiles]:
    for folder in sorted(hub_cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        refs = folder / "refs"
        # A dot starts the temporary name of a ref that is being written.
        for ref in sorted(p for p in refs.rglob("*") if os.path.isfile(p) and not p.name.startswith(".")):
            revision = ref.relative_to(refs).as_posix()
            snapshot = hub_snapshot(repo, revision)
            if snapshot is None:
                continue
            if (found := find_in_hub_cache(repo, revision)) and found.kind == "folder":
                yield found
            for name in _ggufs(snapshot):
                if each := find_in_hub_cache(repo, revision, name):
                    yield each


def lm_studio_roots() -> list[Path]:
    """Where LM Studio keeps models: the folder its pointer file names, ~/.lmstudio, ~/.cache/lm-studio."""
    home = _home()
    if home is None:
        return []
    roots = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    pointer = _line(home / ".lmstudio-home-pointer")
    if pointer and "\0" not in pointer:
        roots.insert(0, Path(pointer))
    unique = dict.fromkeys(root / "models" for root in roots)
    return [root for root in unique if os.path.isdir(root)]


def _home() -> Path | None:
    """None for a user without one, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def find_in_lm_studio(repo: str, file: str = "") -> ModelFiles | None:
    """LM Studio lays models out as publisher/repository, the names of the hub."""
    for root in lm_studio_roots():
        if found := _in_repo(root / repo, repo, file, "lm studio"):
            return found
    return None


def list_lm_studio() -> Iterator[ModelFiles]:
    for root in lm_studio_roots():
        for folder in sorted(p for p in root.glob("*/*") if os.path.isdir(p)):
            repo = folder.relative_to(root).as_posix()
            if (found := _in_repo(folder, repo, "", "lm studio")) and found.kind == "folder":
                yield found
            for name in _ggufs(folder):
                if each := _in_repo(folder, repo, name, "lm studio"):
                    yield each


def llama_cpp_root() -> Path:
    """LLAMA_CACHE, else ~/Library/Caches/llama.cpp on macOS, else under XDG_CACHE_HOME or ~/.cache."""
    if explicit := os.environ.get("LLAMA_CACHE"):
        return expand_user(explicit, "LLAMA_CACHE")
    if sys.platform == "darwin":
        return expand_user("~/Library/Caches/llama.cpp", "the default of LLAMA_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return expand_user(base or "~/.cache", "XDG_CACHE_HOME" if base else "the default of LLAMA_CACHE") / "llama.cpp"


def list_llama_cpp() -> Iterator[ModelFiles]:
    root = llama_cpp_root()
    for path in sorted(root.glob("*.gguf")):
        if os.path.isfile(path) and "mmproj" not in path.name.lower():
            yield ModelFiles(f"llama.cpp:{path.name}", "gguf", path, "llama.cpp", path.stat().st_size)


def find_in_llama_cpp(repo: str, file: str = "") -> ModelFiles | None:
    """A file that llama.cpp fetched from a hub repository; it names them org_name_file."""
    prefix = f"{repo.replace('/', '_')}_"
    files = {m.path.name.removeprefix(prefix): m for m in list_llama_cpp() if m.path.name.startswith(prefix)}
    try:
        return files[pick_gguf(files, file, repo)] if files else None
    except (ModelNotFoundError, UnsupportedModelError):
        return None


def ollama_roots() -> list[Path]:
    """OLLAMA_MODELS alone when it is set, else the user's store and, on Linux, that of the system service."""
    if explicit := os.environ.get("OLLAMA_MODELS"):
        return [expand_user(explicit, "OLLAMA_MODELS")]
    home = _home()
    own = [home / ".ollama" / "models"] if home else []
    return [*own, Path("/usr/share/ollama/.ollama/models")]


def find_in_ollama(name: str) -> ModelFiles | None:
    """`name` as Ollama writes it: model[:tag], namespace/model[:tag] or host/namespace/model[:tag]."""
    head, colon, tag = name.rpartition(":")
    model, tag = (head, tag) if colon and "/" not in tag else (name, "latest")
    parts = model.split("/")
    parts = [*("registry.ollama.ai", "library")[: 3 - len(parts)], *parts]
    if len(parts) != 3 or any(p in ("", ".", "..") for p in (*parts, tag)):
        return None
    for root in ollama_roots():
        manifest = root.joinpath("manifests", *parts, tag)
        if found := _from_manifest(root, manifest):
            return found
    return None


def list_ollama() -> Iterator[ModelFiles]:
    for root in ollama_roots():
        try:
            manifests = sorted((root / "manifests").glob("*/*/*/*"))
        except OSError:  # the service's store may be closed to us
            continue
        for manifest in manifests:
            if found := _from_manifest(root, manifest):
                yield found


def _from_manifest(root: Path, manifest: Path) -> ModelFiles | None:
    """The GGUF of one manifest, if its digest is a SHA-256 and the blob is a file of the store of that size."""
    try:
        layers = (read_json_object(manifest, MAX_JSON) or {}).get("layers")
    except ModelFileError:
        return None
    for layer in layers if isinstance(layers, list) else ():
        if not isinstance(layer, dict) or layer.get("mediaType") != OLLAMA_MODEL_LAYER:
            continue
        match = OLLAMA_DIGEST.fullmatch(str(layer.get("digest")))
        blob = root / "blobs" / f"sha256-{match[1]}" if match else None
        if blob is None or not os.path.isfile(blob) or not stays_inside([blob], [root]) or not _is_gguf(blob):
            continue
        size = blob.stat().st_size
        if layer.get("size") in (None, size):
            return ModelFiles(f"ollama:{_ollama_name(root, manifest)}", "gguf", blob, "ollama", size)
    return None


def _ollama_name(root: Path, manifest: Path) -> str:
    host, namespace, model, tag = manifest.relative_to(root / "manifests").parts
    parts = [host, namespace, model]
    if host == "registry.ollama.ai":
        parts = [model] if namespace == "library" else [namespace, model]
    return f"{'/'.join(parts)}:{tag}"


def _is_gguf(path: Path) -> bool:
    try:
        file = open_regular(path)
        if file is None:
            return False
        with file:
            return file.read(4) == b"GGUF"
    except (OSError, ModelFileError):
        return False
