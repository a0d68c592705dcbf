"""Who may take how much memory: weights, running sequences and idle prefixes of all models in this process.

What is spare goes to idle prefixes; they give way first, then a request waits for its turn, and one that could never
run is refused. The figures are what arrays take; a share of the budget is kept free for what a step computes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from mlxinfer import runtime
from mlxinfer.errors import WontFitError

if TYPE_CHECKING:
    from collections.abc import Callable

HEADROOM = 0.08
"""Share of the budget for activations, mlx's own buffers and everything else that isn't counted."""


def wont_fit(name: str, needed: int, budget: int, beside: str = "") -> WontFitError:
    """The refusal of weights of `needed` bytes; `beside` says what takes a part of the budget."""
    return WontFitError(
        f"{name} needs {needed / 2**20:,.0f} MiB for its weights and models may take {budget / 2**20:,.0f} MiB here"
        f"{beside}; `mlxinfer fit` shows what would fit, memory_mb is the setting"
    )


class Member(Protocol):
    """An engine, as the governor sees it."""

    @property
    def weight_bytes(self) -> int:
        """Of its model, and of whatever else it keeps beside it."""
        ...

    def reserved_bytes(self) -> int:
        """What its running sequences take, or will."""
        ...

    def cached_bytes(self) -> int:
        """What its idle prefixes take."""
        ...

    def shrink_cache(self, max_bytes: int) -> None:
        """Hold at most this much for idle prefixes."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes at this moment."""

    budget: int
    weights: int
    kv: int
    """Reserved by running sequences."""
    prefix_cache: int

    @property
    def free(self) -> int:
        return self.budget - self.weights - self.kv - self.prefix_cache


class Governor:
    """Shares out the budget. Members join and ask on the MLX thread; `figures` may be asked from any thread."""

    def __init__(self, budget: int | None = None) -> None:
        self._own = budget
        self._members: list[Member] = []
        self.budget = 0
        """Bytes for weights, sequences and prefixes together."""
        self._measure()
        self.on_pressure: Callable[[int], bool] | None = None
        """Asked, from the MLX thread, for bytes that idle models hold; says at once whether any will be unloaded."""

    def _measure(self) -> None:
        self.budget = int(self.whole * (1 - HEADROOM))

    @property
    def whole(self) -> int:
        """The budget with the headroom: the user's, else the machine's."""
        return runtime.memory().budget if self._own is None else self._own

    def set_budget(self, budget: int | None) -> None:
        """A limit of the user's own, in bytes; None goes back to the machine's."""
        self._own = budget
        self._measure()

    def join(self, member: Member) -> None:
        self._measure()
        self._members.append(member)

    def leave(self, member: Member) -> None:
        if member in self._members:
            self._members.remove(member)

    def kv_limit(self, member: Member) -> int:
        """Bytes that the member's running sequences may take, if every idle prefix gives way."""
        others = sum(m.reserved_bytes() for m in self._members if m is not member)
        return max(0, self.budget - self._weights() - others)

    def check_fits(self, member: Member, needed: int, what: str) -> None:
        """Raise WontFitError when a sequence of `needed` bytes can't run even with everything else idle."""
        room = self.budget - member.weight_bytes
        if needed > room:
            raise WontFitError(
                f"{what} needs {needed / 2**20:,.0f} MiB for its context and {max(0, room) / 2**20:,.0f} MiB are there "
                "beside the model; shorten the prompt, lower max_tokens or give models more memory (memory_mb)"
            )

    def balance(self, member: Member) -> None:
        """Make room for what the member's sequences reserve: idle prefixes shrink, those of the others first."""
        spare = self.budget - self._weights() - sum(m.reserved_bytes() for m in self._members)
        others = [m for m in self._members if m is not member]
        self._give_way(others, sum(m.cached_bytes() for m in self._members) - max(0, spare))
        member.shrink_cache(max(0, spare - sum(m.cached_bytes() for m in others)))
        if spare < 0:
            self.press(-spare)

    def _give_way(self, members: list[Member], over: int) -> None:
        """Shrink idle prefixes by `over` bytes, one member's after the other's."""
        for member in members:
            held = member.cached_bytes()
            if over > 0 and held:
                member.shrink_cache(max(0, held - over))
                over -= held - member.cached_bytes()

    def press(self, wanted: int) -> bool:
        """Ask for `wanted` bytes of idle models; whether some will become free."""
        return self.on_pressure is not None and self.on_pressure(wanted)

    def others_busy(self, member: Member) -> bool:
        """Whether sequences of other members will end and free their memory."""
        return any(m.reserved_bytes() > 0 for m in self._members if m is not member)

    def held_bytes(self) -> int:
        """What this process holds and won't give away for the asking: mlx's memory without idle prefixes."""
        return max(0, mx.get_active_memory() - sum(m.cached_bytes() for m in list(self._members)))

    def reclaim(self, needed: int) -> None:
        """Let idle prefixes make room for `needed` bytes of a model that is about to be loaded. On the MLX thread."""
        spare = max(0, self.budget - self.held_bytes() - needed)
        self._give_way(self._members, sum(m.cached_bytes() for m in self._members) - spare)

    def _weights(self) -> int:
        return sum(m.weight_bytes for m in self._members)

    def figures(self) -> MemoryFigures:
        members = list(self._members)
        return MemoryFigures(
            budget=self.budget,
            weights=sum(m.weight_bytes for m in members),
            kv=sum(m.reserved_bytes() for m in members),
            prefix_cache=sum(m.cached_bytes() for m in members),
        )


_lock = threading.Lock()
_governor: Governor | None = None


def governor() -> Governor:
    """The governor of this process."""
    global _governor
    with _lock:
        if _governor is None:
            _governor = Governor()
        return _governor
