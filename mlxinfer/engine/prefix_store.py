"""The prefix cache as the engine uses it: sequences in, sequences out, over a tree of spans and checkpoints.

A span holds the keys and values of some positions for every layer that keeps all of them. A checkpoint holds what the
other layers (sliding windows, recurrent states) remember at one position. On the MLX thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine.kv import STEP, SeqKV, Sequence, arrays_in
from mlxinfer.engine.prefix import Hit, PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from collections.abc import Sequence as Seq

    from mlxinfer.engine.forwards import Forwards
    from mlxinfer.engine.prefix import Evicted
    from mlxinfer.engine.prefix_disk import PrefixDisk


@dataclass(slots=True)
class Span:
    """Keys and values of `length` positions. `layers[i]` are the buffers of plain leaf i, tokens along axis 2.

    The buffers may be longer than `length`: what a sequence leaves is kept as it is, spare room included.
    """

    layers: list[list[mx.array]]
    length: int

    def part(self, start: int, end: int) -> Span:
        """A copy of the positions `start` to `end`; once it is evaluated it keeps nothing else alive."""
        layers = [[mx.contiguous(b[..., start:end, :]) for b in buffers] for buffers in self.layers]
        return Span(layers, end - start)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for buffers in self.layers for b in buffers)


@dataclass(slots=True)
class State:
    """What the stateful leaves remember at one position, leaf by leaf."""

    leaves: list[Any] = field(default_factory=list[Any])
    nbytes: int = 0


class _Ops:
    """How the tree cuts and counts spans and states."""

    def __init__(self) -> None:
        self.made: list[Span] = []
        """Copies that aren't evaluated."""

    def cut(self, span: Span, at: int) -> tuple[Span, Span]:
        self.made += (halves := (span.part(0, at), span.part(at, span.length)))
        return halves

    def head(self, span: Span, at: int) -> Span:
        return Span(span.layers, at) if mostly(span, at) else span.part(0, at)

    def span_nbytes(self, span: Span) -> int:
        return span.nbytes

    def state_nbytes(self, state: State) -> int:
        return state.nbytes


class PrefixStore:
    """What finished sequences leave for those that begin alike. `needs_state`: only checkpoints can be taken up."""

    def __init__(self, *, needs_state: bool, max_bytes: int, disk: PrefixDisk | None = None) -> None:
        self.needs_state = needs_state
        self.disk = disk
        self._ops = _Ops()
        self._claimed: dict[str, Hit[Span, State]] = {}
        self.tree: PrefixTree[Span, State] = PrefixTree(
            self._ops, needs_state=needs_state, max_bytes=max_bytes, on_evict=self._evicted
        )

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes

    def peek(self, key: str, tokens: Seq[int], limit: int) -> int:
        """How many of the first `limit` tokens could be restored, from memory or disk. Changes nothing."""
        held = self.tree.lookup(key, tokens, limit, count=False)
        return held if self.disk is None else max(held, self.disk.lookup(self, key, tokens, limit))

    def claim(self, request_id: str, key: str, tokens: Seq[int], limit: int, *, move: bool = True) -> int:
        """Take what is held of the first `limit` tokens for a request that is about to start; returns how many.

        What only the disk has is read first. From here to `restore` nothing can take it away. With `move`, what no
        other entry needs leaves the cache and isn't copied.
        """
        if self.disk is not None:
            held = self.tree.lookup(key, tokens, limit, count=False)
            self.disk.fetch(self, key, tokens, limit, held)
        length = self.tree.lookup(key, tokens, limit)
        if length:
            self._claimed[request_id] = self.tree.take(key, tokens, length, move=move and not self.needs_state)
        return length

    def restore(self, sequence: Sequence, request_id: str) -> None:
        """Fill an empty sequence with what its request has claimed."""
        hit = self._claimed.pop(request_id)
        fill(sequence, hit.spans, hit.state, hit.length)

    def drop_claims(self) -> None:
        """Forget what was claimed for a step that failed."""
        self._claimed.clear()

    def save(self, sequence: Sequence, key: str, tokens: Seq[int]) -> None:
        """Take over what a sequence that ends holds for `tokens`."""
        states = self._state_at(sequence, len(tokens))

        def span(start: int, end: int) -> Span:
            return left_span(sequence, start, end)

        if sequence.length >= len(tokens) > 0 and (states or not self.needs_state):
            self.insert(key, tokens, span, states)

    def checkpoint(self, sequence: Sequence, key: str, tokens: Seq[int]) -> None:
        """Remember a running sequence's state after `tokens`, so that others can go on from there."""
        states = self._state_at(sequence, len(tokens))
        if states:
            self.insert(key, tokens, running_span(sequence), states)

    def insert(
        self, key: str, tokens: Seq[int], make_span: Callable[[int, int], Span], states: Mapping[int, State]
    ) -> None:
        """Add to the tree, and evaluate the copies that this made, so that what they were cut from can go."""

        def make(start: int, end: int) -> Span:
            self._ops.made.append(span := make_span(start, end))
            return span

        self.tree.insert(key, tokens, make, states)
        mx.async_eval([span.layers for span in self._ops.made])
        self._ops.made.clear()

    def _state_at(self, sequence: Sequence, position: int) -> dict[int, State]:
        """{position: checkpoint}, or nothing where the sequence has gone too far past it."""
        if not self.needs_state:
            return {}
        state = state_at(sequence, position)
        return {} if state is None else {position: state}

    def shrink(self, max_bytes: int) -> None:
        """Hold at most `max_bytes` from now on."""
        self.tree.max_bytes = max(0, max_bytes)
        self.tree.evict(self.tree.nbytes - self.tree.max_bytes)

    def _evicted(self, entry: Evicted[Span, State]) -> None:
        if self.disk is not None:
            self.disk.offer(entry)

    def write_idle(self, post: Callable[[Callable[[], None]], None], idle: Callable[[], bool]) -> None:
        """Bring to disk what isn't there, one entry after the other, while `idle()`; `post` runs a function later."""
        if self.disk is not None:
            self.disk.write_idle(self, post, idle)

    def close(self) -> None:
        """Let go of everything; what is idle goes on its way to disk."""
        if self.disk is not None:
            self.disk.close(self)
        self.tree.clear()
        self._claimed.clear()


