"""What the prefix cache lends: most of a buffer without a copy, and never changed by who has it."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxinfer.engine.kv import SeqKV, Sequence
from mlxinfer.engine.prefix_store import PrefixStore, Span

TOKENS = list(range(200))


def filled(store: PrefixStore) -> mx.array:
    keys = mx.random.normal((1, 2, 200, 8))
    store.insert("", TOKENS, Span([[keys, keys + 1]], 200).part, {})
    return keys


@pytest.mark.parametrize("taken", [190, 100, 20])
def test_a_part_of_an_entry_is_lent_and_who_has_it_writes_to_its_own(taken: int) -> None:
    store = PrefixStore(needs_state=False, max_bytes=1 << 24)
    keys = filled(store)
    assert store.claim("a", "", TOKENS, taken) == taken
    sequence = Sequence([SeqKV()])
    store.restore(sequence, "a")
    leaf = sequence.plain()[0]
    assert leaf.keys is not None
    # Most of a buffer is lent as it is; of a small part, a copy is cheaper than one of the whole later.
    assert leaf.keys.shape[2] == (200 if taken == 190 else taken)
    new = mx.full((1, 2, 3, 8), 7.0)
    leaf.append(new, new)
    seen, _ = leaf.view(1)
    assert mx.array_equal(seen, mx.concatenate([keys[:, :, :taken], new], axis=2))
    store.claim("b", "", TOKENS, 200)
    again = Sequence([SeqKV()])
    store.restore(again, "b")
    assert mx.array_equal(again.plain()[0].view(1)[0], keys)
