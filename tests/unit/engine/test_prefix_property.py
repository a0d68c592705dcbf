"""The radix tree against a naive model: the set of all prefixes held, and the set of those with a checkpoint."""

from __future__ import annotations

import dataclasses

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxinfer.engine.prefix import Evicted, PrefixTree
from mlxinfer.engine.prefix_node import shared_length, token_array

Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Padded:
    """A span whose bytes don't add up when it is cut: whole blocks of 8, like a buffer grown in steps."""

    tokens: Tokens


class PaddedOps:
    def cut(self, span: Padded, at: int) -> tuple[Padded, Padded]:
        assert 0 < at < len(span.tokens)
        return Padded(span.tokens[:at]), Padded(span.tokens[at:])

    def head(self, span: Padded, at: int) -> Padded:
        return self.cut(span, at)[0]

    def span_nbytes(self, span: Padded) -> int:
        return -(-len(span.tokens) // 8) * 8

    def state_nbytes(self, state: Tokens) -> int:
        return 3 + len(state) % 2


KEYS = st.sampled_from(["a", "a", "a", "b"])
MORE = st.lists(st.integers(0, 2), max_size=5).map(tuple)

OPERATIONS = ["insert"] * 8 + ["take"] * 6 + ["lookup"] * 3 + ["evict"] * 4 + ["missing", "write_idle"] * 2 + ["clear"]


def prefixes(tokens: Tokens) -> list[Tokens]:
    return [tokens[:n] for n in range(1, len(tokens) + 1)]


class TreeAgainstSets(RuleBasedStateMachine):
    """`held` and `checkpoints` per key; what eviction takes is read back and must lie on the path it named."""

    needs_state = False
    max_bytes = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, set[Tokens]] = {"a": set(), "b": set()}
        self.checkpoints: dict[str, set[Tokens]] = {"a": set(), "b": set()}
        self.evicted: list[Evicted] = []

    @initialize()
    def begin(self) -> None:
        # As many checkpoints as there are: thinning has tests of its own.
        self.tree: PrefixTree[Padded, Tokens] = PrefixTree(
            PaddedOps(),
            needs_state=self.needs_state,
            max_bytes=self.max_bytes,
            on_evict=self.evicted.append,
            keep_states=100,
        )

    def draw_tokens(self, data: st.DataObject, key: str) -> Tokens:
        """Most of what is asked for begins like something that is held."""
        known = sorted(self.held[key])
        base = data.draw(st.sampled_from(known)) if known and data.draw(st.integers(0, 5)) else ()
        return (base + data.draw(MORE))[:16]

    def restorable(self, key: str, tokens: Tokens, limit: int) -> int:
        found = self.checkpoints[key] if self.needs_state else self.held[key]
        return max((n for n in range(1, min(limit, len(tokens)) + 1) if tokens[:n] in found), default=0)

    @rule(data=st.data(), key=KEYS, name=st.sampled_from(OPERATIONS))
    def step(self, data: st.DataObject, key: str, name: str) -> None:
        # One rule for all: of several, hypothesis leaves some out of each run, and without insert nothing happens.
        getattr(self, name)(data, key)

    def insert(self, data: st.DataObject, key: str) -> None:
        tokens = self.draw_tokens(data, key)
        positions = data.draw(st.sets(st.integers(1, len(tokens)))) if tokens else set()
        if tokens and data.draw(st.booleans()):
            positions.add(len(tokens))
        end = max(positions, default=0) if self.needs_state else len(tokens)
        covered = len([p for p in prefixes(tokens[:end]) if p in self.held[key]])
        refused = self.tree.counters.refused
        asked: list[tuple[int, int]] = []

        def make_span(start: int, stop: int) -> Padded:
            asked.append((start, stop))
            return Padded(tokens[start:stop])

        self.tree.insert(key, tokens, make_span, {p: tokens[:p] for p in positions})
        assert asked == ([(covered, end)] if covered < end else [])
        if self.tree.counters.refused == refused:
            self.held[key].update(prefixes(tokens[:end]))
            self.checkpoints[key].update(tokens[:p] for p in positions if self.needs_state)
        self.take_in_evictions()

    def take_in_evictions(self) -> None:
        for entry in self.evicted:
            tokens = tuple(entry.tokens)
            assert tokens in self.held[entry.key]
            assert sum((span.tokens for span in entry.spans), ()) == tokens
            assert all(state == tokens[:p] for p, state in entry.states.items())
        for key in self.held:
            left = {p for p in self.held[key] if self.tree.missing(key, p) == len(p)}
            lost = self.held[key] - left
            assert lost <= {p for e in self.evicted if e.key == key for p in prefixes(tuple(e.tokens))}
            self.held[key] = left
            self.checkpoints[key] -= lost
        self.evicted.clear()

    def lookup(self, data: st.DataObject, key: str) -> None:
        tokens = self.draw_tokens(data, key)
        limit = data.draw(st.integers(0, 16))
        assert self.tree.lookup(key, tokens, limit) == self.restorable(key, tokens, limit)

    def missing(self, data: st.DataObject, key: str) -> None:
        tokens = self.draw_tokens(data, key)
        assert self.tree.missing(key, tokens) == len([p for p in prefixes(tokens) if p in self.held[key]])

    def take(self, data: st.DataObject, key: str) -> None:
        tokens = self.draw_tokens(data, key)
        move = data.draw(st.booleans())
        length = self.tree.lookup(key, tokens, len(tokens))
        before = self.tree.nbytes
        hit = self.tree.take(key, tokens, length, move=move)
        taken = tokens[:length]
        assert sum((span.tokens for span in hit.spans), ()) == taken
        assert hit.length == length
        assert hit.state == (taken if self.needs_state and taken else None)
        assert all(state == tokens[:p] for p, state in hit.states.items())
        assert hit.moved_bytes == before - self.tree.nbytes
        longer = any(len(p) > length and p[:length] == taken for p in self.held[key])
        if not move or not taken or longer:
            assert hit.moved_bytes == 0
            return
        # Everything down to the deepest fork moves: the longest prefix with another continuation.
        stay = next(
            (n for n in range(length - 1, 0, -1) if any(self.forks(key, taken, n, p) for p in self.held[key])), 0
        )
        gone = set(prefixes(taken)[stay:])
        assert {taken[:p] for p in hit.states} == gone & self.checkpoints[key]
        self.held[key] -= gone
        self.checkpoints[key] -= gone

    @staticmethod
    def forks(key: str, taken: Tokens, at: int, other: Tokens) -> bool:
        return len(other) == at + 1 and other[:at] == taken[:at] and other[at] != taken[at]

    def evict(self, data: st.DataObject, _: str) -> None:
        wanted = data.draw(st.integers(0, 12))
        before = self.tree.nbytes
        freed = self.tree.evict(wanted)
        assert freed == before - self.tree.nbytes
        assert freed >= min(wanted, before)
        self.take_in_evictions()

    def write_idle(self, data: st.DataObject, _: str) -> None:
        for entry in self.tree.iter_idle():
            if data.draw(st.booleans()):
                self.tree.mark_written(entry)
                assert all(e.tokens != entry.tokens or e.key != entry.key for e in self.tree.iter_idle())

    def clear(self, data: st.DataObject, key: str) -> None:
        one = data.draw(st.booleans())
        self.tree.clear(key if one else None)
        for gone in [key] if one else self.held:
            self.held[gone].clear()
            self.checkpoints[gone].clear()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()
            assert (self.tree.nbytes == 0) == (not any(self.held.values()))


class SmallTree(TreeAgainstSets):
    max_bytes = 70


class StateTree(TreeAgainstSets):
    needs_state = True


class SmallStateTree(TreeAgainstSets):
    needs_state = True
    max_bytes = 70


# A failure is shown quickly: shrinking a long run of steps could outlast the test's own limit.
STEPS = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    print_blob=True,
)


class TestPlain(TreeAgainstSets.TestCase):
    settings = STEPS


class TestPlainFull(SmallTree.TestCase):
    settings = STEPS


class TestStates(StateTree.TestCase):
    settings = STEPS


class TestStatesFull(SmallStateTree.TestCase):
    settings = STEPS


@given(
    length=st.integers(0, 3000),
    others=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2**32 - 1)), max_size=3),
    end=st.integers(0, 3000),
)
def test_the_length_that_two_arrays_share_is_where_they_first_differ(length, others, end):
    a = list(range(length))
    b = list(a)
    for at, token in others:
        if at < length:
            b[at] = token
    b = b[:end]
    differ = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    expected = differ[0] if differ else min(len(a), len(b))
    assert shared_length(token_array(a), token_array(b)) == shared_length(token_array(b), token_array(a)) == expected
