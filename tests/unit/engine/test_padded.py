"""Padded views: real keys and array masks for models that use them outside of the attention function."""

import copy
import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlxinfer.engine.kv import SeqKV
from mlxinfer.engine.loading import drained
from mlxinfer.engine.padded import PaddedBatch, PaddedKV, PaddedView, left_padded, slot_mask
from mlxinfer.engine.padded_probe import probe_padded
from mlxinfer.engine.ragged import RaggedAttention, ragged_attention
from mlxinfer.engine.runner import RowSpec, Runner
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.steps import DecodeRow, PrefillChunk, Release, Start, Step
from mlxinfer.engine.tier import probe_tier
from mlxinfer.upstream import create_causal_mask
from tests.conformance.configs import CONFIGS
from tests.conformance.configs.base import VOCAB
from tests.conformance.examine import tiny_model
from tests.conformance.faults import neighbours_key, short_mask
from tests.conformance.weights import build


def keys_of(row: int, count: int, *, heads: int = 2, dim: int = 3) -> mx.array:
    """Keys [1, heads, count, dim] that carry their row and position: 100 * row + position + 1."""
    line = 100.0 * row + mx.arange(1, count + 1)
    return mx.broadcast_to(line.reshape(1, 1, count, 1), (1, heads, count, dim))


def cache_of(lengths: list[int], *, window: int | None = None, view: PaddedView | None = None) -> PaddedKV:
    rows = [SeqKV(window) for _ in lengths]
    for index, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        if n:
            row.append(keys_of(index, n), keys_of(index, n)[..., :1])
    cache = PaddedKV(rows, RaggedAttention(), view or PaddedView())
    cache.begin(mx.array(lengths), mx.array(lengths) + 1)
    return cache


def step(cache: PaddedKV, length: int = 1) -> tuple[mx.array, mx.array]:
    new = mx.concatenate([keys_of(i, row.end + length)[:, :, -length:] for i, row in enumerate(cache.rows)])
    return cache.update_and_fetch(new, new[..., :1])


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dim", [4, 0])
def test_rows_are_put_at_the_end_of_one_array(heads, dim):
    rows = [mx.random.normal((1, heads, n, dim)) for n in (5, 1, 3)]
    padded = left_padded(rows, 6, fill=7.0)
    assert padded.shape == (3, heads, 6, dim)
    for index, row in enumerate(rows):
        blank = 6 - row.shape[2]
        assert mx.all(padded[index, :, :blank] == 7.0).item()
        assert mx.array_equal(padded[index, :, blank:], row[0]).item()


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("window", [None, 5])
def test_the_mask_of_a_row_is_mlx_lms_own_after_its_padding(length, window):
    shown = [length, length + 2, length + 9]
    slots = max(shown) + 3
    mask = slot_mask(length, slots, shown, window)
    assert mask.shape == (3, length, slots)
    for row, n in enumerate(shown):
        assert not mx.any(mask[row, :, : slots - n]).item()
        own = create_causal_mask(length, n - length, window_size=window)
        assert mx.array_equal(mask[row, :, slots - n :], own).item()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("narrower", [None, 3])
def test_exactly_the_rows_own_keys_are_under_the_mask_step_after_step(window, narrower):
    cache = cache_of([9, 0, 4], window=window, view=PaddedView(fill=-5.0, extra=2))
    for _ in range(12):
        mask = cache.make_mask(1, window_size=narrower)
        keys, values = step(cache)
        assert keys.shape[2] == values.shape[2] == mask.shape[-1]
        for index, row in enumerate(cache.rows):
            limit = min(window or row.end, narrower or row.end)
            expected = [100 * index + p + 1 for p in range(max(0, row.end - limit), row.end)]
            seen = [k for k, m in zip(keys[index, 0, :, 0].tolist(), mask[index, 0, 0].tolist(), strict=True) if m]
            assert seen == expected


def test_several_tokens_per_row_see_what_comes_before_each():
    cache = cache_of([7, 2], window=4)
    mask = cache.make_mask(3, return_array=True)
    keys, _ = step(cache, 3)
    assert mask.shape == (2, 1, 3, keys.shape[2])
    for index, row in enumerate(cache.rows):
        for query in range(3):
            seen = [k for k, m in zip(keys[index, 0, :, 0].tolist(), mask[index, 0, query].tolist(), strict=True) if m]
            at = row.end - 3 + query
            assert seen == [100 * index + p + 1 for p in range(max(0, at - 3), at + 1)]