def left_span(sequence: Sequence, start: int, end: int) -> Span:
    """Of a sequence that ends: as it is, without a copy, unless most of it is something else or room to grow."""
    whole = Span([leaf.shared() for leaf in sequence.plain()], end)
    return whole if start == 0 and mostly(whole, end) else whole.part(start, end)


def mostly(span: Span, length: int) -> bool:
    """Whether buffers of `span` hold little beside the first `length` positions: who goes on copies them whole."""
    spare = max((b.shape[2] for buffers in span.layers for b in buffers), default=length) - length
    return spare * 4 <= length


def running_span(sequence: Sequence) -> Callable[[int, int], Span]:
    """(start, end) → a copy of what a sequence that goes on holds now."""
    return Span([leaf.shared() for leaf in sequence.plain()], sequence.length).part


def state_at(sequence: Sequence, position: int) -> State | None:
    """The checkpoint, on its way to be computed; None where the sequence has gone too far past `position`."""
    leaves = [_saved_leaf(leaf, sequence.length, position) for leaf in sequence.stateful()]
    if any(leaf is None for leaf in leaves):
        return None
    arrays = arrays_in(leaves)
    mx.async_eval(arrays)
    return State(leaves, sum(a.nbytes for a in arrays))


def fill(sequence: Sequence, spans: Seq[Span], state: State | None, length: int) -> None:
    """Have an empty sequence hold `length` tokens: `spans` one after the other, and the checkpoint there."""
    for index, leaf in enumerate(sequence.plain()):
        parts = [span.layers[index] for span in spans]
        leaf.load(parts[0] if len(parts) == 1 else _joined(parts, [s.length for s in spans]), 0, length)
    if state is not None:
        for leaf, held in zip(sequence.stateful(), state.leaves, strict=True):
            _restore_leaf(leaf, held)
    sequence.length = length


def can_restore(runner: Forwards) -> Generator[None, None, bool]:
    """Whether a sequence of this model goes on the same from a checkpoint: not every cache of mlx-lm's can be set."""
    whole, again = runner.new_sequence(), runner.new_sequence()
    runner.forward([whole], [[0, 1, 0]])
    try:
        held = [_saved_leaf(leaf, whole.length, whole.length) for leaf in whole.stateful()]
        for leaf, state in zip(again.stateful(), held, strict=True):
            _restore_leaf(leaf, state)
        for mine, theirs in zip(again.plain(), whole.plain(), strict=True):
            mine.load(theirs.shared(), 0, whole.length)
        again.length = whole.length
        mx.eval(again.arrays(), whole.arrays())
        yield
        ours = runner.forward([again], [[1]])
        mx.eval(ours)
        yield
        theirs = runner.forward([whole], [[1]])
        return bool(mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3).item())
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        return False


def _joined(parts: list[list[mx.array]], lengths: list[int]) -> list[mx.array]:
    """The buffers of several spans one after the other, with room to grow."""
    total = sum(lengths)
    spare = -(-(total + 1) // STEP) * STEP - total
    joined: list[mx.array] = []
    for pieces in zip(*parts, strict=True):
        held = [piece[..., :n, :] for piece, n in zip(pieces, lengths, strict=True)]
        shape = (*held[0].shape[:2], spare, held[0].shape[3])
        joined.append(mx.concatenate([*held, mx.zeros(shape, held[0].dtype)], axis=2))
    return joined


def _saved_leaf(leaf: Any, length: int, position: int) -> Any:
    """What a leaf remembers at `position`; None when it can't tell any more."""
    if isinstance(leaf, SeqKV):
        end = leaf.end - (length - position)
        # A window that has moved on can go back by its slack only.
        sound = leaf.keys is not None and leaf.start <= max(0, end - (leaf.window or 1) + 1)
        return (leaf.shared(), leaf.start, end) if sound else None
    if length != position:
        return None
    return _fresh(leaf.state)


def _restore_leaf(leaf: Any, held: Any) -> None:
    if isinstance(leaf, SeqKV):
        leaf.load(list(held[0]), held[1], held[2])
    else:
        leaf.state = _fresh(held)


def _fresh(value: Any) -> Any:
    """The same state in new array objects: in-place changes of the one don't show in the other."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, list | tuple):
        return type(value)(_fresh(part) for part in value)
    return value
