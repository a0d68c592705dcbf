"""DWQ, AWQ and GPTQ of mlx-lm on the calibration text of the package, and their result as a source of a conversion.

They need the whole model in memory, and DWQ its gradients too. `learn` changes a loaded model; `LearnedSource` then
gives its parameters, packed as they are, to the code that writes every other conversion.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.convert.calibration import documents, packed_rows
from mlxinfer.convert.quantizing import check_packing
from mlxinfer.convert.sources.base import Logical, PackedArrays, Packing
from mlxinfer.convert.unpacked import unpacked_on_cpu
from mlxinfer.errors import InvalidRequestError
from mlxinfer.kernels import layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlxinfer.convert.sources.base import Source
    from mlxinfer.tokenizer import Tokenizer

Method = Literal["dwq", "awq", "gptq"]
METHODS: tuple[Method, ...] = ("dwq", "awq", "gptq")

ROW_TOKENS = 256
ENDS_BITS = 6
"""Of embeddings and head under AWQ, and of all but linear layers under GPTQ; more if the layers have more."""
AWQ_GRID = 20
DWQ_LEARNING_RATE = 1e-5
"""Ten times mlx-lm's, which is meant for 2048 rows; the package's text gives some thirty."""
BATCH = 4
FLOAT_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def learn(
    method: Method,
    model: nn.Module,
    model_type: str,
    tokenizer: Tokenizer,
    packing: Packing,
    *,
    max_rows: int | None = None,
    row_tokens: int = ROW_TOKENS,
    seed: int = 0,
) -> nn.Module:
    """A packed model from a float one, which is used up. On the calling thread.

    Raises InvalidRequestError for a form that the method doesn't have, UnsupportedModelError for a model it doesn't.
    """
    check_packing(packing)
    if packing.mode != "affine":
        raise InvalidRequestError(f"{method} makes affine weights only, not {packing.mode}", param="mode")
    if method == "gptq" and packing.bits not in (2, 4, 8):
        raise InvalidRequestError(f"gptq has 2, 4 or 8 bits, not {packing.bits}", param="bits")
    rows = packed_rows(documents("calibration"), tokenizer, row_tokens)[:max_rows]
    ends_bits = max(packing.bits, ENDS_BITS)
    bits, group_size = packing.bits, packing.group_size
    mx.random.seed(seed)
    _as_mlx_made(model)
    if method == "dwq":
        return _distilled(model, rows, packing, seed)
    if method == "awq":
        upstream.awq(
            model, model_type, mx.array(rows), bits=bits, group_size=group_size, ends_bits=ends_bits, grid=AWQ_GRID
        )
    else:
        upstream.gptq(
            model, mx.array(rows), bits=bits, group_size=group_size, fallback_bits=ends_bits, batch_size=BATCH
        )
    mx.eval(model.parameters())
    return model


def _as_mlx_made(model: nn.Module) -> None:
    """Give layers that run on our CPU kernels their own class back: mlx-lm's GPTQ passes over any other."""
    originals = {ours: theirs for theirs, ours in layers.CLASSES.items()}
    for _, module in model.named_modules():
        if original := originals.get(type(module)):
            module.__class__ = original


