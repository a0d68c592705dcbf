"""The radix tree of the prefix cache, case by case. Payloads are token tuples, so that their content can be checked."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from mlxinfer.engine.prefix import KEEP_STATES, Evicted, PrefixTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Tokens = tuple[int, ...]


class TokenOps:
    """A span is the tokens it stands for, 10 bytes each; a state is (position, bytes)."""

    def __init__(self) -> None:
        self.cuts = 0

    def cut(self, span: Tokens, at: int) -> tuple[Tokens, Tokens]:
        assert 0 < at < len(span)
        self.cuts += 1
        return span[:at], span[at:]

    def head(self, span: Tokens, at: int) -> Tokens:
        assert 0 < at < len(span)
        return span[:at]

    def span_nbytes(self, span: Tokens) -> int:
        return 10 * len(span)

    def state_nbytes(self, state: tuple[int, int]) -> int:
        return state[1]


Tree = PrefixTree[Tokens, tuple[int, int]]


def tree(*, needs_state: bool = False, max_bytes: int = 10**6, **more) -> Tree:
    return PrefixTree(TokenOps(), needs_state=needs_state, max_bytes=max_bytes, **more)


def put(t: Tree, tokens: Sequence[int], positions: Sequence[int] = (), *, key: str = "", size: int = 100) -> list:
    """Insert; the ranges that a span was asked for."""
    asked: list[tuple[int, int]] = []

    def make_span(start: int, end: int) -> Tokens:
        asked.append((start, end))
        return tuple(tokens[start:end])

    states: Mapping[int, tuple[int, int]] = {p: (p, size) for p in positions}
    t.insert(key, tokens, make_span, states)
    t.check()
    return asked


def joined(spans: Sequence[Tokens]) -> Tokens:
    return sum(spans, ())


def test_any_shared_prefix_of_plain_keys_is_found():
    t = tree()
    put(t, (1, 2, 3, 4, 5))
    assert t.lookup("", (1, 2, 3, 9), 4) == 3
    assert t.lookup("", (1, 2, 3, 4, 5, 6), 6) == 5
    assert t.lookup("", (1, 2, 3, 4, 5, 6), 2) == 2
    assert t.lookup("", (2, 2), 2) == 0
    assert t.lookup("", (), 0) == 0


def test_another_key_never_sees_the_tokens():
    t = tree()
    put(t, (1, 2, 3), key="alice")
    assert t.lookup("bob", (1, 2, 3), 3) == 0
    assert t.missing("bob", (1, 2, 3)) == 0
    t.clear("bob")
    assert t.lookup("alice", (1, 2, 3), 3) == 3


def test_only_what_is_missing_is_asked_for_and_once():
    t = tree()
    assert put(t, (1, 2, 3, 4)) == [(0, 4)]
    assert t.missing("", (1, 2, 9, 9)) == 2
    assert put(t, (1, 2, 9, 9)) == [(2, 4)]
    assert put(t, (1, 2, 3, 4, 5)) == [(4, 5)]
    assert put(t, (1, 2, 3)) == []
    assert t.nbytes == 70


def test_a_conversation_that_goes_on_owns_what_only_it_used():
    t = tree()
    put(t, (1, 2, 3))
    put(t, (1, 2, 3, 4))
    hit = t.take("", (1, 2, 3, 4, 5), 4)
    assert (joined(hit.spans), hit.moved_bytes, t.nbytes, len(t)) == ((1, 2, 3, 4), 40, 0, 0)
    t.check()


def test_a_prefix_that_others_share_stays_when_a_conversation_moves_out():
    t = tree()
    put(t, (7, 7, 1, 1))
    put(t, (7, 7, 2, 2))
    hit = t.take("", (7, 7, 1, 1, 5), 4)
    assert hit.spans == [(7, 7), (1, 1)]
    assert hit.moved_bytes == 20
    t.check()
    assert t.lookup("", (7, 7, 1, 1), 4) == 2
    assert t.lookup("", (7, 7, 2, 2), 4) == 4


@pytest.mark.parametrize("length", [1, 3])
def test_part_of_a_leaf_is_lent_and_the_leaf_stays_whole(length):
    t = tree()
    put(t, (1, 2, 3, 4))
    hit = t.take("", (1, 2, 3, 4), length)
    assert (joined(hit.spans), hit.moved_bytes) == ((1, 2, 3, 4)[:length], 0)
    assert t.lookup("", (1, 2, 3, 4), 4) == 4


def test_nothing_moves_when_the_caller_only_borrows():
    t = tree()
    put(t, (1, 2, 3))
    assert t.take("", (1, 2, 3), 3, move=False).moved_bytes == 0
    assert t.lookup("", (1, 2, 3), 3) == 3


def test_a_node_that_others_hang_below_is_lent():
    t = tree()
    put(t, (1, 2))
    put(t, (1, 2, 3))
    assert t.take("", (1, 2, 9), 2).moved_bytes == 0
    assert t.lookup("", (1, 2, 3), 3) == 3


def test_taking_more_than_is_held_is_an_error():
    t = tree(needs_state=True)
    put(t, (1, 2, 3), (2, 3))
    with pytest.raises(ValueError, match="4 tokens to restore, 3 held"):
        t.take("", (1, 2, 3, 4), 4)
    with pytest.raises(ValueError, match="no checkpoint at 1"):
        t.take("", (1, 2, 3, 4), 1)


def test_with_states_only_a_checkpoint_can_be_restored():
    t = tree(needs_state=True)
    put(t, (1, 2, 3, 4, 5, 6), (2, 5))
    assert t.lookup("", (1, 2, 3, 4, 9), 5) == 2
    assert t.lookup("", (1, 2, 3, 4, 5, 6), 6) == 5
    assert t.lookup("", (1, 9), 2) == 0
    hit = t.take("", (1, 2, 3, 9), 2)
    assert (joined(hit.spans), hit.state, hit.moved_bytes) == ((1, 2), (2, 100), 0)


def test_with_states_nothing_behind_the_last_checkpoint_is_kept():
    t = tree(needs_state=True)
    assert put(t, (1, 2, 3, 4), (3,)) == [(0, 3)]
    assert put(t, (5, 6)) == []
    assert t.nbytes == 130


def test_checkpoints_move_out_with_their_conversation():
    t = tree(needs_state=True)
    put(t, (1, 2, 3, 4), (2, 4))
    hit = t.take("", (1, 2, 3, 4, 5), 4)
    assert hit.states == {2: (2, 100), 4: (4, 100)}
    assert (hit.state, hit.moved_bytes, t.nbytes) == ((4, 100), 240, 0)


def test_every_turn_of_a_conversation_moves_out_with_its_checkpoints():
    t = tree(needs_state=True)
    for end in (2, 4, 6):
        put(t, range(end), (end,))
    hit = t.take("", range(7), 6)
    assert (sorted(hit.states), hit.spans, len(t)) == ([2, 4, 6], [(0, 1), (2, 3), (4, 5)], 0)


def test_a_diverging_sequence_doesnt_inherit_a_checkpoint_beyond_the_fork():
    t = tree(needs_state=True)
    put(t, (1, 2, 3, 4), (1, 4))
    put(t, (1, 2, 8, 8), (4,))
    assert t.take("", (1, 2, 8, 8), 4, move=False).spans[1] == (8, 8)
    assert t.lookup("", (1, 2, 3, 4), 4) == 4
    assert t.nbytes == 60 + 300


def test_a_checkpoint_can_be_added_to_tokens_that_are_held():
    t = tree(needs_state=True)
    put(t, (1, 2, 3, 4), (4,))
    assert put(t, (1, 2), (2,)) == []
    assert t.lookup("", (1, 2, 9), 3) == 2


def test_a_long_conversation_keeps_its_first_and_its_last_checkpoints():
    t = tree(needs_state=True)
    put(t, range(1000), range(10, 1001, 10))
    kept = [p for p in range(1, 1001) if t.lookup("", range(1000), p) == p]
    assert kept == [10, *range(1000 - 10 * (KEEP_STATES - 1), 1001, 10)]
    put(t, range(1200), range(1010, 1201, 10))
    kept = [p for p in range(1, 1201) if t.lookup("", range(1200), p) == p]
    assert kept == [10, *range(1200 - 10 * (KEEP_STATES - 1), 1201, 10)]


def test_checkpoints_that_wouldnt_be_kept_dont_count_against_the_limit():
    t = tree(needs_state=True, max_bytes=100 * 10 + (KEEP_STATES + 1) * 100)
    put(t, range(100), range(1, 101))
    assert (t.counters.refused, t.lookup("", range(100), 100)) == (0, 100)


def test_checkpoints_before_a_fork_are_kept_for_both_sides():
    t = tree(needs_state=True)
    put(t, (*range(50), 1), (20, 40, 51))
    put(t, (*range(50), 2, *range(100, 150)), (45, 50, *range(60, 102, 5), 101))
    assert [p for p in range(1, 51) if t.lookup("", range(50), p) == p] == [20, 40, 45, 50]
    assert t.lookup("", (*range(50), 1), 51) == 51


def test_the_least_recently_used_goes_first():
    t = tree(max_bytes=90)
    for first in (1, 2, 3):
        put(t, (first, 0, 0))
    t.take("", (1, 0, 0), 3, move=False)
    put(t, (4, 0, 0))
    assert [f for f in (1, 2, 3, 4) if t.lookup("", (f, 0, 0), 3)] == [1, 3, 4]
    assert t.evict(1) == 30
    assert t.lookup("", (3, 0, 0), 3) == 0
    assert t.evict(10**9) == 60
    assert (t.nbytes, t.counters.evicted) == (0, 4)
    t.check()


def test_looking_up_is_no_use():
    t = tree(max_bytes=60)
    put(t, (1, 0, 0))
    put(t, (2, 0, 0))
    t.lookup("", (1, 0, 0), 3)
    put(t, (3, 0, 0))
    assert [f for f in (1, 2, 3) if t.lookup("", (f, 0, 0), 3)] == [2, 3]


def test_a_shared_prefix_outlives_the_leaves_below_it():
    t = tree()
    put(t, (1, 2, 3))
    put(t, (1, 2, 4))
    put(t, (9,))
    t.evict(1)
    assert t.lookup("", (1, 2, 3), 3) == 2
    t.evict(1)
    assert (t.lookup("", (1, 2, 4), 3), t.lookup("", (9,), 1)) == (2, 1)


def test_what_a_lost_leaf_leaves_behind_its_last_checkpoint_goes_with_it():
    t = tree(needs_state=True)
    put(t, (1, 2, 3, 4), (1, 4))
    put(t, (1, 2, 3, 5), (4,))
    t.evict(1)
    t.evict(1)
    t.check()
    assert (t.nbytes, t.missing("", (1, 2, 3, 4))) == (110, 1)


def test_what_can_never_fit_is_refused_and_nothing_else_is_lost():
    t = tree(max_bytes=50)
    put(t, (1, 2, 3))
    put(t, range(10, 16))
    put(t, (1, 2, 3, 4, 5, 6))
    assert (t.counters.refused, t.counters.evicted, t.lookup("", (1, 2, 3), 3)) == (2, 0, 3)


def test_a_disk_tier_gets_the_whole_path_of_what_is_evicted():
    seen: list[Evicted] = []
    t = tree(needs_state=True, on_evict=seen.append)
    put(t, (1, 2, 3, 4), (2, 4), key="k")
    put(t, (1, 2, 5), (3,), key="k")
    t.evict(1)
    assert (seen[0].key, tuple(seen[0].tokens), seen[0].spans) == ("k", (1, 2, 3, 4), [(1, 2), (3, 4)])
    assert (seen[0].states, seen[0].dirty) == ({2: (2, 100), 4: (4, 100)}, True)


def test_what_was_written_is_idle_no_more_until_it_changes():
    t = tree(needs_state=True)
    put(t, (1, 2), (2,))
    put(t, (3, 4), (2,))
    for entry in t.iter_idle():
        t.mark_written(entry)
    assert list(t.iter_idle()) == []
    put(t, (3, 4), (1,))
    put(t, (1, 2, 3), (3,))
    assert [tuple(e.tokens) for e in t.iter_idle()] == [(3, 4), (1, 2, 3)]


def test_a_write_that_ends_late_doesnt_cover_what_changed_meanwhile():
    t = tree(needs_state=True)
    put(t, (1, 2, 3), (3,))
    put(t, (4, 5, 6), (3,))
    first, second = t.iter_idle()
    put(t, (1, 2, 3), (2,))
    put(t, (4, 8), (2,))
    t.mark_written(first)
    t.mark_written(second)
    assert {tuple(e.tokens) for e in t.iter_idle()} == {(1, 2, 3), (4, 8)}


def test_what_is_left_of_a_written_path_counts_as_written():
    t = tree()
    put(t, (1, 2, 3))
    t.mark_written(next(iter(t.iter_idle())))
    put(t, (1, 2, 4))
    t.evict(1)
    t.evict(1)
    assert (t.lookup("", (1, 2, 4), 3), list(t.iter_idle())) == (2, [])


def test_a_written_leaf_is_evicted_as_clean():
    seen: list[Evicted] = []
    t = tree(on_evict=seen.append)
    put(t, (1, 2))
    t.mark_written(next(iter(t.iter_idle())))
    t.evict(1)
    assert not seen[0].dirty


def test_the_counters_say_what_was_asked_and_what_was_hit():
    t = tree()
    put(t, (1, 2, 3))
    t.lookup("", (1, 2, 9, 9), 3)
    t.lookup("", (5,), 1)
    t.lookup("", (5,), 1, count=False)
    t.take("", (1, 2, 9, 9), 2)
    c = t.counters
    assert (c.lookups, c.hits, c.tokens_hit, c.tokens_asked, c.inserted) == (2, 1, 2, 4, 1)


def test_clearing_forgets_one_key_or_all():
    t = tree()
    for key in ("a", "b", "c"):
        put(t, (1, 2), key=key)
        put(t, (1, 3), key=key)
    t.clear("b")
    t.check()
    assert [k for k in "abc" if t.lookup(k, (1,), 1)] == ["a", "c"]
    t.clear()
    t.check()
    assert t.nbytes == len(t) == 0


def test_a_checkpoint_outside_the_tokens_is_an_error():
    with pytest.raises(ValueError, match="checkpoints at"):
        put(tree(needs_state=True), (1, 2), (3,))


def test_leaves_go_in_exactly_the_order_of_their_last_use():
    rng = random.Random(5)
    seen: list[int] = []
    t = tree(max_bytes=300, on_evict=lambda e: seen.append(e.tokens[0]))
    model: OrderedDict[int, None] = OrderedDict()
    expected: list[int] = []
    for _ in range(400):
        first = rng.randrange(25)
        if first in model and rng.random() < 0.5:
            t.take("", (first, 1, 2), rng.choice([1, 2, 3]), move=False)
        else:
            put(t, (first, 1, 2))
        model[first] = None
        model.move_to_end(first)
        while len(model) > 10:
            expected.append(model.popitem(last=False)[0])
    assert seen == expected
    assert len(seen) > 50


def test_a_long_prompt_is_compared_in_blocks():
    # Counts the work, not the time: a Python loop over tokens would index the array once per token.
    from array import array

    class Counted(array):
        calls = 0

        def __getitem__(self, index):
            Counted.calls += 1
            return super().__getitem__(index)

    t = tree()
    tokens = list(range(100_000))
    put(t, tokens)
    other = Counted("I", tokens)
    other[77_777] = 5
    assert t.lookup("", other, len(other)) == 77_777
    assert Counted.calls < 100


def main() -> None:
    """Print how long a lookup of 100,000 tokens takes."""
    t = tree()
    tokens = tuple(range(100_000))
    put(t, tokens)
    start = time.perf_counter()
    for _ in range(20):
        t.lookup("", (*tokens[:77_777], 5, *tokens[77_777:]), 100_000)
    print(f"{(time.perf_counter() - start) * 50:.2f} ms")


if __name__ == "__main__":
    main()
