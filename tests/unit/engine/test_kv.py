"""Per-sequence buffers and the caches a model sees."""

import mlx.core as mx
import pytest

from mlxinfer.engine.attend import attend
from mlxinfer.engine.kv import SLACK, STEP, SeqKV, UnbatchableError, sequence_like
from mlxinfer.engine.ragged import Handles, RaggedAttention, RaggedKV, RowWindow, stack_states
from mlxinfer.upstream import ArraysCache, CacheList, KVCache, RotatingKVCache, create_causal_mask


def numbered(start: int, count: int) -> mx.array:
    """Keys [1, 1, count, 4] that carry their position."""
    return mx.broadcast_to(mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1), (1, 1, count, 4))


def positions(keys: mx.array) -> list[int]:
    return [int(x) for x in keys[0, 0, :, 0].tolist()]


def test_a_plain_sequence_keeps_every_position_in_order():
    kv = SeqKV()
    end = 0
    for count in (1, 5, STEP, 3, 2 * STEP, 1):
        kv.append(numbered(end, count), numbered(end, count))
        end += count
    keys, values = kv.view(1)
    assert positions(keys) == positions(values) == list(range(end))


def test_a_window_shows_exactly_what_its_queries_may_see_and_stays_bounded():
    window = 10
    kv = SeqKV(window=window)
    end = 0
    for count in [3, 9, 40] + [1] * 900:
        kv.append(numbered(end, count), numbered(end, count))
        end += count
        first = max(0, end - (window - 1 + count))
        assert positions(kv.view(count)[0]) == list(range(first, end))
    assert kv.keys is not None
    assert kv.keys.shape[2] <= 2 * STEP + window + SLACK


def test_tokens_can_be_taken_back_up_to_the_slack_even_right_after_the_buffer_moved():
    kv = SeqKV(window=8)
    end = 0
    for _ in range(STEP + 3):
        kv.append(numbered(end, 1), numbered(end, 1))
        end += 1
    kv.trim(SLACK)
    kv.append(numbered(end - SLACK, 1), numbered(end - SLACK, 1))
    assert positions(kv.view(1)[0]) == list(range(end - SLACK - 7, end - SLACK + 1))


def test_taking_back_more_than_is_held_is_an_error():
    kv = SeqKV()
    kv.append(numbered(0, 2), numbered(0, 2))
    with pytest.raises(ValueError, match="3 tokens to take back, 2 held"):
        kv.trim(3)


def test_one_row_behaves_like_mlx_lms_own_caches_masks_included(without_kernels):
    for theirs, window in ((KVCache(), None), (RotatingKVCache(max_size=6), 6)):
        row = RaggedKV([SeqKV(window)], Handles())
        end = 0
        for count in (4, 3, 1, 1, 9, 1, 1):
            mask = row.make_mask(count)
            expected = theirs.make_mask(count, return_array=False, window_size=None)
            row.begin(end, end + count)
            assert row.offset == theirs.offset
            keys, _ = row.update_and_fetch(numbered(end, count), numbered(end, count))
            their_keys, _ = theirs.update_and_fetch(numbered(end, count), numbered(end, count))
            end += count
            assert row.offset == theirs.offset == end
            # RotatingKVCache rotates when it decodes; the set of visible positions is what counts.
            assert sorted(positions(keys)) == sorted(positions(their_keys))
            if isinstance(expected, mx.array):
                assert mx.array_equal(mask, expected).item()
            else:
                assert mask == expected


def test_a_row_window_smaller_than_the_cache_is_masked_for_one_row_and_marked_for_several():
    row = RaggedKV([SeqKV()], Handles())
    row.begin(0, 5)
    row.update_and_fetch(numbered(0, 5), numbered(0, 5))
    assert row.make_mask(1, window_size=3).tolist() == [False, False, False, True, True, True]
    both = RaggedKV([SeqKV(), SeqKV()], Handles())
    mask = both.make_mask(1, window_size=3)
    assert isinstance(mask, RowWindow)
    assert mask.window == 3
    with pytest.raises(UnbatchableError):
        both.make_mask(1, return_array=True)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_attend_equals_attention_over_each_rows_own_keys(length, window):
    mx.random.seed(0)
    heads, dim, scale = 2, 8, 0.3
    lengths = [length, 4 + length, 11 + length]
    rows, expected = [], []
    queries = mx.random.normal((3, heads, length, dim))
    for i, n in enumerate(lengths):
        keys, values = mx.random.normal((1, heads, n, dim)), mx.random.normal((1, heads, n, dim))
        row = SeqKV(window)
        row.append(keys, values)
        rows.append(row)
        mask = create_causal_mask(length, n - length, window_size=window)
        scores = (queries[i : i + 1] * scale) @ keys.swapaxes(-1, -2)
        scores = mx.where(mask, scores, -mx.inf)
        expected.append(mx.softmax(scores, axis=-1) @ values)
    out = attend(queries, rows, scale=scale)
    assert mx.allclose(out, mx.concatenate(expected), atol=1e-5).item()