def _distilled(teacher: nn.Module, rows: Sequence[list[int]], packing: Packing, seed: int) -> nn.Module:
    forward: Any = teacher
    student = copy.deepcopy(teacher)
    nn.quantize(student, packing.group_size, packing.bits, class_predicate=_fits(packing))
    stored = next(m["scales"].dtype for _, m in student.named_modules() if "scales" in m)
    batch = min(BATCH, max(1, len(rows) // 2))
    held_out = max(batch, len(rows) // 8)
    with unpacked_on_cpu(student):
        upstream.dwq(
            student,
            lambda tokens: forward(tokens),
            rows[:-held_out],
            rows[-held_out:],
            learning_rate=DWQ_LEARNING_RATE,
            batch_size=batch,
            dtype=stored,
            seed=seed,
        )
    mx.eval(student.parameters())
    return student


def _fits(packing: Packing) -> Any:
    return lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % packing.group_size == 0


class LearnedSource:
    """The parameters of a model in memory, under mlx-lm's own names, with the files of the source it was loaded from.

    Values are copied to numpy when it is made: a reader is called from mlx's threads.
    """

    def __init__(self, kind: str, model: nn.Module, origin: Source) -> None:
        self.kind = kind
        self.path: Path = origin.path
        self.config: Mapping[str, Any] = origin.config
        self.dropped: Mapping[str, str] = {}
        self.extras = origin.extras
        self.notes: Sequence[str] = [*origin.notes, f"{kind} of mlx-lm on the calibration text of the package"]
        self._origin = origin
        parameters: Any = tree_flatten(model.parameters())
        self._arrays: dict[str, np.ndarray] = {name: _as_numpy(value) for name, value in parameters}
        packings = {path: _packing(module) for path, module in model.named_modules() if "scales" in module}
        self.tensors: Mapping[str, Logical] = {
            name: self._logical(name, value, packings.get(name.removesuffix(".weight")))
            for name, value in parameters
            if name.rpartition(".")[2] not in ("scales", "biases")
        }

    def _logical(self, name: str, value: mx.array, packing: Packing | None) -> Logical:
        shape, dtype = tuple(value.shape), FLOAT_NAMES.get(value.dtype, str(value.dtype).removeprefix("mlx.core."))
        if packing is not None:
            shape, dtype = (*shape[:-1], shape[-1] * 32 // packing.bits), "float32"
        if packing is not None:
            return Logical(name, shape, dtype, value.nbytes, (name,), packing, "requantized", f"by {self.kind}")
        if self.kind == "awq":
            # It moves factors between neighbouring layers, so that floats aren't the source's any more.
            return Logical(name, shape, dtype, value.nbytes, (name,), None, "requantized", "rescaled by awq")
        return Logical(name, shape, dtype, value.nbytes, (name,))

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """As Source.read."""
        packing = self.tensors[name].packing
        if packing is not None:
            return _unpacked(self.read_packed(name, part), packing.bits)
        return self._arrays[name] if part is None else self._arrays[name][part]

    def read_packed(self, name: str, part: int | None = None) -> PackedArrays:
        """As Source.read_packed."""
        path = name.removesuffix(".weight")
        words, scales, biases = (self._arrays[f"{path}.{kind}"] for kind in ("weight", "scales", "biases"))
        if part is not None:
            words, scales, biases = words[part], scales[part], biases[part]
        return PackedArrays(words, _widened(scales), _widened(biases))

    def fingerprint(self) -> str:
        """The origin's: the same text and seed give the same model, as far as the machine adds in the same order."""
        return f"{self.kind}:{self._origin.fingerprint()}"

    def close(self) -> None:
        """Let go of the values and of the origin's files."""
        self._arrays.clear()
        self._origin.close()


def _unpacked(packed: PackedArrays, bits: int) -> np.ndarray:
    """float32 of an affine matrix, leading dimensions kept."""
    assert packed.biases is not None
    lead, groups = packed.weight.shape[:-1], packed.scales.shape[-1]
    spread = np.unpackbits(np.ascontiguousarray(packed.weight).view(np.uint8), axis=-1, bitorder="little")
    places = (1 << np.arange(bits)).astype(np.float32)
    codes = spread.reshape(*lead, groups, -1, bits) @ places
    return (codes * packed.scales[..., None] + packed.biases[..., None]).reshape(*lead, -1)


def _packing(module: Any) -> Packing:
    return Packing(module.bits, module.group_size, module.mode)


def _as_numpy(value: mx.array) -> np.ndarray:
    return np.array(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value)


def _widened(scales: np.ndarray) -> np.ndarray:
    """float32 from float16, float32, or the bits of bfloat16."""
    if scales.dtype == np.uint16:
        return (scales.astype(np.uint32) << 16).view(np.float32)
    return scales.astype(np.float32)
