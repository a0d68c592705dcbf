"""Is what lies there a whole model: shards against their index, links against the store, which GGUF of several."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mlxinfer.zoo.files import ModelFiles

MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 64 << 20
GGUF_ORDER = ("Q4_1", "Q4_0", "Q8_0", "Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "F16", "BF16")
"""Which quantization of a repository is taken when none is named: first those that are kept packed without loss."""
TORCH_FILES = "torch's .bin files"
TORCH_INDEX = "pytorch_model.bin.index.json"
READ_AS_THEY_ARE = frozenset({"awq", "bitnet", "mxfp4"})
"""Methods of quantization, not mlx's own, that mlx-lm reads."""
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def plain_name(name: object) -> bool:
    """True for a relative file name that stays in its folder."""
    if not isinstance(name, str) or not name or len(name) > 512 or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def weight_files(folder: Path) -> tuple[Path, ...] | None:
    """The weight files of a whole model folder, or None when config.json or a weight file is missing.

    The index wins over what else lies in the folder, as for every reader of sharded checkpoints. torch's .bin files
    count where there is no safetensors file.
    """
    if not os.path.isfile(folder / "config.json"):
        return None
    index = folder / "model.safetensors.index.json"
    if os.path.exists(index):
        names = _indexed(index)
        files = tuple(folder / name for name in names) if names else ()
    else:
        files = tuple(sorted(folder.glob("model*.safetensors"))) or tuple(sorted(folder.glob("weights*.safetensors")))
    if not files and not os.path.exists(index):
        files = _torch_files(folder)
    return files if files and all(os.path.isfile(f) for f in files) else None


def _torch_files(folder: Path) -> tuple[Path, ...]:
    if next(folder.glob("*.safetensors"), None) is not None:
        return ()
    index = folder / TORCH_INDEX
    if os.path.exists(index):
        return tuple(folder / name for name in _indexed(index) or ())
    return tuple(sorted(folder.glob("pytorch_model*.bin")))


def needs_conversion(folder: Path) -> str | None:
    """What the weights of a folder are, where they have to be converted before they are loaded; else None.

    For example "torch's .bin files" or "quantized by gptq". Raises ModelFileError for a config.json that is no JSON.
    """
    if any(file.suffix == ".bin" for file in weight_files(folder) or ()):
        return TORCH_FILES
    config = read_json_object(folder / "config.json", MAX_CONFIG_BYTES) or {}
    if "quantization" in config:
        return None
    tables = (config, config.get("text_config"))
    asked = [
        table["quantization_config"] for table in tables if isinstance(table, dict) and "quantization_config" in table
    ]
    if not asked:
        return "quantized by modelopt" if os.path.isfile(folder / "hf_quant_config.json") else None
    method = asked[0].get("quant_method") if isinstance(asked[0], dict) else None
    if not isinstance(method, str) or method.lower() in READ_AS_THEY_ARE:
        return None
    return f"quantized by {method:.40}"


@contextlib.contextmanager
def naming_the_conversion(files: ModelFiles) -> Iterator[None]:
    """Errors about a checkpoint of a foreign kind say what makes a model of it that can be loaded.

    Some kinds are read by mlx-lm for some architectures, so it is tried first; torch's .bin files never are.
    """
    kind = needs_conversion(files.path) if files.kind == "folder" else None
    if kind is None:
        yield
        return
    folder = files.path.name or "model"
    what = f"convert it first: `mlxinfer convert {shlex.quote(str(files.path))} {shlex.quote(f'./{folder}-mlx')}`"
    if kind == TORCH_FILES:
        raise UnsupportedModelError(f"{files.path} has {kind}, which are not loaded as they are; {what}")
    try:
        yield
    except (ModelFileError, UnsupportedModelError) as error:
        raise type(error)(f"{error}\n{files.path} is {kind}; {what}") from error


def _indexed(index: Path) -> list[str] | None:
    try:
        names = set((read_json_object(index, MAX_INDEX_BYTES) or {})["weight_map"].values())
    except (ModelFileError, KeyError, TypeError, AttributeError):
        return None
    return sorted(names) if names and all(plain_name(n) for n in names) else None


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json. Raises ModelFileError when it is missing, too large or no JSON object."""
    config = read_json_object(path, MAX_CONFIG_BYTES)
    if config is None:
        raise ModelFileError(f"{path} is missing")
    return config


def total_size(files: Iterable[Path]) -> int:
    return sum(f.stat().st_size for f in files)


def stays_inside(files: Iterable[Path], roots: Sequence[Path]) -> bool:
    """True when every file's real path lies under one of the real roots."""
    real = [root.resolve() for root in roots]
    return all(any(f.resolve().is_relative_to(root) for root in real) for f in files)


def quantization_of(file: str) -> str:
    """The quantization a GGUF's name carries, for example "Q4_K_M"; "" when it carries none."""
    match = re.search(r"[-._]((?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32))(?:\.gguf)?$", file, re.IGNORECASE)
    return match[1].upper() if match else ""


def pick_gguf(names: Iterable[str], wanted: str, repo: str) -> str:
    """One GGUF file of a repository: the named file or quantization, the only one, or the first of GGUF_ORDER.

    Raises ModelNotFoundError that lists the choices, UnsupportedModelError when the match comes in pieces.
    """
    found = [n for n in sorted(names) if n.lower().endswith(".gguf") and "mmproj" not in n.lower()]
    whole = [n for n in found if not SPLIT.search(n) and "imatrix" not in n.lower()]
    if wanted:
        matches = [n for n in whole if n == wanted or quantization_of(n) == wanted.upper()]
        split = [n for n in found if SPLIT.search(n) and wanted.upper() in n.upper()]
    else:
        matches = whole if len(whole) == 1 else [n for q in GGUF_ORDER for n in whole if quantization_of(n) == q]
        split = found if not whole else []
    if matches:
        return matches[0]
    if split:
        raise UnsupportedModelError(f"{split[0]} of {repo} is one piece of a GGUF in several files; take another one")
    choices = ", ".join(f"{repo}:{quantization_of(n) or n}" for n in whole) or "none"
    raise ModelNotFoundError(f"{repo} holds no GGUF {wanted or 'that can be chosen for you'}; choose one of: {choices}")
