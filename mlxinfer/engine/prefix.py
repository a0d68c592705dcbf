"""The prefix cache in memory: a radix tree over token ids that holds what idle sequences left.

Pure Python over opaque payloads, so that it is tested without mlx. Running rows own their buffers; nothing of theirs is
in here. Token ids themselves are compared, so there are no hashes that could collide. One thread only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mlxinfer.engine.prefix_node import Node, Span, State, checked_nodes, path_to, token_array, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

KEEP_STATES = 4
"""Checkpoints kept between two forks of the tree; a state may be megabytes and a conversation has many messages."""

StateIn = TypeVar("StateIn", contravariant=True)


class SpanOps(Protocol[Span, StateIn]):
    """What the tree needs to do with payloads."""

    def cut(self, span: Span, at: int) -> tuple[Span, Span]:
        """The first `at` positions and the rest; `span` itself stays as it is.

        Neither may keep the other's memory alive: the tree counts and evicts them apart.
        """
        ...

    def head(self, span: Span, at: int) -> Span:
        """The first `at` positions, to lend; `span` itself stays as it is. It may be the same memory."""
        ...

    def span_nbytes(self, span: Span) -> int:
        """Bytes held by `span`; the same answer each time."""
        ...

    def state_nbytes(self, state: StateIn) -> int:
        """Bytes held by `state`; the same answer each time."""
        ...


@dataclass(slots=True)
class Hit(Generic[Span, State]):
    """What `take` gives: `spans` cover exactly [0, length) in order; `state` is the checkpoint at `length`.

    Without a move both are lent: they stay in the tree and must not be changed in place. With a move `moved_bytes` are
    no longer in the tree, and `states` are the checkpoints that left it too, for the caller to put back one day.
    """

    spans: list[Span]
    state: State | None
    length: int
    moved_bytes: int = 0
    states: dict[int, State] = field(default_factory=dict)


@dataclass(slots=True)
class Evicted(Generic[Span, State]):
    """A leaf with its whole path, as a disk tier wants it: when it is evicted, or idle."""

    key: str
    tokens: array[int]
    """All of [0, end)."""
    spans: list[Span]
    states: dict[int, State]
    dirty: bool
    """Not on disk yet as it is."""


@dataclass(slots=True)
class PrefixCounters:
    """Sums since the start. `tokens_hit` counts what was taken, `tokens_asked` what was looked up."""

    lookups: int = 0
    hits: int = 0
    tokens_hit: int = 0
    tokens_asked: int = 0
    inserted: int = 0
    evicted: int = 0
    refused: int = 0


class PrefixTree(Generic[Span, State]):
    """Leading tokens → their keys, values and checkpoints; least recently used leaves go first.

    `needs_state`: the model has sliding windows or recurrent states, so it can only go on from a checkpoint. Then a
    span never outlives the last checkpoint that makes it useful: every leaf ends at one.
    `key` separates tenants and adapters: nothing is ever found under another key.
    """

    def __init__(
        self,
        ops: SpanOps[Span, State],
        *,
        needs_state: bool,
        max_bytes: int,
        on_evict: Callable[[Evicted[Span, State]], None] | None = None,
        keep_states: int = KEEP_STATES,
    ) -> None:
        self.ops = ops
        self.needs_state = needs_state
        self.max_bytes = max_bytes
        self.on_evict = on_evict
        self.keep_states = max(1, keep_states)
        self.nbytes = 0
        """Bytes of every span and checkpoint held."""
        self.counters = PrefixCounters()
        self._roots: dict[str, Node[Span, State]] = {}
        # Every node but the roots, least recently used first. A node comes after all of its descendants, because using
        # them uses it too; so the first one is always the leaf to evict.
        self._order: OrderedDict[Node[Span, State], None] = OrderedDict()

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._order)

    def lookup(self, key: str, tokens: Sequence[int], limit: int, *, count: bool = True) -> int:
        """How many of the first `limit` tokens can be restored. Changes nothing but the counters (with `count`)."""
        ids = token_array(tokens)
        limit = min(limit, len(ids))
        path, length = self._walk(key, ids, limit)
        if self.needs_state:
            length = next((p for node in reversed(path) for p in sorted(node.states, reverse=True) if p <= length), 0)
        if count:
            self.counters.lookups += 1
            self.counters.tokens_asked += max(0, limit)
            self.counters.hits += length > 0
        return length

    def take(self, key: str, tokens: Sequence[int], length: int, *, move: bool = True) -> Hit[Span, State]:
        """Spans and checkpoint of the first `length` tokens; `length` is what `lookup` said.

        With `move`, a leaf that ends at `length` leaves the tree and belongs to the caller, and so does each node above
        it that nothing else hangs below any more: the conversation that goes on is the only one that used them. A
        prefix that others share stays, and is lent. Raises ValueError when `length` can't be restored.
        """
        ids = token_array(tokens)
        path, held = self._walk(key, ids, length)
        if held != length:
            raise ValueError(f"{length} tokens to restore, {held} held; take what lookup returned")
        if not path:
            return Hit([], None, 0)
        last = path[-1]
        if self.needs_state and length not in last.states:
            raise ValueError(f"no checkpoint at {length}; take what lookup returned")
        self._touch(path)
        self.counters.tokens_hit += length
        hit = Hit([node.span for node in path], last.states.get(length), length)
        if last.end != length:
            hit.spans[-1] = self.ops.head(last.span, length - last.start)
        elif move:
            before = self.nbytes
            while path and not path[-1].children:
                node = path.pop()
                hit.states |= node.states
                self._remove(node)
            hit.moved_bytes = before - self.nbytes
        return hit

    def missing(self, key: str, tokens: Sequence[int]) -> int:
        """How many leading tokens have their spans here already; the caller has the rest to give."""
        ids = token_array(tokens)
        return self._walk(key, ids, len(ids))[1]

    def insert(
        self,
        key: str,
        tokens: Sequence[int],
        make_span: Callable[[int, int], Span],
        states: Mapping[int, State],
    ) -> None:
        """Add what a sequence left: `make_span(start, end)` is called at most once, for what isn't here yet.

        `states` are its checkpoints by position; with `needs_state` nothing beyond the last of them is kept, without
        it they are ignored. Then the least recently used leaves go until `max_bytes` holds. What can't fit even alone
        is refused and counted.
        """
        if any(not 0 < position <= len(tokens) for position in states):
            raise ValueError(f"checkpoints at {sorted(states)}, {len(tokens)} tokens")
        end = max(states, default=0) if self.needs_state else len(tokens)
        ids = token_array(tokens)[:end]
        path, covered = self._walk(key, ids, end)
        states = self._new_states(path, covered, states) if self.needs_state else {}
        if covered == end and not states:
            self._touch(path)
            return
        added = sum(map(self.ops.state_nbytes, states.values()))
        leaf = None
        if covered < end:
            leaf = Node(key, None, covered, ids[covered:], make_span(covered, end))
            added += self.ops.span_nbytes(leaf.span)
        if added + self._shared_nbytes(path, covered) > self.max_bytes:
            self.counters.refused += 1
            return
        if leaf is not None:
            if path and covered < path[-1].end:
                path[-1] = self._split(path[-1], covered)
            leaf.parent = path[-1] if path else self._roots.setdefault(key, Node(key, None, 0, array("I"), None))
            path.append(self._attach(leaf))
        for node in path:
            for position in [p for p in states if node.start < p <= node.end]:
                node.states[position] = states[position]
                node.dirty = True
        self.nbytes += added
        self._touch(path)
        self._thin(path)
        self.counters.inserted += 1
        self.evict(self.nbytes - self.max_bytes)

    def evict(self, wanted_bytes: int) -> int:
        """Free at least `wanted_bytes` if there is that much, least recently used leaves first; returns bytes freed."""
        before = self.nbytes
        while before - self.nbytes < wanted_bytes and self._order:
            leaf = next(iter(self._order))
            if self.on_evict is not None:
                self.on_evict(self._entry(leaf))
            parent = leaf.parent
            self._remove(leaf)
            self.counters.evicted += 1
            self._shorten(parent)
        return before - self.nbytes

    def clear(self, key: str | None = None) -> None:
        """Forget everything, or everything under `key`; `on_evict` isn't called."""
        for node in [n for n in self._order if key is None or n.key == key]:
            self._remove(node)

    def iter_idle(self) -> Iterator[Evicted[Span, State]]:
        """Leaves that aren't on disk as they are, least recently used first. The tree may change meanwhile."""
        for node in list(self._order):
            if node.dirty and not node.children and node.parent is not None:
                yield self._entry(node)

    def iter_nodes(self) -> Iterator[Node[Span, State]]:
        """Every node but the roots, least recently used first."""
        return iter(self._order)

    def mark_written(self, entry: Evicted[Span, State]) -> None:
        """Say that `entry` is on disk. What changed in the tree since it was made stays dirty."""
        path, length = self._walk(entry.key, entry.tokens, len(entry.tokens))
        for node in path:
            if node.end <= length and node.states.keys() <= entry.states.keys():
                node.dirty = False

    def check(self) -> None:
        """Assert every invariant; for tests and for an idle engine that looks after itself."""
        place = {node: index for index, node in enumerate(self._order)}
        nodes = [node for key, root in self._roots.items() for node in checked_nodes(key, root)]
        assert set(nodes) == set(place), "the order and the tree differ"
        assert self.nbytes == sum(map(self._node_nbytes, nodes)), "bytes are miscounted"
        assert self.nbytes <= self.max_bytes
        for node in nodes:
            assert all(place[child] < place[node] for child in node.children.values()), "a node before its descendant"
            assert self.needs_state or not node.states
            assert node.children or not self.needs_state or node.end in node.states, "a leaf that can't be restored"

    def _walk(self, key: str, ids: array[int], limit: int) -> tuple[list[Node[Span, State]], int]:
        return walk(self._roots.get(key), ids, limit)

    def _touch(self, path: list[Node[Span, State]]) -> None:
        for node in reversed(path):
            self._order.move_to_end(node)

    def _attach(self, node: Node[Span, State]) -> Node[Span, State]:
        assert node.parent is not None
        node.parent.children[node.tokens[0]] = node
        self._order[node] = None
        return node

    def _split(self, node: Node[Span, State], at: int) -> Node[Span, State]:
        """Put a new node for [start, at) above `node`, which keeps the rest, its children and its place in the order.

        The caller touches the new node, which brings it behind its descendants.
        """
        before = self.ops.span_nbytes(node.span)
        first, rest = self.ops.cut(node.span, at - node.start)
        above = self._attach(Node(node.key, node.parent, node.start, node.tokens[: at - node.start], first))
        above.dirty = node.dirty
        above.states = {position: state for position, state in node.states.items() if position <= at}
        node.states = {position: state for position, state in node.states.items() if position > at}
        node.parent, node.start, node.tokens, node.span = above, at, node.tokens[at - node.start :], rest
        above.children[node.tokens[0]] = node
        self.nbytes += self.ops.span_nbytes(first) + self.ops.span_nbytes(rest) - before
        return above

    def _remove(self, node: Node[Span, State]) -> None:
        """Take one node out; on the way from the leaves up, so that no cycle of references is left to the collector."""
        self.nbytes -= self._node_nbytes(node)
        del self._order[node]
        parent, node.parent = node.parent, None
        assert parent is not None
        del parent.children[node.tokens[0]]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]

    def _shorten(self, node: Node[Span, State] | None) -> None:
        """With `needs_state`, drop what lies behind the last checkpoint of a path that just lost its leaf."""
        while self.needs_state and node is not None and node.parent is not None and not node.children:
            parent = node.parent
            end = max(node.states, default=None)
            if end is not None:
                if end < node.end:
                    before = self.ops.span_nbytes(node.span)
                    node.span = self.ops.cut(node.span, end - node.start)[0]
                    node.tokens, node.end = node.tokens[: end - node.start], end
                    self.nbytes += self.ops.span_nbytes(node.span) - before
                return
            self._remove(node)
            node = parent

    def _shared_nbytes(self, path: list[Node[Span, State]], covered: int) -> int:
        """About how many bytes of the first `covered` positions are held; a node that ends later counts in part."""
        parts = ((self._node_nbytes(node), min(node.end, covered) - node.start, len(node.tokens)) for node in path)
        return sum(nbytes * used // length for nbytes, used, length in parts)

    def _new_states(self, path: list[Node[Span, State]], covered: int, states: Mapping[int, State]) -> dict[int, State]:
        """Those of `states` that aren't held, without those that `_thin` would drop at once."""
        held = {position for node in path for position in node.states}
        shared = [p for p in states if p <= covered and p not in held]
        beyond = sorted(p for p in states if p > covered)
        return {p: states[p] for p in {*shared, *beyond[:1], *beyond[-self.keep_states :]}}

    def _thin(self, path: list[Node[Span, State]]) -> None:
        """Keep the last checkpoints between two forks, and the first of the path: most often the system prompt's.

        Those before a fork serve every conversation below it, so each stretch without a fork counts by itself.
        """
        nodes = list(path)
        while len(nodes[-1].children) == 1:
            nodes.extend(nodes[-1].children.values())
        first = min((p for node in nodes for p in node.states), default=0)
        stretch: list[Node[Span, State]] = []
        for node in nodes:
            stretch.append(node)
            if len(node.children) == 1:
                continue
            for position in sorted(p for n in stretch for p in n.states)[: -self.keep_states]:
                if position != first:
                    owner = next(n for n in stretch if position in n.states)
                    self.nbytes -= self.ops.state_nbytes(owner.states.pop(position))
            stretch = []

    def _entry(self, leaf: Node[Span, State]) -> Evicted[Span, State]:
        path = path_to(leaf)
        tokens = array("I")
        states: dict[int, State] = {}
        for node in path:
            tokens += node.tokens
            states |= node.states
        return Evicted(leaf.key, tokens, [node.span for node in path], states, leaf.dirty)

    def _node_nbytes(self, node: Node[Span, State]) -> int:
        return self.ops.span_nbytes(node.span) + sum(map(self.ops.state_nbytes, node.states.values()))
