"""An mlx-lm folder that is exported: its parameters, packed or not, read a few rows at a time."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.convert.export.packed import BITS, PackedRows, floats_of, unpack_codes
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import open_regular, read_json_object
from mlxinfer.formats.safetensors import TensorInfo, check_dtypes, check_safetensors, shard_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

SLICE_ELEMENTS = 2**22
"""Weights handled at a time: 16 MiB of float32."""
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and group size of the modes that leave no choice."""
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
ADAPTERS = ("adapters.safetensors", "adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model, by the name of its float form."""

    name: str
    shape: tuple[int, ...]
    """Of the floats. Three dimensions: experts, rows, columns."""
    packing: Packing | None
    dtype: str
    """Of the floats, or of the scales of a packed one: a key of FLOATS, or "U8"."""
    stored: tuple[TensorInfo, ...]
    """Itself; of a packed one words, scales and, in affine mode, biases."""

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Of the matrix that all leading dimensions make up."""
        return math.prod(self.shape[:-1])


class MLXFolder:
    """Raises ModelFileError or UnsupportedModelError, also for parameters that aren't those of the architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json_object(path / "config.json")
        if config is None:
            raise ModelFileError(f"{path} holds no config.json; a model folder of mlx-lm is expected")
        for name in ADAPTERS:
            if (path / name).exists():
                raise UnsupportedModelError(f"{path} holds an adapter ({name}); fuse it into the model first")
        self.config: dict[str, Any] = config
        self._files: dict[str, IO[bytes]] = {}
        self._shard_of: dict[str, Path] = {}
        self.parameters = self._read_parameters(self._read_headers())
        self.arguments = self._checked_arguments()

    def _read_headers(self) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for shard in shard_files(self.path):
            for name, info in check_safetensors(shard).items():
                if name in infos:
                    raise ModelFileError(f"{shard}: tensor {name!r:.120} is in {self._shard_of[name].name} already")
                infos[name] = info
                self._shard_of[name] = shard
        check_dtypes(infos, str(self.path))
        return infos

    def _read_parameters(self, infos: Mapping[str, TensorInfo]) -> dict[str, Parameter]:
        quantization = self.config.get("quantization") or {}
        if not isinstance(quantization, dict):
            raise ModelFileError(f"{self.path / 'config.json'}: quantization is {quantization!r:.80}; an object is")
        found: dict[str, Parameter] = {}
        for name in sorted(infos, key=_in_order):
            info = infos[name]
            path, _, kind = name.rpartition(".")
            if kind in ("scales", "biases") and f"{path}.weight" in infos:
                continue
            scales = infos.get(f"{path}.scales")
            if kind == "weight" and scales is not None:
                found[name] = self._packed(path, info, scales, infos.get(f"{path}.biases"), quantization)
            elif info.dtype in FLOATS:
                found[name] = Parameter(name, info.shape, None, info.dtype, (info,))
            else:
                raise UnsupportedModelError(f"{self.path}: {name} is {info.dtype} without scales; it can't be exported")
        return found

    def _packed(
        self, path: str, words: TensorInfo, scales: TensorInfo, biases: TensorInfo | None, quantization: dict[str, Any]
    ) -> Parameter:
        own = quantization.get(path)
        settings = own if isinstance(own, dict) else quantization
        where = f"{self.path}: {path}"
        mode = settings.get("mode", quantization.get("mode", "affine"))
        if mode not in ("affine", *MODES):
            raise UnsupportedModelError(f"{where}: quantization mode {mode!r:.40}; known: affine, {', '.join(MODES)}")
        bits, group = MODES.get(mode, (settings.get("bits"), settings.get("group_size")))
        if type(bits) is not int or bits not in BITS or type(group) is not int or not 1 <= group <= 4096:
            raise ModelFileError(f"{where}: config.json quantizes it to bits={bits!r:.20}, group_size={group!r:.20}")
        width = words.shape[-1] * 32 if words.shape else 0
        columns = width // bits
        wanted = (*words.shape[:-1], columns // group)
        if words.dtype != "U32" or columns % group or width != columns * bits or scales.shape != wanted:
            raise ModelFileError(
                f"{where}: words {words.shape} and scales {scales.shape} don't fit {bits} bits in groups of {group}"
            )
        kinds = FLOATS if mode == "affine" else ("U8",)
        if scales.dtype not in kinds or (mode == "affine") != (biases is not None):
            raise ModelFileError(f"{where}: scales of {scales.dtype} and biases don't fit the mode {mode}")
        if biases is not None and (biases.shape, biases.dtype) != (scales.shape, scales.dtype):
            raise ModelFileError(f"{where}: biases {biases.shape} {biases.dtype} are unlike its scales")
        stored = (words, scales) if biases is None else (words, scales, biases)
        return Parameter(
            f"{path}.weight", (*words.shape[:-1], columns), Packing(bits, group, mode), scales.dtype, stored
        )

    def _checked_arguments(self) -> dict[str, Any]:
        """What mlx-lm makes of the config, after the names and shapes were found to be those of its model."""
        layers = self.config.get("num_hidden_layers")
        if isinstance(layers, int | float) and layers > len(self.parameters):
            raise ModelFileError(f"{self.path}: {layers} layers in config.json, but {len(self.parameters)} tensors")
        model, arguments = upstream.blank_model(self.config)
        flat: Any = tree_flatten(model.parameters())
        expected = {name: tuple(value.shape) for name, value in flat}
        here = {name: parameter.shape for name, parameter in self.parameters.items()}
        if arguments.get("tie_word_embeddings", self.config.get("tie_word_embeddings", True)) and self.tied:
            expected.pop("lm_head.weight", None)  # some classes make the head and tie it when no weights come
        wrong = [f"{n} is missing" for n in expected.keys() - here.keys()]
        wrong += [f"{n} is not part of it" for n in here.keys() - expected.keys()]
        wrong += [f"{n} has shape {here[n]}, not {s}" for n, s in expected.items() if n in here and here[n] != s]
        if wrong:
            shown = "; ".join(sorted(wrong)[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise ModelFileError(f"{self.path}: the weights are not those of {self.config['model_type']}: {shown}")
        return arguments

    @property
    def tied(self) -> bool:
        """The embedding is the output matrix too."""
        return "lm_head.weight" not in self.parameters

    def raw(self, info: TensorInfo, start: int, stop: int, columns: int) -> np.ndarray:
        """Rows `start` to `stop` of a stored tensor as (rows, columns) of its dtype; bfloat16 as uint16."""
        dtype = {"F16": "<f2", "F32": "<f4", "BF16": "<u2", "U8": "<u1", "U32": "<u4"}[info.dtype]
        row = np.dtype(dtype).itemsize * columns
        file = self._file(self._shard_of[info.name])
        data = os.pread(file.fileno(), (stop - start) * row, info.offset + start * row)
        if len(data) != (stop - start) * row:
            raise ModelFileError(f"{self._shard_of[info.name]}: the file became shorter while it was read")
        return np.frombuffer(data, dtype).reshape(stop - start, columns)

    def _file(self, shard: Path) -> IO[bytes]:
        if shard.name not in self._files:
            file = open_regular(shard)
            if file is None:
                raise ModelFileError(f"{shard} is gone")
            self._files[shard.name] = file
        return self._files[shard.name]

    def packed_rows(self, parameter: Parameter, start: int, stop: int) -> PackedRows:
        """Codes and scales of some rows of a packed parameter."""
        packing = parameter.packing
        assert packing is not None
        words = self.raw(parameter.stored[0], start, stop, parameter.columns * packing.bits // 32)
        groups = parameter.columns // packing.group_size
        factors = [self.raw(info, start, stop, groups) for info in parameter.stored[1:]]
        if packing.mode == "affine":
            factors = [widened(f) for f in factors]
        return PackedRows(unpack_codes(words, packing.bits), factors[0], factors[1] if len(factors) > 1 else None)

    def factors(self, parameter: Parameter) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Scales and biases of an affine parameter, float32 (rows, groups), slice by slice."""
        assert parameter.packing is not None
        groups = parameter.columns // parameter.packing.group_size
        for start, stop in slices(parameter.rows, groups):
            scales, biases = (widened(self.raw(info, start, stop, groups)) for info in parameter.stored[1:])
            yield scales, biases

    def float_rows(self, parameter: Parameter, start: int, stop: int) -> np.ndarray:
        """Some rows as float32 (rows, columns)."""
        packing = parameter.packing
        if packing is None:
            return widened(self.raw(parameter.stored[0], start, stop, parameter.columns))
        words = self.raw(parameter.stored[0], start, stop, parameter.columns * packing.bits // 32)
        groups = parameter.columns // packing.group_size
        factors = [self.raw(info, start, stop, groups) for info in parameter.stored[1:]]
        return floats_of(words, [widened(f) if packing.mode == "affine" else f for f in factors], packing)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> MLXFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_order(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9, so that files hold tensors in the order of their use."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def slices(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of rows that hold about SLICE_ELEMENTS."""
    step = max(1, SLICE_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def widened(values: np.ndarray) -> np.ndarray:
    """float32 of float16, float32, or bfloat16 as its bits in uint16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def narrowed(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """float32 as F16, BF16 (bits in uint16) or F32. Raises UnsupportedModelError for a number beyond float16."""
    if dtype == "F32":
        return np.ascontiguousarray(values, "<f4")
    if dtype == "BF16":
        return np.array(mx.array(np.ascontiguousarray(values)).astype(mx.bfloat16).view(mx.uint16))
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.array_equal(np.isfinite(half), np.isfinite(values)):
        raise UnsupportedModelError(f"{name} has numbers beyond float16 (65504); export as bfloat16 or float32")
    return np.ascontiguousarray(half)
