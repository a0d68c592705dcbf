"""Data-parallel training: sums over ranks, and the proof that all hold the same weights. A group is handed in."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxinfer.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Ranks:
    """The ranks of a run; one where there is no group, and then nothing is sent."""

    def __init__(self, group: mx.distributed.Group | None = None) -> None:
        self._group = group
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    def sum(self, tree: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The sum over all ranks, in float32, as one message; the same bits on every rank."""
        if self.size == 1:
            return dict(tree)
        flat = mx.concatenate([value.astype(mx.float32).reshape(-1) for value in tree.values()])
        total = mx.distributed.all_sum(flat, group=self._group, stream=mx.cpu)
        parts: dict[str, mx.array] = {}
        start = 0
        for name, value in tree.items():
            parts[name] = total[start : start + value.size].reshape(value.shape)
            start += value.size
        return parts

    def sums(self, *values: float) -> list[float]:
        """Of plain numbers."""
        if self.size == 1:
            return list(values)
        total = mx.distributed.all_sum(mx.array(values, mx.float32), group=self._group, stream=mx.cpu)
        return [float(value) for value in np.array(total)]

    def check_equal(self, weights: Mapping[str, mx.array], update: int) -> str:
        """The hash of the weights. Raises TrainingError that names the ranks which differ from rank 0."""
        digest = digest_of(weights)
        if self.size > 1:
            own = mx.array([int(digest[at : at + 4], 16) for at in range(0, 64, 4)], mx.int32)
            gathered = mx.distributed.all_gather(own[None], group=self._group, stream=mx.cpu)
            every = np.array(gathered)
            if wrong := [rank for rank in range(self.size) if (every[rank] != every[0]).any()]:
                raise TrainingError(f"update {update}: the weights of ranks {wrong} differ from those of rank 0")
        return digest


def digest_of(weights: Mapping[str, mx.array]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes, as 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name]
        digest.update(f"{name} {value.shape} {value.dtype}\n".encode())
        digest.update(np.array(value.reshape(-1).view(mx.uint8)).tobytes())
    return digest.hexdigest()
