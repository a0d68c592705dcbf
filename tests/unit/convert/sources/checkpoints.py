"""Small checkpoints, written byte by byte from the formats' descriptions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer.convert.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlxinfer.convert.sources.base import Source

Tensors = dict[str, tuple[str, np.ndarray]]
"""Name to the type as safetensors spells it and the bytes in the array's shape."""
OF_NUMPY = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64",
    "uint32": "U32", "bool": "BOOL",
}  # fmt: skip


def plain(arrays: Mapping[str, np.ndarray]) -> Tensors:
    return {name: (OF_NUMPY[str(a.dtype)], a) for name, a in arrays.items()}


def bf16(values: np.ndarray) -> tuple[str, np.ndarray]:
    """Cut to the upper 16 bits of float32."""
    return "BF16", (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bf16_values(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(folder: Path, tensors: Tensors, settings: object = None, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def write_shards(folder: Path, shards: Sequence[Tensors], **index: str) -> Path:
    """Shards with an index of what each holds; `index` moves or adds tensors (with __ for dots)."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    weight_map |= {name.replace("__", "."): file for name, file in index.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def dequantized(source: Source, name: str, part: int | None = None) -> np.ndarray:
    """What mlx makes of the packed form, float32."""
    packing = source.tensors[name].packing
    assert packing is not None
    arrays = source.read_packed(name, part)
    biases = None if arrays.biases is None else mx.array(arrays.biases)
    values = mx.dequantize(
        mx.array(arrays.weight), mx.array(arrays.scales), biases, packing.group_size, packing.bits, packing.mode,
        dtype=mx.float32,
    )  # fmt: skip
    return np.array(values)


OPEN: list[Source] = []
"""Closed after each test, by conftest."""


def opened(path: Path, kind: str | None = None) -> Source:
    source = open_source(path)
    OPEN.append(source)
    assert kind in (None, source.kind)
    return source


def bitstream(codes: Sequence[int], bits: int) -> list[int]:
    """Codes one after the other from the low bits of little-endian 32-bit words."""
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    return [(number >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32))]


def as_int32(words: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array(words, dtype=np.uint32).view(np.int32)
