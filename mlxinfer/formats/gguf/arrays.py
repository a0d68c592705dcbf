"""Parameters as mlx arrays, read in slices so that other work goes on between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy as np

    from mlxinfer.formats.gguf.blocks import Layout
    from mlxinfer.formats.gguf.parameters import Parameter

SLICE_ELEMENTS = 2**24
"""Elements decoded at a time: 64 MiB of float32, so that a large matrix is never whole as floats."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized matrix of mlx: uint32 words (…, rows, columns * bits / 32), scales and biases (…, rows, groups)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    layout: Layout

    def arrays(self) -> dict[str, mx.array]:
        """By the ending of their names."""
        parts = {"weight": self.weight, "scales": self.scales}
        return parts if self.biases is None else parts | {"biases": self.biases}


def read_parameter(parameter: Parameter, dtype: mx.Dtype) -> Packed | mx.array:
    """A matrix that mlx can hold packed as Packed, everything else as an array of `dtype`.

    Affine scales and biases get `dtype` too: float32 holds every one exactly; float16 does for Q4_0, Q4_1, Q5_0, Q5_1
    and Q8_0 (short of overflow), whose own are float16, and rounds those of Q4_K and Q5_K; bfloat16 keeps 8 bits.
    A type whose codes can only be kept nearly is packed in half precision and stays floats in float32.
    """
    reading = read_in_slices(parameter, dtype)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            return done.value


def read_in_slices(parameter: Parameter, dtype: mx.Dtype) -> Generator[None, None, Packed | mx.array]:
    """`read_parameter` that yields between two slices of SLICE_ELEMENTS."""
    layout = parameter.layout
    rows = max(1, SLICE_ELEMENTS // parameter.shape[-1])
    if layout is not None and (layout.exact or dtype != mx.float32):
        pieces: list[list[mx.array]] = []
        for piece in parameter.packed_slices(rows):
            pieces.append(_factors(piece, dtype))
            yield
        whole = [_joined(list(column)) for column in zip(*pieces, strict=True)]
        whole = [a.reshape(*parameter.shape[:-1], -1) for a in whole]
        return Packed(whole[0], whole[1], whole[2] if len(whole) > 2 else None, layout)
    floats: list[mx.array] = []
    for values in parameter.float_slices(rows):
        floats.append(mx.array(values).astype(dtype))
        mx.eval(floats[-1])
        yield
    return _joined(floats).reshape(parameter.shape)


def _factors(piece: tuple[np.ndarray, np.ndarray, np.ndarray | None], dtype: mx.Dtype) -> list[mx.array]:
    """Words, scales and biases, affine ones in `dtype`."""
    words, scales, biases = piece
    if biases is None:
        arrays = [mx.array(words), mx.array(scales)]
    else:
        arrays = [mx.array(words), mx.array(scales).astype(dtype), mx.array(biases).astype(dtype)]
    mx.eval(arrays)
    return arrays


def narrowed(value: Packed | mx.array) -> Packed | mx.array:
    """A matrix, or the scales and biases of a packed one, in half precision where that loses nothing."""
    if isinstance(value, Packed):
        if value.biases is None:
            return value
        scales, biases = _in_half([value.scales, value.biases])
        return Packed(value.weight, scales, biases, value.layout)
    return _in_half([value])[0] if value.ndim > 1 else value


def _in_half(arrays: list[mx.array]) -> list[mx.array]:
    for dtype in (mx.float16, mx.bfloat16):
        half = [a.astype(dtype) for a in arrays]
        if all(mx.array_equal(h.astype(a.dtype), a).item() for h, a in zip(half, arrays, strict=True)):
            return half
    return arrays


def _joined(pieces: list[mx.array]) -> mx.array:
    whole = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    mx.eval(whole)
    return whole


def quantization(packed: dict[str, Layout]) -> dict[str, Any]:
    """mlx-lm's "quantization" for the layers by their paths: the commonest layout, and the layers that differ."""
    forms = {path: {"group_size": p.group_size, "bits": p.bits, "mode": p.mode} for path, p in packed.items()}
    counts: dict[tuple[Any, ...], int] = {}
    for form in forms.values():
        counts[tuple(form.values())] = counts.get(tuple(form.values()), 0) + 1
    usual = dict(zip(("group_size", "bits", "mode"), max(counts, key=lambda form: counts[form]), strict=True))
    return usual | {path: form for path, form in forms.items() if form != usual}