def test_the_rank_of_the_mask_follows_the_view():
    assert cache_of([3, 1]).make_mask(1).shape == (2, 1, 1, 4)
    assert cache_of([3, 1], view=PaddedView(mask_rank=5)).make_mask(1).shape == (2, 1, 1, 1, 4)


def test_keys_that_a_model_ties_to_its_graph_stay_the_rows_own():
    cache = cache_of([3, 1])
    assert cache.keys is None
    step(cache)
    cache.values = mx.zeros_like(cache.keys)
    cache.keys = mx.depends(cache.keys, (cache.values,))
    for index, row in enumerate(cache.rows):
        keys, values = row.view(1)
        assert mx.array_equal(keys, keys_of(index, row.end)).item()
        assert mx.array_equal(values, keys_of(index, row.end)[..., :1]).item()


def test_one_row_is_driven_like_mlx_lms_own_cache_without_padding():
    row = SeqKV()
    cache = PaddedKV([row], RaggedAttention(), PaddedView(extra=9))
    cache.begin(0, 4)
    assert cache.make_mask(4) == "causal"
    keys, _ = cache.update_and_fetch(keys_of(0, 4), keys_of(0, 4))
    assert keys.shape == (1, 2, 4, 3)


# -- the probe ---------------------------------------------------------------------------------------------------------


def in_dtype(model, dtype):
    model.update(tree_map(lambda w: w.astype(dtype) if w.dtype == mx.float32 else w, model.parameters()))
    return model


def test_a_model_that_needs_no_view_gets_none():
    tier = drained(probe_tier(tiny_model("llama"), ragged_attention(), VOCAB))
    assert (tier.name, tier.view) == ("ragged", None)


def test_latent_attention_is_batched_with_padded_views():
    tier = drained(probe_tier(tiny_model("deepseek_v3"), ragged_attention(), VOCAB))
    assert (tier.name, tier.view) == ("ragged", PaddedView())
    assert tier.reason == "padded view: the model asks for a mask as an array"


def test_a_model_that_masks_grouped_heads_gets_a_mask_of_rank_five():
    assert drained(probe_tier(tiny_model("gemma2"), ragged_attention(), VOCAB)).view == PaddedView(mask_rank=5)


def test_recurrent_states_and_padded_views_go_together():
    tier = drained(probe_tier(tiny_model("kimi_linear"), ragged_attention(), VOCAB))
    assert (tier.name, tier.view) == ("batched-state", PaddedView())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("fault", [short_mask, neighbours_key])
def test_a_view_that_shows_a_key_too_few_or_a_neighbours_is_refused_in_every_dtype(dtype, fault):
    config = copy.deepcopy(CONFIGS["deepseek_v3"]) | {"first_k_dense_replace": 99}
    model = in_dtype(build("deepseek_v3", config), dtype)
    assert drained(probe_padded(model, ragged_attention(), VOCAB)) == (PaddedView(), "")
    with fault():
        view, reason = drained(probe_padded(model, ragged_attention(), VOCAB))
    assert view is None
    assert "other logits than alone" in reason


class _Leak:
    """Attention that looks at padding a little, whatever the mask says."""

    def __init__(self, attend):
        self.attend = attend

    def __call__(self, queries, keys, values, **kwargs):
        out = self.attend(queries, keys, values, **kwargs)
        return out + 1e-6 * values.mean(axis=2, keepdims=True) if keys.shape[0] > 1 else out


def test_padding_that_shows_by_less_than_the_tolerance_is_refused(monkeypatch):
    model = tiny_model("deepseek_v3")
    attention = ragged_attention()
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "scaled_dot_product_attention", _Leak(attention))
    view, reason = drained(probe_padded(model, attention, VOCAB))
    assert view is None
    assert "padding shows in the logits" in reason


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_blocks_cut_over_slots_are_found_out_although_they_matter_beyond_two_thousand_keys_only(dtype):
    config = copy.deepcopy(CONFIGS["minimax_m3_vl"])
    text = config["text_config"]
    text |= {"index_block_size": 128, "index_topk_blocks": 16, "mlp_layer_types": ["dense"] * 3}  # pyright: ignore
    model = in_dtype(build("minimax_m3_vl", config), dtype)
    view, reason = drained(probe_padded(model, ragged_attention(), VOCAB))
    assert view is None
    assert "over thousands of keys" in reason


