"""Packed keys and values: what a leaf holds, attention over it, and a whole engine that works with it."""

import queue

import mlx.core as mx
import pytest

import mlxinfer
from mlxinfer.engine.attend import attend
from mlxinfer.engine.engine import Engine, Event, Request
from mlxinfer.engine.kv import SLACK, STEP, SeqKV, Sequence, kv_cost
from mlxinfer.engine.prefix_store import PrefixStore
from mlxinfer.engine.quantized import Packing, QuantizedKV, rotated
from mlxinfer.engine.ragged import Handles, RaggedAttention, RaggedKV
from mlxinfer.engine.runner import RowSpec, Runner
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import InvalidRequestError
from mlxinfer.upstream import ArraysCache
from tests import tiny
from tests.conformance.examine import tiny_model
from tests.unit.engine.planted import FailsAt

WIDE = tiny.config(head_dim=32)


def draw(seed: int, count: int, dim: int = 64, heads: int = 2, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Keys or values [1, heads, count, dim] with two channels far above the rest, as real keys have."""
    array = mx.random.normal((1, heads, count, dim), key=mx.random.key(seed))
    array[..., 3] = array[..., 3] * 10 + 8
    array[..., 17] *= 6
    return array.astype(dtype)


def filled(leaf: SeqKV, keys: mx.array, values: mx.array, cuts: list[int]) -> SeqKV:
    """The leaf with all tokens appended, `cuts` of them at a time."""
    start = 0
    for count in cuts:
        leaf.append(keys[..., start : start + count, :], values[..., start : start + count, :])
        start += count
    assert start == keys.shape[2]
    return leaf


def same_bits(one: SeqKV, other: SeqKV) -> bool:
    """The tokens that both hold are packed alike."""
    assert one.end == other.end
    count = min(leaf.end - leaf.start for leaf in (one, other))
    parts = [
        [b[..., leaf.end - leaf.start - count : leaf.end - leaf.start, :] for b in leaf.buffers()]
        for leaf in (one, other)
    ]
    return len(parts[0]) == 6 and all(mx.array_equal(a, b).item() for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_is_packed_alike_alone_in_a_chunk_and_whatever_came_before(bits, window, dtype):
    count = STEP + 60
    keys, values = draw(0, count, dtype=dtype), draw(1, count, 32, dtype=dtype)
    whole = filled(QuantizedKV(bits, 32, window), keys, values, [count])
    for cuts in ([1] * count, [7, 100, 1, 1, count - 109], [STEP, 60]):
        assert same_bits(filled(QuantizedKV(bits, 32, window), keys, values, cuts), whole)


@pytest.mark.parametrize(("bits", "group", "dim"), [(8, 64, 128), (4, 64, 64), (8, 32, 96), (4, 32, 32)])
def test_what_is_seen_is_what_was_appended_to_half_a_step_of_its_group(bits, group, dim):
    keys, values = draw(0, 40, dim), draw(1, 40, dim)
    leaf = filled(QuantizedKV(bits, group), keys, values, [40])
    seen_keys, seen_values = leaf.view(1)
    for given, seen in ((values, seen_values), (rotated(keys), rotated(seen_keys))):
        groups, off = (x.reshape(-1, dim // group, group) for x in (given, mx.abs(given - seen)))
        step = (mx.max(groups, axis=-1) - mx.min(groups, axis=-1)) / (2**bits - 1)
        # The offset is moved so that zero is exact, which costs up to half a step more at the far end.
        assert mx.all(mx.max(off, axis=-1) <= 1.1 * step).item()
        assert mx.mean(off).item() <= 0.3 * mx.mean(step).item()


def test_a_few_large_channels_do_not_spoil_the_scores_of_4_bit_keys():
    keys, values = draw(0, 200), draw(1, 200)
    queries = mx.random.normal((1, 2, 16, 64), key=mx.random.key(5))
    seen, _ = filled(QuantizedKV(4, 64), keys, values, [200]).view(1)
    unrotated = mx.dequantize(*mx.quantize(keys, group_size=64, bits=4), group_size=64, bits=4)
    off, off_unrotated = (mx.mean(mx.abs(queries @ (k - keys).swapaxes(-1, -2))).item() for k in (seen, unrotated))
    assert off < 0.6 * off_unrotated


@pytest.mark.parametrize("dim", [32, 64, 96, 160, 576])
def test_the_rotation_undoes_itself_and_keeps_scores(dim):
    a, b = draw(0, 5, dim), draw(1, 5, dim)
    assert mx.allclose(rotated(rotated(a)), a, atol=1e-4).item()
    assert not mx.allclose(rotated(a), a, atol=1e-1).item()
    assert mx.allclose(rotated(a) @ rotated(b).swapaxes(-1, -2), a @ b.swapaxes(-1, -2), rtol=1e-4, atol=1e-3).item()


def dense(query: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
    """Attention of one token over all the keys it is given, in float32."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (mx.repeat(x.astype(mx.float32), repeats, axis=1) for x in (keys, values))
    scores = (query.astype(mx.float32) * scale) @ keys.swapaxes(-1, -2)
    if sinks is None:
        return mx.softmax(scores, axis=-1) @ values
    weights = mx.exp(scores) / (mx.sum(mx.exp(scores), axis=-1, keepdims=True) + mx.exp(sinks).reshape(1, -1, 1, 1))
    return weights @ values


@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 2.0, 0.1, 1.0, -0.3]])
@pytest.mark.parametrize(("own", "asked"), [(None, None), (None, 7), (9, None), (9, 4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 6), (6, 1)])
def test_a_single_tokens_attention_is_that_over_the_unpacked_keys(heads, kv_heads, own, asked, sinks):
    sink = None if sinks is None else mx.array(sinks)
    for count in (1, 5, 30, 4 * STEP):
        given = draw(0, count, 64, kv_heads), draw(1, count, 32, kv_heads)
        leaf = filled(QuantizedKV(8, 32, own), *given, [n for n in (count // 2, count - count // 2) if n])
        everything = filled(QuantizedKV(8, 32), *given, [count])
        query = mx.random.normal((1, heads, 1, 64), key=mx.random.key(9))
        seen = min(count, own or count, asked or count)
        keys, values = (x[..., -seen:, :] for x in everything.view(1))
        out = leaf.attend(query, scale=0.05, window=asked, sinks=sink)
        assert out.shape == (1, heads, 1, 32)
        assert mx.allclose(out, dense(query, keys, values, 0.05, sink), atol=1e-4).item()


def test_scores_in_half_precision_are_as_exact_as_in_float32():
    leaf = filled(QuantizedKV(8, 64), draw(0, 300, dtype=mx.bfloat16), draw(1, 300, dtype=mx.bfloat16), [300])
    query = mx.random.normal((1, 4, 1, 64), key=mx.random.key(9)).astype(mx.bfloat16)
    out = leaf.attend(query, scale=0.5)
    assert out.dtype == mx.bfloat16
    codes, scales, offsets = leaf.packed(1)[0]
    keys = rotated(mx.dequantize(codes, scales.astype(mx.float32), offsets.astype(mx.float32), group_size=64, bits=8))
    wanted = dense(query, keys, leaf.view(1)[1], 0.5, None)
    assert mx.max(mx.abs(out - wanted)).item() < 0.01 * mx.max(mx.abs(wanted)).item()


def test_rows_of_a_batch_and_a_chunk_beside_them_each_see_their_own_packed_keys():
    counts, lengths = [12, 40, 9], [1, 5, 1]
    rows, expected = [], []
    queries = mx.random.normal((sum(lengths), 4, 1, 64), key=mx.random.key(3))
    at = 0
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        leaf = filled(QuantizedKV(8, 64), draw(i, count), draw(10 + i, count), [count])
        rows.append(leaf)
        keys, values = leaf.view(length)
        for j in range(length):
            upto = count - length + 1 + j
            expected.append(dense(queries[at : at + 1], keys[..., :upto, :], values[..., :upto, :], 0.1, None))
            at += 1
    out = attend(queries, rows, scale=0.1, lengths=lengths)
    assert mx.allclose(out, mx.concatenate(expected), atol=1e-4).item()
    sinks = mx.array([0.5, -1.0, 2.0, 0.1])
    keys, values = (x[..., -4:, :] for x in rows[0].view(1))
    limited = attend(queries, rows, scale=0.1, lengths=lengths, window=4, sinks=sinks)
    assert mx.allclose(limited[:1], dense(queries[:1], keys, values, 0.1, sinks), atol=1e-4).item()


def test_a_single_token_goes_by_handle_and_a_chunk_gets_unpacked_keys_and_a_real_mask(without_kernels):
    attention = RaggedAttention()
    leaf = QuantizedKV(8, 64)
    cache = RaggedKV([leaf], attention.handles)
    keys, values = draw(0, 6), draw(1, 6)
    cache.begin(0, 5)
    assert cache.make_mask(5) == "causal"
    seen, _ = cache.update_and_fetch(keys[..., :5, :], values[..., :5, :])
    assert mx.array_equal(seen, leaf.view(5)[0]).item()
    cache.begin(5, 6)
    assert cache.make_mask(1) is None
    handle, handle_values = cache.update_and_fetch(keys[..., 5:, :], values[..., 5:, :])
    assert handle.shape[2] == 1
    query = mx.random.normal((1, 4, 1, 64), key=mx.random.key(2))
    out = attention(query, handle, handle_values, cache=cache, scale=0.1, mask=None)
    assert mx.array_equal(out, leaf.attend(query, scale=0.1)).item()
    assert attention.handles.unused() == 0
    plain = RaggedKV([SeqKV()], Handles())
    plain.begin(0, 1)
    assert plain.single


def test_tokens_taken_back_are_gone_and_others_take_their_place():
    keys, values = draw(0, 40), draw(1, 40)
    for window in (None, 8):
        leaf = filled(QuantizedKV(4, 64, window), keys, values, [1] * 40)
        leaf.trim(SLACK)
        leaf.append(keys[..., 40 - SLACK :, :], values[..., 40 - SLACK :, :])
        assert same_bits(leaf, filled(QuantizedKV(4, 64, window), keys, values, [40]))


def test_a_leaf_that_goes_on_from_anothers_buffers_leaves_that_one_unharmed():
    keys, values = draw(0, 40), draw(1, 40)
    owner, other = (QuantizedKV(8, 64) for _ in range(2))
    filled(owner, keys[..., :30, :], values[..., :30, :], [30])
    other.load(owner.buffers(), 0, 30)
    more_keys, more_values = draw(2, 10), draw(3, 10)
    filled(other, more_keys, more_values, [10])
    filled(owner, keys[..., 30:, :], values[..., 30:, :], [10])
    assert same_bits(owner, filled(QuantizedKV(8, 64), keys, values, [40]))
    branch = [mx.concatenate([a[..., :30, :], b], axis=2) for a, b in ((keys, more_keys), (values, more_values))]
    assert same_bits(other, filled(QuantizedKV(8, 64), *branch, [40]))


def sequence_of(*leaves: object) -> Sequence:
    return Sequence(list(leaves))


def test_layers_whose_heads_do_not_fit_stay_plain_and_are_counted():
    leaves = [
        filled(SeqKV(window), draw(0, 3, k), draw(1, 3, v), [3])
        for k, v, window in ((64, 128, None), (24, 64, None), (96, 32, 7))
    ]
    like = sequence_of(leaves[0], (leaves[1], ArraysCache(2)), leaves[2])
    assert str(Packing.of(like, 8)) == "8-bit, group 32 and 64, in 2 of 3 layers"
    assert str(Packing.of(sequence_of(leaves[0]), 4)) == "4-bit, group 64"
    packing = Packing.of(like, 4)
    assert str(packing) == "4 and 8-bit, group 32 and 64, in 2 of 3 layers"
    first, (second, state), third = packing.empty(like).layers
    assert (type(first), type(second), type(third)) == (QuantizedKV, SeqKV, QuantizedKV)
    assert isinstance(state, ArraysCache)
    assert (first.bits, first.group, first.window) == (4, 64, None)
    assert (third.bits, third.group, third.window) == (8, 32, 7), "a window keeps 8 bits"
    assert first.end == 0
    assert first.keys is None


def test_a_model_that_cannot_have_packed_keys_is_refused_with_the_reason():
    with pytest.raises(InvalidRequestError, match="16 wide and only multiples of 32") as error:
        Runner(tiny.build_model(tiny.config()), 320, kv_bits=8)
    assert error.value.param == "kv_bits"
    empty = filled(SeqKV(), draw(0, 3), draw(1, 3)[..., :0], [3])
    with pytest.raises(InvalidRequestError):
        Packing.of(sequence_of(empty), 8)
    with pytest.raises(InvalidRequestError, match=r"row by row.*sequential: .*leave kv_bits out"):
        Runner(tiny_model("gpt_bigcode"), 160, kv_bits=8)


def test_a_model_without_keys_has_nothing_to_pack():
    packing = Packing.of(sequence_of(ArraysCache(2)), 4)
    assert str(packing) == "none"
    assert isinstance(packing.empty(sequence_of(ArraysCache(2))).layers[0], ArraysCache)


@pytest.mark.parametrize(("bits", "size"), [(8, 40), (4, 24)])
def test_bytes_are_predicted_by_what_packed_tokens_take(bits, size):
    runner = Runner(tiny.build_model(WIDE), 320, kv_bits=bits)
    # 3 layers, 2 heads, keys and values of `size` bytes each: the codes of 32 numbers and two float32 beside them.
    assert runner.kv_cost.per_token == 3 * 2 * 2 * size
    sequence = runner.new_sequence()
    mx.eval(runner.forward([sequence], [list(range(3, 3 + STEP + 9))]))
    assert sequence.nbytes == runner.kv_cost.bytes(STEP + 9) == 2 * STEP * runner.kv_cost.per_token
    assert kv_cost(sequence) == runner.kv_cost


def run(runner: Runner, sequence: Sequence, tokens: list[int], chunk: int) -> mx.array:
    """Logits after the last token, which goes by itself."""
    body = tokens[:-1]
    for start in range(0, len(body), chunk):
        mx.eval(runner.forward([sequence], [body[start : start + chunk]]))
    return runner.forward([sequence], [tokens[-1:]])[0, -1]


def test_a_shared_prefix_is_taken_over_bit_by_bit_and_both_go_on():
    runner = Runner(tiny.build_model(WIDE), 320, kv_bits=8)
    tokens = [(7 * i) % 300 + 3 for i in range(60)]
    source, other = runner.new_sequence(), runner.new_sequence()
    run(runner, source, tokens[:50], 16)
    before = [[mx.array(b[..., :40, :]) for b in leaf.buffers()] for leaf in source.plain()]
    other.share(source, 40)
    ours = run(runner, other, tokens[40:], 16)
    theirs = run(runner, source, tokens[50:], 16)
    assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * mx.max(mx.abs(ours)).item()).item()
    for held in (source, other):
        for leaf, buffers in zip(held.plain(), before, strict=True):
            assert all(
                mx.array_equal(b[..., :40, :], old).item() for b, old in zip(leaf.buffers(), buffers, strict=True)
            )


def test_what_the_prefix_cache_gives_back_is_what_was_computed_bit_by_bit():
    runner = Runner(tiny.build_model(WIDE), 320, kv_bits=8)
    store = PrefixStore(needs_state=False, max_bytes=1 << 30)
    tokens = [(11 * i) % 300 + 3 for i in range(90)]
    fork = [*tokens[:40], *[9] * 20]
    first, second = runner.new_sequence(), runner.new_sequence()
    run(runner, first, tokens, 32)
    run(runner, second, fork, 32)
    wanted = [[mx.array(b[..., :90, :]) for b in leaf.buffers()] for leaf in first.plain()]
    store.save(first, "", tokens)
    store.save(second, "", fork)
    # The fork cut the first span in two, so two spans are joined.
    assert store.claim("r", "", tokens, 90) == 90
    again = runner.new_sequence()
    store.restore(again, "r")
    for leaf, buffers in zip(again.plain(), wanted, strict=True):
        assert isinstance(leaf, QuantizedKV)
        assert all(mx.array_equal(b[..., :90, :], old).item() for b, old in zip(leaf.buffers(), buffers, strict=True))
    cold = run(runner, runner.new_sequence(), [*tokens, 5, 6], 32)
    warm = run(runner, again, [5, 6], 32)
    assert mx.allclose(cold, warm, rtol=1e-3, atol=1e-3 * mx.max(mx.abs(cold)).item()).item()


@pytest.fixture
def engine():
    thread = mlx_thread()

    def make() -> Engine:
        runner = Runner(tiny.build_model(WIDE), 320, kv_bits=8)
        engine = Engine(thread, runner, max_num_seqs=4, max_queue=8, prefill_chunk=8)
        thread.attach(engine)
        return engine

    engine = thread.call(make)
    yield engine
    thread.call(engine.close)


def submit(engine: Engine, name: str, prompt: list[int], max_tokens: int = 12) -> "queue.SimpleQueue[Event]":
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    spec = RowSpec(name, tuple(prompt), RowSampling(temperature=0.0), seed=1)
    engine.submit(Request(spec, max_tokens, frozenset()), events.put)
    return events


def tokens_of(events: "queue.SimpleQueue[Event]") -> list[int]:
    got: list[int] = []
    while True:
        event = events.get(timeout=20)
        assert event.error is None
        got += [] if event.token is None else [event.token]
        if event.finished is not None:
            return got


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    def loop() -> list[int]:
        sequence = engine.runner.new_sequence()
        out: list[int] = []
        logits = run(engine.runner, sequence, prompt, 512)
        for _ in range(count):
            out.append(int(mx.argmax(logits).item()))
            logits = engine.runner.forward([sequence], [[out[-1]]])[0, -1]
        return out

    return engine.thread.call(loop)


def test_tokens_are_the_same_alone_beside_others_and_from_the_prefix_cache(engine):
    prompts = [[i + 3 for i in range(n)] for n in (1, 2, 9, 30, 17, 64)]
    expected = [greedy(engine, prompt, 12) for prompt in prompts]
    for turn in range(2):
        streams = [submit(engine, f"{turn}-{i}", prompt) for i, prompt in enumerate(prompts)]
        assert [tokens_of(events) for events in streams] == expected
    assert engine.cached_tokens > 0
    assert engine.thread.call(engine.runner.kv_bytes) == 0


def test_a_loaded_model_says_how_its_keys_are_packed(tmp_path):
    folder = tiny.write_folder(tmp_path / "m", head_dim=32)
    with mlxinfer.load(str(folder), kv_bits=4) as llm:
        assert llm.info.kv_quantization == "4-bit, group 32"
        assert llm._engine.runner.kv_cost.per_token == 3 * 2 * 2 * 24
    with mlxinfer.load(str(folder)) as llm:
        assert llm.info.kv_quantization == "none"


def test_rows_are_rebuilt_after_a_failed_step(engine, caplog):
    expected = [greedy(engine, [5, 6, 7 + i], 30) for i in range(3)]
    engine.runner.model = FailsAt(9, engine.runner.model)
    streams = [submit(engine, f"r{i}", [5, 6, 7 + i], 30) for i in range(3)]
    assert [tokens_of(events) for events in streams] == expected
    assert engine.stats()["failed_steps"] == 1
