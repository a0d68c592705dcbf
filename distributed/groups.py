"""Groups that mlx has no form of: one that is only asked who it is, and two neighbours of a ring.

A model's layers ask them what they ask mlx's own groups; `passing.stage` brings their collectives here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AT_ONCE = 16 << 10
"""Bytes that both of a pair may send before either receives: less than any system's socket buffers hold."""

_recv: Callable[..., mx.array] = mx.distributed.recv
_send: Callable[..., mx.array] = mx.distributed.send


class PretendGroup:
    """What a model asks of a group when it is split: who it is, and of how many. Nothing is ever sent: a sum is
    this rank's part of it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_sum(self, x: mx.array) -> mx.array:
        return x

    def all_gather(self, x: mx.array) -> mx.array:
        return mx.concatenate([x] * self._size)


class Pair:
    """Ranks 2n and 2n + 1 of `group`, which share the layers of stage n by heads.

    mlx's ring makes no groups within a group, and its neighbours have one channel without addresses. So all that goes
    between two ranks is a message, submitted as the graph is built: in the order of the program, which both of them
    have in common. One of the two sends first, as both would wait for ever with buffers that are full.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._own = group, int(group.rank())

    def rank(self) -> int:
        return self._own % 2

    def size(self) -> int:
        return 2

    def all_sum(self, x: mx.array) -> mx.array:
        """The same bits on both: a + b is b + a."""
        return x + self._others(x)

    def all_gather(self, x: mx.array) -> mx.array:
        """Both, along the first axis, in the order of the ranks."""
        other = self._others(x)
        return mx.concatenate([other, x] if self.rank() else [x, other])

    def take(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """What the stage before hands over: its first rank to this stage's second, which is next to it and passes
        it on."""
        found = self._receive(shape, dtype, self._own + 1)
        return _submitted(_send(found, self._own - 1, group=self._group)) if self.rank() else found

    def give(self, x: mx.array) -> mx.array:
        """Hand `x`, which both have, to the next stage."""
        return _submitted(x) if self.rank() else _submitted(_send(x, self._own - 1, group=self._group))

    def _others(self, x: mx.array) -> mx.array:
        other = self._own ^ 1
        if self.rank() and x.nbytes > AT_ONCE:
            found = self._receive(x.shape, x.dtype, other)
            _submitted(_send(x, other, group=self._group))
            return found
        _submitted(_send(x, other, group=self._group))
        return self._receive(x.shape, x.dtype, other)

    def _receive(self, shape: Sequence[int], dtype: mx.Dtype, source: int) -> mx.array:
        return _submitted(_recv(shape, dtype, source, group=self._group))


def _submitted(x: mx.array) -> mx.array:
    mx.async_eval(x)
    return x