@pytest.mark.parametrize("case", ["afm7", "gpt_bigcode", "phi3small"])
def test_a_model_that_neither_way_serves_is_sequential_and_says_why_for_both(case):
    vocab = int(CONFIGS[case]["vocab_size"])  # pyright: ignore
    tier = drained(probe_tier(tiny_model(case), ragged_attention(), vocab))
    assert (tier.name, tier.view) == ("sequential", None)
    # gpt_bigcode's offset must be a number: the same complaint both times, said once.
    assert ("; padded view: " in tier.reason) == (case != "gpt_bigcode")


# -- the runner --------------------------------------------------------------------------------------------------------


def greedy(runner: Runner, prompts: list[list[int]], steps: int) -> list[list[int]]:
    names = [f"r{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        runner.admit(RowSpec(name, tuple(prompt), RowSampling(temperature=0.0), seed=0))
    chunks = tuple(PrefillChunk(n, 0, len(p) - 1) for n, p in zip(names, prompts, strict=True) if len(p) > 1)
    out: list[list[int]] = [[] for _ in prompts]
    for number in range(steps):
        first = number == 0
        started = tuple(Start(n) for n in names) if first else ()
        rows = tuple(DecodeRow(n, number) for n in names)
        tokens = runner.launch(Step(number, (), started, chunks if first else (), rows)).read().tokens
        for row, token in zip(out, tokens, strict=True):
            row.append(token)
    runner.launch(Step(steps, release=tuple(Release(n) for n in names)))
    return out


@pytest.mark.parametrize("case", ["deepseek_v32", "gemma2", "plamo2", "longcat_flash_ngram"])
def test_rows_of_a_padded_batch_get_the_tokens_they_get_alone_and_chunks_run_by_themselves(case):
    runner = Runner(tiny_model(case), VOCAB)
    assert runner.view is not None
    assert not runner.fused
    prompts = [list(range(3, 3 + n)) for n in (21, 1, 2, 9)]
    together = greedy(runner, prompts, 6)
    assert together == [greedy(runner, [prompt], 6)[0] for prompt in prompts]


@pytest.mark.parametrize("case", ["deepseek_v3", "kimi_linear"])
def test_rows_of_very_different_lengths_go_in_several_forwards_with_the_same_tokens(case):
    runner = Runner(tiny_model(case), VOCAB)
    prompts = [list(range(3, 3 + n)) for n in (5, 90, 3, 80)]
    together = greedy(runner, prompts, 4)
    runner.forward_tokens = 200
    batch = runner._new_batch([runner.new_sequence() for _ in range(3)])
    assert isinstance(batch, PaddedBatch)
    sizes = []
    forward = runner._forward

    def spy(batch, tokens):
        sizes.append(len(batch.sequences) if isinstance(batch, PaddedBatch) else "split")
        return forward(batch, tokens)

    runner._forward = spy
    assert greedy(runner, prompts, 4) == together
    assert sizes[-4:] == ["split", 1, 1, 2]


def test_nothing_of_a_step_is_held_after_it_and_rows_hold_no_padding():
    runner = Runner(tiny_model("deepseek_v3"), VOCAB)
    prompts = [list(range(3, 3 + n)) for n in (150, 4)]
    greedy_rows = [f"r{i}" for i in range(2)]
    for name, prompt in zip(greedy_rows, prompts, strict=True):
        runner.admit(RowSpec(name, tuple(prompt), RowSampling(temperature=0.0), seed=0))
    chunks = tuple(PrefillChunk(n, 0, len(p) - 1) for n, p in zip(greedy_rows, prompts, strict=True))
    starts = tuple(Start(n) for n in greedy_rows)
    runner.launch(Step(0, (), starts, chunks, tuple(DecodeRow(n, 0) for n in greedy_rows))).read()
    assert runner._decoding is not None
    batch = runner._decoding.batch
    assert batch is not None
    assert all(kv._latest is None for kv in batch._kv)
    assert [leaf.end for leaf in runner._rows["r1"].held.plain()] == [4] * len(batch._kv)
