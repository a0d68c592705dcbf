"""Faults to plant: what a batch engine gets wrong when it gets something wrong.

Each takes the sequences of a batch between prefill and decode and spoils as little as it can. A
fault returns False when the model has nothing of the kind it spoils.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine import padded
from mlxinfer.engine.ragged import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlxinfer.engine.kv import Sequence

    Fault = Callable[[list[Sequence]], bool]

KEY_BACK = 4  # the key that is lost, counted from the end: inside the tiniest window and prompt


def leaves(sequence: Sequence) -> list[Any]:
    """Per-layer memories, those in a CacheList one by one."""
    flat: list[Any] = []
    for leaf in sequence.leaves():
        flat += list(leaf.caches) if hasattr(leaf, "caches") else [leaf]
    return flat


def _holds_keys(leaf: Any) -> bool:
    return getattr(leaf, "keys", None) is not None and leaf.keys.shape[-1] > 0


def _holds_state(leaf: Any) -> bool:
    return any(isinstance(a, mx.array) for a in getattr(leaf, "cache", []))


def _holds_own(leaf: Any) -> bool:
    """A cache class of the model's own, neither keys and values nor an ArraysCache."""
    return not hasattr(leaf, "keys") and not hasattr(leaf, "cache")


def _held(leaf: Any) -> int:
    if hasattr(leaf, "start"):
        return leaf.end - leaf.start
    if hasattr(leaf, "start_position"):
        return leaf.offset - leaf.start_position
    return min(leaf.offset, leaf.keys.shape[2])


def shifted_position(batch: list[Sequence]) -> bool:
    """The first row believes that it is one token further than it is."""
    sequence, found = batch[0], False
    if sequence.own is None:
        sequence.length += 1
        return True
    for leaf in leaves(sequence):
        if hasattr(leaf, "offset"):
            leaf.offset += 1
            found = True
    return found


def lost_key(batch: list[Sequence]) -> bool:
    """One key and value of the first row are zero."""
    found = False
    for leaf in leaves(batch[0]):
        if _holds_keys(leaf):
            at = _held(leaf) - KEY_BACK
            leaf.keys[..., at, :] = 0
            if leaf.values.shape[-1]:
                leaf.values[..., at, :] = 0
            found = True
        elif _holds_own(leaf):
            leaf.window[:, -KEY_BACK] = 0
            found = True
    return found


def lost_state(batch: list[Sequence]) -> bool:
    """The first row's recurrent state is zero, in the first layer that has one."""
    for leaf in leaves(batch[0]):
        if _holds_state(leaf):
            leaf.cache = [mx.zeros_like(a) if isinstance(a, mx.array) else a for a in leaf.cache]
            return True
    return False


def swapped_keys(batch: list[Sequence]) -> bool:
    """The first two rows have each other's keys and values, in the first layer that has keys."""
    for one, other in zip(leaves(batch[0]), leaves(batch[1]), strict=True):
        if _holds_keys(one):
            n = min(_held(one), _held(other))
            for name in ("keys", "values"):
                a, b = getattr(one, name), getattr(other, name)
                if a.shape[-1]:
                    a_part, b_part = mx.array(a[..., :n, :]), mx.array(b[..., :n, :])
                    a[..., :n, :], b[..., :n, :] = b_part, a_part
            return True
        if _holds_own(one):
            one.window, other.window = other.window, one.window
            return True
    return False


def swapped_states(batch: list[Sequence]) -> bool:
    """The first two rows have each other's recurrent state, in the first layer that has one."""
    for one, other in zip(leaves(batch[0]), leaves(batch[1]), strict=True):
        if _holds_state(one):
            one.cache, other.cache = list(other.cache), list(one.cache)
            return True
    return False


def narrow_window(batch: list[Sequence]) -> bool:
    """The first row's sliding windows are one token too small."""
    found = False
    for leaf in leaves(batch[0]):
        if isinstance(getattr(leaf, "window", None), int):
            leaf.window -= 1
            found = True
    return found


@contextlib.contextmanager
def stale_states() -> Iterator[None]:
    """A batch that dissolves keeps its rows' recurrent states to itself."""
    release = Batch.release
    Batch.release = lambda self: self._stacked.clear()
    try:
        yield
    finally:
        Batch.release = release


@contextlib.contextmanager
def short_mask() -> Iterator[None]:
    """In a padded view the mask hides each row's oldest key."""
    with _patched(padded, "slot_mask", lambda n, slots, shown, window: _mask(n, slots, [s - 1 for s in shown], window)):
        yield


@contextlib.contextmanager
def neighbours_key() -> Iterator[None]:
    """In a padded view the padding holds the longest row's keys, and a shorter row may see one of them."""

    def mask(length: int, slots: int, shown: list[int], window: int | None) -> mx.array:
        return _mask(length, slots, [min(slots, s + 1) for s in shown], window)

    def pad(rows: list[mx.array], slots: int, fill: float = 0.0) -> mx.array:
        longest = max(rows, key=lambda row: row.shape[2])
        filled = [mx.concatenate([longest[..., : slots - row.shape[2], :], row], axis=2) for row in rows]
        return _pad(filled, slots, fill)

    with _patched(padded, "slot_mask", mask), _patched(padded, "left_padded", pad):
        yield


_mask, _pad = padded.slot_mask, padded.left_padded


@contextlib.contextmanager
def _patched(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


PADDED_FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "short mask": short_mask,
    "neighbour's key": neighbours_key,
}

FAULTS: dict[str, Fault] = {
    "shifted position": shifted_position,
    "lost key": lost_key,
    "lost state": lost_state,
    "swapped keys": swapped_keys,
    "swapped states": swapped_states,
    "narrow window": narrow_window,
}
