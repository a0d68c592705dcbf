"""mlx arrays as the disk tier stores them, and back. On the MLX thread.

`stored` makes no copy: the view keeps the mlx array alive, and may be dropped on any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxinfer.engine.disk_format import DTYPES, StoredArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MLX = {name: getattr(mx, "bool_" if name == "bool" else name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _MLX.items()}


def stored(arrays: Mapping[str, mx.array]) -> list[StoredArray]:
    """Views of `arrays`, evaluated together. Raises ValueError for a dtype that isn't stored, as complex64."""
    for name, one in arrays.items():
        if one.dtype not in _NAMES:
            raise ValueError(f"array {name!r}: {one.dtype} isn't stored; {', '.join(DTYPES)} are")
    # numpy has no bfloat16; a view as uint16 shares the buffer, and needs an axis.
    plain = [
        (one[None] if one.ndim == 0 else one).view(mx.uint16) if one.dtype == mx.bfloat16 else one
        for one in arrays.values()
    ]
    mx.eval(plain)
    return [
        StoredArray(name, _NAMES[one.dtype], np.asarray(view).reshape(one.shape))
        for (name, one), view in zip(arrays.items(), plain, strict=True)
    ]


def restored(arrays: Iterable[StoredArray]) -> dict[str, mx.array]:
    """The mlx arrays by name; copies, so that what was read can go."""
    return {one.name: _array(one) for one in arrays}


def _array(one: StoredArray) -> mx.array:
    if one.dtype != "bfloat16":
        return mx.array(one.data)
    return mx.array(one.data.reshape(one.data.shape or (1,))).view(mx.bfloat16).reshape(one.data.shape)
