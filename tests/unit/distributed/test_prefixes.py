"""The tree that decides and the ranks that hold, without processes: both sides have the same after any history."""

from __future__ import annotations

import json
import random
from typing import Any

import mlx.core as mx
import pytest

from mlxinfer.distributed import wire
from mlxinfer.distributed.frames import ChannelError
from mlxinfer.distributed.rank_prefixes import RankPrefixes
from mlxinfer.distributed.remote_prefixes import RemotePrefixes
from mlxinfer.engine.kv import SeqKV, Sequence
from mlxinfer.engine.memory import KVCost

TOKEN = 8
"""Bytes of a token's key and value below."""


def sequence_of(tokens: list[int]) -> Sequence:
    """Keys and values are the token itself, so that what is restored can be read."""
    leaf = SeqKV()
    made = Sequence([leaf])
    if tokens:
        row = mx.array(tokens, mx.float32).reshape(1, 1, -1, 1)
        leaf.append(row, row)
    made.length = len(tokens)
    return made


def held_by(sequence: Sequence) -> list[int]:
    (leaf,) = sequence.plain()
    keys, values = leaf.view(1)
    assert mx.array_equal(keys, values)
    return [int(value) for value in keys[0, 0, :, 0].tolist()]  # pyright: ignore


class Pair:
    """The scheduler's side, and a rank that is told over JSON."""

    def __init__(self, room: int) -> None:
        self.tree = RemotePrefixes(KVCost(TOKEN), needs_state=False, exact=False, room=None)
        self.tree.shrink(room)
        self.rank = RankPrefixes()

    def step(self, ending: list[tuple[str, list[int]]], starting: list[tuple[str, list[int]]]) -> dict[str, Sequence]:
        """Rows that end and others that start, as a step has them; the rows that started."""
        cached = {name: self.tree.claim(name, "", tokens, len(tokens)) for name, tokens in starting}
        ops = self.tree.ops()
        for name, tokens in ending:
            if left := self.tree.leave("", tokens, len(tokens)):
                ops.leave[name] = left
        for name, count in cached.items():
            if count:
                ops.restore[name] = self.tree.restored(name)
        ops.free = self.tree.freed()
        self.rank.take(wire.prefixes_in(json.loads(json.dumps(wire.prefixes_out(ops)))))
        for name, tokens in ending:
            self.rank.leave(sequence_of(tokens), name)
        rows: dict[str, Sequence] = {}
        for name, tokens in starting:
            rows[name] = sequence_of([])
            if cached[name]:
                self.rank.restore(rows[name], name)
                assert held_by(rows[name]) == tokens[: cached[name]]
        self.rank.settle()
        return rows


@pytest.mark.parametrize("seed", range(8))
def test_after_any_history_both_sides_hold_the_same_and_rows_get_their_own_tokens(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(TOKEN * rng.choice([200, 1000, 100_000]))
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 120))] for _ in range(30)]
    restored = 0
    for number in range(120):
        ending = [(f"e{number}.{i}", rng.choice(texts)) for i in range(rng.randrange(3))]
        starting = [(f"s{number}.{i}", rng.choice(texts)) for i in range(rng.randrange(3))]
        restored += sum(row.length > 0 for row in pair.step(ending, starting).values())
        pair.tree.tree.check()
        pair.step([], [])
        assert pair.rank.digest() == pair.tree.digest()
        assert pair.tree.nbytes <= pair.tree.tree.max_bytes
    assert restored > 20


def test_what_a_row_takes_along_is_not_held_twice() -> None:
    pair = Pair(1 << 20)
    tokens = list(range(100))
    pair.step([("a", tokens)], [])
    rows = pair.step([], [("b", tokens)])
    assert held_by(rows["b"]) == tokens
    assert pair.rank.digest() == pair.tree.digest() == {"spans": {}, "states": []}


def test_what_is_let_go_of_in_a_step_is_there_until_its_last_use_in_it() -> None:
    rank = RankPrefixes()
    rank.take(wire.PrefixOps(leave={"a": [("left", 1, 0, 6)]}))
    rank.leave(sequence_of([5, 6, 7, 8, 9, 10]), "a")
    rank.settle()
    restored = {name: wire.Restored([1], None, 6) for name in "bc"}
    rank.take(wire.PrefixOps(restore=restored, checkpoint={"c": [("cut", 1, 2, 3, 4)]}, free={1, 4}))
    rows = {name: sequence_of([]) for name in "bc"}
    for name, row in rows.items():
        rank.restore(row, name)
    rank.checkpoint(rows["c"], "c")
    rank.settle()
    assert rank.digest() == {"spans": {"3": 2}, "states": []}
    assert held_by(rows["b"]) == held_by(rows["c"]) == [5, 6, 7, 8, 9, 10]


def test_what_has_no_place_in_the_step_is_an_error() -> None:
    rank = RankPrefixes()
    rank.take(wire.PrefixOps(leave={"a": [("left", 1, 0, 4)]}))
    with pytest.raises(ChannelError, match="no place for what a was to leave"):
        rank.settle()
    with pytest.raises(ChannelError, match="b starts from a prefix that nobody has named"):
        rank.restore(sequence_of([]), "b")
    with pytest.raises(ChannelError, match="there is no prefix 7"):
        rank.take(wire.PrefixOps([("cut", 7, 1, 8, 9)]))


def test_a_state_is_asked_for_only_where_a_row_can_tell_it() -> None:
    windows: dict[str, Any] = {"needs_state": True, "room": None}
    for exact, behind, kept in ((True, 0, True), (True, 1, False), (False, 16, True), (False, 17, False)):
        tree = RemotePrefixes(KVCost(TOKEN, fixed=64), exact=exact, **windows)
        tree.shrink(1 << 20)
        ops = tree.leave("", list(range(50)), 50 + behind)
        assert [op[0] for op in ops] == (["state", "left"] if kept else [])
