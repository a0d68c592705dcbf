"""What the prefix cache holds on one rank: arrays by number. What is kept, cut, lent and let go is decided elsewhere.

The process with the scheduler has the tree (remote_prefixes.py) and says with each step what is to be done at which
place of it, so that all ranks hold the same things at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.distributed.frames import ChannelError
from mlxinfer.engine.prefix_store import Span, State, fill, left_span, mostly, running_span, state_at

if TYPE_CHECKING:
    from mlxinfer.distributed.wire import PrefixOps
    from mlxinfer.engine.kv import Sequence


class RankPrefixes:
    """`take` what comes with a step, do the step, `settle`."""

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}
        self._states: dict[int, State] = {}
        self._due: PrefixOps | None = None
        self._made: list[Span] = []

    def take(self, ops: PrefixOps) -> None:
        """Note what is to be done in the next step, and do what comes before it. Raises ChannelError."""
        self._due = ops
        self._do(ops.before, None)

    def restore(self, sequence: Sequence, request_id: str) -> None:
        """Fill the empty row of a request that starts."""
        due = self._due and self._due.restore.pop(request_id, None)
        if self._due is None or due is None:
            raise ChannelError(f"{request_id} starts from a prefix that nobody has named")
        spans = [self._span(number) for number in due.spans]
        last, length = spans[-1], due.length - sum(span.length for span in spans[:-1])
        spans[-1] = Span(last.layers, length) if mostly(last, length) else last.part(0, length)
        wanted = {number for other in self._due.restore.values() for number in other.spans}
        wanted |= {op[1] for ops in self._due.checkpoint.values() for op in ops if op[0] == "cut"}
        for number in self._due.free.intersection(due.spans) - wanted:
            # Its own from now on: lent, it would be copied when the row grows.
            del self._spans[number]
        state = None if due.state is None else self._states[due.state]
        fill(sequence, spans, state, due.length)

    def leave(self, sequence: Sequence, request_id: str) -> None:
        """Keep what is wanted of a row that ends."""
        self._do(self._due.leave.pop(request_id, []) if self._due else [], sequence)

    def checkpoint(self, sequence: Sequence, request_id: str) -> None:
        """Keep what is wanted of a row that goes on."""
        self._do(self._due.checkpoint.pop(request_id, []) if self._due else [], sequence)

    def settle(self) -> None:
        """After the step: let go. Raises ChannelError where something was to be done that had no place in the step."""
        due, self._due = self._due, None
        if due is None:
            return
        if left := [*due.restore, *due.leave, *due.checkpoint]:
            raise ChannelError(f"the step had no place for what {left[0]} was to leave or take")
        for number in due.free:
            self._spans.pop(number, None)
            self._states.pop(number, None)

    def digest(self) -> dict[str, Any]:
        """Numbers, and how many tokens each span has."""
        spans = {str(number): span.length for number, span in sorted(self._spans.items())}
        return {"spans": spans, "states": sorted(self._states)}

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (*self._spans.values(), *self._states.values()))

    # Inside

    def _do(self, ops: list[tuple[Any, ...]], sequence: Sequence | None) -> None:
        for name, *numbers in ops:
            if name == "cut":
                source, at, first, rest = numbers
                span = self._span(source)
                self._keep(first, span.part(0, at))
                self._keep(rest, span.part(at, span.length))
            elif sequence is None:
                raise ChannelError(f"there is no row to {name}")
            elif name == "left":
                number, start, end = numbers
                self._keep(number, left_span(sequence, start, end))
            elif name == "running":
                number, start, end = numbers
                self._keep(number, running_span(sequence)(start, end))
            else:
                number, position = numbers
                state = state_at(sequence, position)
                if state is None:
                    raise ChannelError(f"a row of {sequence.length} tokens can't tell its state at {position}")
                self._states[number] = state
        mx.async_eval([span.layers for span in self._made])
        self._made.clear()

    def _keep(self, number: int, span: Span) -> None:
        self._spans[number] = span
        self._made.append(span)

    def _span(self, number: int) -> Span:
        found = self._spans.get(number)
        if found is None:
            raise ChannelError(f"there is no prefix {number}")
        return found