def test_attention_refuses_what_a_ragged_batch_cannot_serve():
    attention = RaggedAttention()
    cache = RaggedKV([SeqKV(), SeqKV()], attention.handles)
    cache.begin(mx.array([0, 0]), mx.array([1, 1]))
    k = mx.ones((2, 1, 1, 4))
    keys, values = cache.update_and_fetch(k, k + 1)
    with pytest.raises(UnbatchableError, match="transforms the keys"):
        attention(k, keys * 2, values, cache=cache, scale=1.0, mask=None)
    with pytest.raises(UnbatchableError, match="transforms the values"):
        attention(k, keys, values * 2, cache=cache, scale=1.0, mask=None)
    with pytest.raises(UnbatchableError, match="its own mask"):
        attention(k, keys, values, cache=cache, scale=1.0, mask=mx.array([True]))
    assert attention(k, keys, values, cache=cache, scale=1.0, mask=None).shape == (2, 1, 1, 4)


def test_a_handle_is_found_without_the_cache_as_layers_that_share_keys_need_it():
    attention = RaggedAttention()
    cache = RaggedKV([SeqKV(), SeqKV()], attention.handles)
    cache.begin(mx.array([0, 0]), mx.array([1, 1]))
    keys, values = cache.update_and_fetch(mx.ones((2, 1, 1, 4)), mx.ones((2, 1, 1, 4)))
    assert cache.keys_and_values()[0] is keys
    assert mx.allclose(attention(keys, keys, values, cache=None, scale=1.0, mask=None), mx.ones((2, 1, 1, 4))).item()


def test_caches_we_do_not_own_are_named():
    sequence_like([KVCache(), CacheList(ArraysCache(2), RotatingKVCache(max_size=4))])
    with pytest.raises(UnbatchableError, match="keep=4"):
        sequence_like([RotatingKVCache(max_size=8, keep=4)])


def test_recurrent_states_are_stacked_by_row_and_a_row_without_a_state_starts_from_zeros():
    parts = [ArraysCache(3) for _ in range(3)]
    parts[0][0], parts[2][0] = mx.full((1, 2), 1.0), mx.full((1, 2), 3.0)
    parts[1][1] = mx.full((1, 2, 2), 5.0)
    merged = stack_states(parts)
    assert merged[0].tolist() == [[1, 1], [0, 0], [3, 3]]
    assert merged[1][:, 0, 0].tolist() == [0, 5, 0]
    assert merged[2] is None
    assert merged.make_mask(1) is None


def test_sequences_of_many_lengths_hold_little_more_than_they_need():
    # Padding each to the longest would take 1.95 times as much.
    lengths = [100 + i * 557 for i in range(8)]
    held = needed = 0
    for length in lengths:
        kv = SeqKV()
        done = 0
        while done < length:
            count = min(64, length - done)
            kv.append(numbered(done, count), numbered(done, count))
            done += count
        held += kv.nbytes
        needed += 2 * length * 4 * 4
    assert held <= 1.1 * needed


def test_what_is_shared_does_not_change_when_either_side_goes_on():
    one, other = SeqKV(), SeqKV()
    one.append(numbered(0, 5), numbered(0, 5))
    other.load(one.shared(), 0, 5)
    one.append(numbered(5, 1), numbered(5, 1))
    other.append(numbered(70, 2), numbered(70, 2))
    assert positions(one.view(1)[0]) == [0, 1, 2, 3, 4, 5]
    assert positions(other.view(1)[0]) == [0, 1, 2, 3, 4, 70, 71]


def test_a_prompt_of_known_length_is_not_moved_while_it_is_read():
    kv = SeqKV()
    kv.expected = 1000
    kv.append(numbered(0, 64), numbered(0, 64))
    assert kv.keys is not None
    assert kv.keys.shape[2] == 1024
    for start in range(64, 1000, 64):
        count = min(64, 1000 - start)
        kv.append(numbered(start, count), numbered(start, count))
        assert kv.keys.shape[2] == 1024
    assert positions(kv.view(1)[0]) == list(range(1000))
    kv.append(numbered(1000, 30), numbered(1000, 30))
    assert kv.keys.shape[2] == 1280
