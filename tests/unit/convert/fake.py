"""A checkpoint in memory in place of files, and small folders to compare with."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxinfer.convert.sources.base import Handling, Logical, PackedArrays, Packing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import mlx.nn as nn


class _Tensors(Mapping[str, Logical]):
    """What a fake source has at the moment: a test may change its `arrays` and `packings`."""

    def __init__(self, source: FakeSource) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Logical:
        return self._source.logical(name, self._source.arrays[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.arrays)

    def __len__(self) -> int:
        return len(self._source.arrays)


class FakeSource:
    """Tensors given as mlx arrays. What is read of them is noted, and `before_read` may raise or kill."""

    kind: str = "fake"

    def __init__(
        self,
        config: Mapping[str, Any],
        arrays: Mapping[str, mx.array],
        *,
        packed: Mapping[str, Packing] | None = None,
        handling: Handling = "exact",
        path: Path = Path("/nowhere/fake"),
    ) -> None:
        self.path = path
        self.config: Mapping[str, Any] = dict(config)
        self.extras: Mapping[str, bytes | Path] = {}
        self.dropped: Mapping[str, str] = {}
        self.notes: Sequence[str] = []
        self.tensors: Mapping[str, Logical] = _Tensors(self)
        self.arrays = dict(arrays)
        self.packings = dict(packed or {})
        self.handling: Handling = handling
        self.reads: list[tuple[str, int | None]] = []
        self.before_read: Callable[[str], None] = lambda name: None
        self.salt = ""

    def logical(self, name: str, array: mx.array) -> Logical:
        dtype = str(array.dtype).rpartition(".")[2]
        packing = self.packings.get(name)
        handling: Handling = self.handling if packing else "exact"
        return Logical(name, array.shape, dtype, array.nbytes, (f"file.{name}",), packing, handling)

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        self.reads.append((name, part))
        self.before_read(name)
        array = self._values(name)
        array = array if part is None else array[part]
        return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)

    def read_packed(self, name: str, part: int | None = None) -> PackedArrays:
        self.reads.append((name, part))
        self.before_read(name)
        array = self.arrays[name] if part is None else self.arrays[name][part]
        words, scales, *biases = self._packed(array, self.packings[name])
        return PackedArrays(np.array(words), np.array(scales), np.array(biases[0]) if biases else None)

    def _packed(self, array: mx.array, p: Packing) -> tuple[mx.array, ...]:
        return tuple(mx.quantize(array.astype(mx.float32), p.group_size, p.bits, p.mode))

    def _values(self, name: str) -> mx.array:
        """As a reader does it: what the codes stand for."""
        array, p = self.arrays[name], self.packings.get(name)
        if p is None:
            return array
        return mx.dequantize(*self._packed(array, p), group_size=p.group_size, bits=p.bits, mode=p.mode).astype(
            array.dtype
        )

    def fingerprint(self) -> str:
        facts = [(n, a.shape, str(a.dtype), str(self.packings.get(n))) for n, a in self.arrays.items()]
        return hashlib.sha256(repr((self.salt, facts)).encode()).hexdigest()

    def close(self) -> None:
        pass


def llama_config(**changes: object) -> dict[str, Any]:
    """Two layers; every matrix has columns that groups of 64 divide."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        "tie_word_embeddings": False,
    } | changes


def moe_config(**changes: object) -> dict[str, Any]:
    """Two layers of four experts, published one by one."""
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    } | changes


def parameters(model: nn.Module) -> dict[str, mx.array]:
    found: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # pyright: ignore
    return dict(found)


def random_weights(config: Mapping[str, Any], dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> dict[str, mx.array]:
    """Under the names of the hub; experts one by one."""
    from mlxinfer import upstream

    key = mx.random.key(seed)
    arrays: dict[str, mx.array] = {}
    for name, array in parameters(upstream.empty_model(config)).items():
        key, own = mx.random.split(key)
        values = mx.random.normal(array.shape, key=own).astype(dtype)
        if ".switch_mlp." not in name:
            arrays[name] = values
            continue
        for expert in range(array.shape[0]):
            arrays[name.replace("switch_mlp", f"experts.{expert}")] = values[expert]
    mx.eval(arrays)
    return arrays


def fake_source(config: Mapping[str, Any] | None = None, **rest: Any) -> FakeSource:
    """A llama of random bfloat16, or of another config."""
    config = config or llama_config()
    return FakeSource(config, random_weights(config), **rest)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stored(folder: Path) -> dict[str, mx.array]:
    """All tensors of a model folder."""
    found: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        arrays: Any = mx.load(str(path))
        found |= arrays
    return found


def size_of(arrays: Mapping[str, mx.array]) -> int:
    return sum(math.prod(a.shape) * a.itemsize for a in arrays.values())
