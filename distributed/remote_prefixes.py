"""The prefix cache of a model over ranks: the tree and every decision here, the arrays there (rank_prefixes.py).

What the tree holds are numbers. What becomes of them goes to the ranks with the step in which it happens, and a number
that nothing here refers to any more is let go there. Bytes are reckoned from what a token and a state take on the rank
where they take the most.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed.wire import PrefixOps, Restored
from mlxinfer.engine.kv import SLACK
from mlxinfer.engine.prefix import Hit, PrefixTree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from mlxinfer.engine.memory import KVCost


class Kept:
    """A span of `length` positions on every rank, or a state."""

    __slots__ = ("__weakref__", "length", "nbytes", "number")

    def __init__(self, number: int, length: int, nbytes: int) -> None:
        self.number, self.length, self.nbytes = number, length, nbytes


class RemotePrefixes:
    """As PrefixStore, for Engine. No tier on disk."""

    disk = None

    def __init__(self, cost: KVCost, *, needs_state: bool, exact: bool, room: int | None) -> None:
        """`exact`: a state can be had only where a row is, not a few tokens before. `room`: bytes that no rank may
        go beyond, whatever `shrink` allows."""
        self.needs_state = needs_state
        self.begin(cost, exact=exact, room=room)

    def begin(self, cost: KVCost, *, exact: bool, room: int | None) -> None:
        """With ranks that hold nothing."""
        self._exact, self._room = exact, room
        self._token_bytes = cost.per_token
        self._state_bytes = cost.fixed + sum(most * size for most, size in cost.windowed)
        self._claimed: dict[str, Hit[Kept, Kept]] = {}
        self._made = 0
        self._free: list[int] = []
        self._before: list[tuple[Any, ...]] = []
        self._ops = self._before
        """Where the next operation is noted."""
        self.tree: PrefixTree[Kept, Kept] = PrefixTree(self, needs_state=self.needs_state, max_bytes=0)

    # What the tree asks

    def cut(self, span: Kept, at: int) -> tuple[Kept, Kept]:
        parts = (
            self._kept(at, at * self._token_bytes),
            self._kept(span.length - at, (span.length - at) * self._token_bytes),
        )
        self._ops.append(("cut", span.number, at, parts[0].number, parts[1].number))
        return parts

    def head(self, span: Kept, at: int) -> Kept:
        # The ranks take as much of it as the row is to have.
        return span if (span.length - at) * 4 <= at else self.cut(span, at)[0]

    def span_nbytes(self, span: Kept) -> int:
        return span.nbytes

    def state_nbytes(self, state: Kept) -> int:
        return state.nbytes

    # What Engine asks

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes

    def peek(self, key: str, tokens: Seq[int], limit: int) -> int:
        """How many of the first `limit` tokens could be restored. Changes nothing."""
        return self.tree.lookup(key, tokens, limit, count=False)

    def claim(self, request_id: str, key: str, tokens: Seq[int], limit: int, *, move: bool = True) -> int:
        """As PrefixStore.claim."""
        length = self.tree.lookup(key, tokens, limit)
        if length:
            self._claimed[request_id] = self.tree.take(key, tokens, length, move=move and not self.needs_state)
        return length

    def drop_claims(self) -> None:
        """Forget what was claimed for a step that failed."""
        self._claimed.clear()

    def shrink(self, max_bytes: int) -> None:
        """Hold at most `max_bytes` on each rank from now on."""
        self.tree.max_bytes = max(0, max_bytes if self._room is None else min(max_bytes, self._room))
        self.tree.evict(self.tree.nbytes - self.tree.max_bytes)

    def close(self) -> None:
        self.tree.clear()
        self._claimed.clear()

    # What RemoteRunner tells, in the order of a step

    def restored(self, request_id: str) -> Restored:
        """What the row of a request starts from."""
        hit = self._claimed.pop(request_id)
        state = None if hit.state is None else hit.state.number
        return Restored([span.number for span in hit.spans], state, hit.length)

    def leave(self, key: str, tokens: Seq[int], length: int) -> list[tuple[Any, ...]]:
        """Take over what a row of `length` tokens that ends holds for `tokens`; what the ranks have to do for it."""
        return self._noted("left", key, tokens, length) if tokens else []

    def checkpoint(self, key: str, tokens: Seq[int], length: int) -> list[tuple[Any, ...]]:
        """Remember a row of `length` tokens as it is after `tokens`, while it goes on."""
        return self._noted("running", key, tokens, length) if self.needs_state else []

    def ops(self) -> PrefixOps:
        """For the next step: what was claimed and let go since the last one."""
        before, self._before = self._before, []
        self._ops = self._before
        return PrefixOps(before)

    def freed(self) -> set[int]:
        """Numbers that nothing refers to any more, each told once."""
        free, self._free[:] = set(self._free), []
        return free

    def digest(self) -> dict[str, Any]:
        """As RankPrefixes.digest, of what the ranks should hold. Where no request waits or runs."""
        nodes: Any = list(self.tree.iter_nodes())
        spans = {str(node.span.number): node.span.length for node in sorted(nodes, key=lambda n: n.span.number)}
        return {"spans": spans, "states": sorted(state.number for node in nodes for state in node.states.values())}

    # Inside

    def _noted(self, kind: str, key: str, tokens: Seq[int], length: int) -> list[tuple[Any, ...]]:
        self._ops = noted = []
        states: Mapping[int, Kept] = {}
        if self.needs_state:
            states = self._state_at(len(tokens), length)
            if not states:
                self._ops = self._before
                return []

        def make(start: int, end: int) -> Kept:
            # What is kept as it is may have a quarter of itself spare.
            nbytes = (end - start) * self._token_bytes * (5 if kind == "left" and start == 0 else 4) // 4
            span = self._kept(end - start, nbytes)
            noted.append((kind, span.number, start, end))
            return span

        self.tree.insert(key, tokens, make, states)
        self._ops = self._before
        return noted

    def _state_at(self, position: int, length: int) -> dict[int, Kept]:
        """Windows keep SLACK tokens more than they need; recurrent states are what they are."""
        if length - position > (0 if self._exact else SLACK):
            return {}
        state = self._kept(0, self._state_bytes)
        self._ops.append(("state", state.number, position))
        return {position: state}

    def _kept(self, length: int, nbytes: int) -> Kept:
        self._made += 1
        made = Kept(self._made, length, nbytes)
        weakref.finalize(made, self._free.append, made.number).atexit = False
        return made
