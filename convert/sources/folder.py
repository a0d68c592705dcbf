"""What the readers of folders have in common: entries over a store of tensors, config.json, the other files."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.sources.base import Logical, PackedArrays
from mlxinfer.convert.sources.extras import other_files
from mlxinfer.convert.sources.store import NUMPY, SafetensorsStore, Store, Stored, as_float32
from mlxinfer.convert.sources.torch_bin import TorchStore
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object
from mlxinfer.formats.safetensors import INDEX_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    import mlx.core as mx

MAX_CONFIG_BYTES = 16 << 20
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ACTIVATION = "a scale for activations of 8 bits or fewer, which mlx doesn't quantize"
CACHE = "a scale for a quantized KV cache, which the checkpoint's weights don't need"
DROPPED = {
    "input_scale": ACTIVATION, "input_zero_point": ACTIVATION, "input_global_scale": ACTIVATION,
    "activation_scale": ACTIVATION, "output_scale": ACTIVATION, "q_scale": CACHE, "k_scale": CACHE, "v_scale": CACHE,
    "prob_scale": CACHE, "kv_scale": CACHE, "k_zero_point": CACHE, "v_zero_point": CACHE,
    "_k_scale": CACHE, "_v_scale": CACHE,
}  # fmt: skip
"""By the last part of the name: what quantized checkpoints hold beside their weights."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A logical tensor and how it is read; both functions take the number of an expert, or None for all."""

    logical: Logical
    floats: Callable[[int | None], np.ndarray]
    packed: Callable[[int | None], PackedArrays] | None = None


@dataclass(slots=True)
class Layout:
    """What a format makes of the tensors of a store."""

    entries: list[Entry] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class FolderSource:
    """A Source (see `base`) over a folder in the layout of the Hugging Face hub."""

    def __init__(self, kind: str, folder: Path, lay_out: Callable[[Store], Layout]) -> None:
        self.kind = kind
        self.path = folder
        self.config: Mapping[str, Any] = plain_config(folder)
        self._store = open_store(folder)
        with contextlib.ExitStack() as undo:
            undo.callback(self._store.close)
            layout = lay_out(self._store)
            self._entries = _by_name(folder, layout)
            extras, notes = other_files(folder, self.config)
            undo.pop_all()
        self.tensors: Mapping[str, Logical] = {name: entry.logical for name, entry in self._entries.items()}
        self.dropped: Mapping[str, str] = layout.dropped
        self.extras: Mapping[str, bytes | Path] = extras
        self.notes: Sequence[str] = [*layout.notes, *notes]

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        return self._entries[name].floats(part)

    def read_packed(self, name: str, part: int | None = None) -> PackedArrays:
        packed = self._entries[name].packed
        assert packed is not None, f"{name} has no packing"
        return packed(part)

    def lazy(self, name: str) -> mx.array | None:
        """The floats as an array that mlx reads by itself when it is evaluated, where the bytes stay as they are."""
        logical = self.tensors[name]
        if logical.packing is not None or logical.made_of != (name,):
            return None
        stored = self._store.tensors[name]
        unchanged = FLOATS.get(stored.dtype, np.dtype(NUMPY[stored.dtype]).name)
        return self._store.lazy(name) if unchanged == logical.dtype and stored.shape == logical.shape else None

    def fingerprint(self) -> str:
        return f"{self.kind}:{self._store.fingerprint()}"

    def close(self) -> None:
        self._store.close()


def _by_name(folder: Path, layout: Layout) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for entry in layout.entries:
        name = entry.logical.name
        if name in entries:
            raise ModelFileError(f"{folder}: two tensors of the files become {name!r:.120}")
        entries[name] = entry
    return entries


def has_safetensors(folder: Path) -> bool:
    """Whether weights are in safetensors, if only by what an index says."""
    return any(folder.glob("*.safetensors")) or (folder / INDEX_NAME).exists()


