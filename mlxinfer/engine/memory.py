"""Bytes that sequences take: predicted for admission. Pure arithmetic, no arrays."""

from __future__ import annotations

from dataclasses import dataclass

RESERVE_TOKENS = 2048
"""Output tokens that are reserved ahead at most; a longer reply reserves more as it goes."""


@dataclass(frozen=True, slots=True)
class KVCost:
    """What one sequence of a model takes in memory."""

    per_token: int = 0
    """Bytes per token in the layers that keep every key."""
    windowed: tuple[tuple[int, int], ...] = ()
    """(tokens kept at most, bytes per token) of each sliding-window layer."""
    fixed: int = 0
    """Bytes of recurrent states."""
    step: int = 256
    """Buffers grow by this many tokens."""

    def bytes(self, tokens: int) -> int:
        """Bytes held by a sequence of `tokens`."""
        held = -(-tokens // self.step) * self.step
        return self.fixed + self.per_token * held + sum(min(held, most) * size for most, size in self.windowed)