def open_store(folder: Path) -> Store:
    """The safetensors files of a folder; torch's .bin files where it has none."""
    if has_safetensors(folder):
        return SafetensorsStore(folder)
    if any(folder.glob("pytorch_model*.bin*")):
        return TorchStore(folder)
    raise ModelFileError(f"{folder} holds no weights: neither *.safetensors nor pytorch_model*.bin")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is. Raises ModelFileError when it is missing or no object."""
    config = read_json_object(folder / "config.json", MAX_CONFIG_BYTES)
    if config is None:
        raise ModelFileError(f"{folder / 'config.json'} is missing: the folder doesn't say what its tensors are")
    return config


def quantization_settings(folder: Path) -> dict[str, Any]:
    """quantization_config of config.json (or of its text_config), or what hf_quant_config.json says; {} for none.

    mlx's own "quantization" is none: SafetensorsSource reads that.
    """
    config = read_config(folder)
    text_config = config.get("text_config")
    for table in (config, text_config if isinstance(text_config, dict) else {}):
        settings = table.get("quantization_config")
        if settings is None:
            continue
        if not isinstance(settings, dict):
            raise ModelFileError(f"{folder / 'config.json'}: quantization_config is {settings!r:.60}, no object")
        # mlx repeats its "quantization" under this name.
        if "quant_method" in settings or "quantization" not in config:
            return settings
    if "quantization" not in config:
        settings = read_json_object(folder / "hf_quant_config.json", MAX_CONFIG_BYTES)
        if settings is not None:
            inner = settings.get("quantization")
            return {**(inner if isinstance(inner, dict) else settings), "quant_method": "modelopt"}
    return {}


def plain_config(folder: Path) -> dict[str, Any]:
    """config.json without what it says of quantization."""
    config = read_config(folder)
    for table in (config, config.get("text_config")):
        if isinstance(table, dict):
            table.pop("quantization", None)
            table.pop("quantization_config", None)
    return config


def gather(store: Store, suffixes: Collection[str]) -> dict[str, dict[str, Stored]]:
    """The tensors whose last name is among `suffixes`, by module and last name."""
    modules: dict[str, dict[str, Stored]] = {}
    for name, stored in store.tensors.items():
        path, _, last = name.rpartition(".")
        if last in suffixes:
            modules.setdefault(path, {})[last] = stored
    return modules


def require(tensors: Mapping[str, Stored], names: Collection[str], path: str) -> None:
    """Raises ModelFileError for a module that lacks one of its tensors."""
    for name in names:
        if name not in tensors:
            other = next(iter(tensors.values()))
            raise ModelFileError(f"{other.where} needs {path}.{name}, which no file holds; fetch the model again")


def integer(
    settings: Mapping[str, Any], key: str, where: str, *, among: Collection[int] = (), default: int | None = None
) -> int:
    """A whole number of a quantization_config: one of `among`, or else a group size (positive, or -1 for a row)."""
    value = settings.get(key, default)
    if type(value) is not int or not (value in among if among else value == -1 or 0 < value <= 2**20):
        expected = " or ".join(map(str, among)) if among else "a positive number or -1"
        raise UnsupportedModelError(f"{where}: {key} is {value!r:.40}; {expected} is expected")
    return value


def check_shape(stored: Stored, expected: tuple[int, ...], because: str) -> None:
    """Raises ModelFileError when a tensor's shape doesn't agree with another's."""
    if stored.shape != expected:
        raise ModelFileError(f"{stored.where} has shape {stored.shape}; {expected} is expected {because}")


def check_dtype(stored: Stored, *dtypes: str) -> None:
    """Raises ModelFileError for a tensor of another type."""
    if stored.dtype not in dtypes:
        raise ModelFileError(f"{stored.where} is {stored.dtype}; {' or '.join(dtypes)} is expected there")


def read_scales(store: Store, stored: Stored, part: int | None = None) -> np.ndarray:
    """Scales as float32. Raises ModelFileError when one is not finite: the file is corrupt."""
    scales = as_float32(store.read(stored.name, part), stored)
    if not np.isfinite(scales).all():
        raise ModelFileError(f"{stored.where} has a scale that is not finite; it is corrupt")
    return scales


def finite_exponents(store: Store, scale: Stored, part: int | None = None) -> np.ndarray:
    """E8M0 exponents. Raises ModelFileError for 255, which is NaN."""
    exponents = store.read(scale.name, part)
    if (exponents == 255).any():
        raise ModelFileError(f"{scale.where} holds a scale that is NaN; it is corrupt")
    return exponents


def add_plain(layout: Layout, store: Store, used: Collection[str], *, drop: Mapping[str, str] = DROPPED) -> None:
    """Entries for every tensor that no module used, without those that `drop` gives a reason for."""
    for name, stored in store.tensors.items():
        if name in used:
            continue
        if reason := drop.get(name.rpartition(".")[2]):
            layout.dropped[name] = reason
        else:
            layout.entries.append(plain_entry(store, stored))


def plain_entry(store: Store, stored: Stored) -> Entry:
    """A tensor that is what it is: floats, or integers that are no weights."""
    if stored.dtype not in NUMPY or stored.dtype == "F8_E8M0":
        raise UnsupportedModelError(f"{stored.where} is {stored.dtype}, which is read as part of no known format")

    def floats(part: int | None) -> np.ndarray:
        values = store.read(stored.name, part)
        if stored.dtype in ("F64", "F8_E4M3", "F8_E5M2"):
            return as_float32(values, stored)
        return values

    if stored.dtype == "F64":
        dtype, handling, note = "float32", "near", "float64 rounded to float32"
    elif stored.dtype in ("F8_E4M3", "F8_E5M2"):
        dtype, handling, note = "float32", "exact", "8-bit floats without scales"
    else:
        dtype, handling, note = FLOATS.get(stored.dtype, np.dtype(NUMPY[stored.dtype]).name), "exact", ""
    logical = Logical(stored.name, stored.shape, dtype, stored.nbytes, (stored.name,), handling=handling, note=note)
    return Entry(logical, floats)
