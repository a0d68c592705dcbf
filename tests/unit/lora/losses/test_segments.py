"""Packed segments, over the architectures of mlx-lm: what can be packed is exact, the rest is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.lora import segments
from mlxinfer.lora.attention import in_blocks
from mlxinfer.lora.losses import SupervisedLoss
from mlxinfer.lora.packable import refusal
from mlxinfer.lora.recompute import recomputed
from tests import tiny
from tests.conformance.configs import CONFIGS, NEEDS_METAL
from tests.conformance.examine import module_of, tiny_model
from tests.conformance.selection import cases
from tests.unit.lora.losses.batches import collate, example, gradient, off_by

if TYPE_CHECKING:
    import mlx.nn as nn

POSITIONS = "positions count"
STATE = "cache is a"
OWN_CACHE = "cache of its own"
REFUSED = {
    "afm7": OWN_CACHE,
    "baichuan_m1": STATE,
    "bailing_hybrid": STATE,
    "bailing_moe_linear": STATE,
    "bailing_moe_v3": STATE,
    "deepseek_v32": STATE,
    "deepseek_v41": STATE,
    "falcon_h1": STATE,
    "gear": STATE,
    "gemma3n": OWN_CACHE,
    "glm_moe_dsa": STATE,
    "gpt2": POSITIONS,
    "gpt_bigcode": POSITIONS,
    "granitemoehybrid": STATE,
    "hunyuan": POSITIONS,
    "hunyuan_v1_dense": POSITIONS,
    "iquestloopcoder": POSITIONS,
    "jamba": STATE,
    "kimi_k3": STATE,
    "kimi_linear": STATE,
    "lfm2": STATE,
    "lfm2-vl": STATE,
    "lfm2_moe": STATE,
    "llama4": STATE,
    "longcat_flash": STATE,
    "longcat_flash_ngram": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "minimax_m3_vl": STATE,
    "ministral3": POSITIONS,
    "mistral4": POSITIONS,
    "nemotron_h": STATE,
    "olmo_hybrid": STATE,
    "phi3small": POSITIONS,
    "plamo2": STATE,
    "prism_hadamard_qwen35": STATE,
    "qwen3_5": STATE,
    "qwen3_5_moe": STATE,
    "qwen3_next": STATE,
    "recurrent_gemma": STATE,
    "rwkv7": STATE,
}
every_case = pytest.mark.parametrize("case", cases())


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that short rows have blocks of one segment, blocks of several, and attention in blocks of queries.
    monkeypatch.setattr(segments, "BLOCK_TOKENS", 24)
    monkeypatch.setattr("mlxinfer.lora.attention.QUERY_BLOCK", 6)


def model_of(case: str) -> Any:
    if module_of(case) in NEEDS_METAL and not mx.metal.is_available():
        pytest.skip(NEEDS_METAL[module_of(case)])
    model = tiny_model(case)
    model.train()
    return model


def logits(model: Any, ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    with in_blocks(), segments.isolated(model, mx.array(numbers)):
        return np.array(model(mx.array(ids)).astype(mx.float32))


@every_case
def test_can_pack_answers_for_every_architecture(case: str) -> None:
    found = refusal(model_of(case), CONFIGS[case])
    assert REFUSED.get(module_of(case), "") in found
    assert bool(found) == (module_of(case) in REFUSED)


@every_case
def test_the_packed_loss_is_the_unpacked_one(case: str) -> None:
    model = model_of(case)
    if module_of(case) in REFUSED:
        pytest.skip("cannot be packed")
    rng = np.random.default_rng(1)
    rows = [[example(rng, n) for n in lengths] for lengths in ((11, 20, 14), (40, 5), (30,))]
    packed = SupervisedLoss()(model, collate(rows, 48))
    alone = [SupervisedLoss()(model, collate([[one]], len(one.token_ids))) for row in rows for one in row]
    total = sum(float(value.item()) for value, _ in alone)
    assert float(packed[0].item()) == pytest.approx(total, rel=1e-5)
    assert float(packed[1].item()) == sum(float(count.item()) for _, count in alone)


@every_case
def test_what_a_segment_holds_moves_no_other_by_a_single_bit(case: str) -> None:
    model = model_of(case)
    if module_of(case) in REFUSED:
        pytest.skip("cannot be packed")
    rng = np.random.default_rng(2)
    numbers = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [9, 25, 7, 4], axis=1).astype(np.int32)
    ids = rng.integers(1, 100, numbers.shape)
    before = logits(model, ids, numbers)
    for changed in (1, 2, 3):
        other = np.where(numbers == changed, rng.integers(1, 100, numbers.shape), ids)
        after = logits(model, other, numbers)
        if module_of(case) == "dbrx":
            # Each expert multiplies the rows that chose it, and how many they are may move a product's rounding.
            np.testing.assert_allclose(after[numbers != changed], before[numbers != changed], rtol=1e-4, atol=1e-5)
        else:
            assert np.array_equal(after[numbers != changed], before[numbers != changed], equal_nan=True)
        assert not np.array_equal(after[numbers == changed], before[numbers == changed])


def packed_batch(rng: np.random.Generator) -> Any:
    return collate([[example(rng, n) for n in (11, 20, 14)], [example(rng, n) for n in (8, 31)]], 48)


@pytest.mark.parametrize("case", ["llama", "llama/sliding", "gemma2", "gpt_oss", "deepseek_v3"])
def test_gradients_of_a_packed_batch_are_the_sum_over_its_segments(case: str) -> None:
    model = model_of(case)
    model.unfreeze()
    rng = np.random.default_rng(3)
    rows = [[example(rng, n) for n in (11, 20, 14)], [example(rng, n) for n in (8, 31)]]
    _, packed = gradient(model, SupervisedLoss(), collate(rows, 48))
    parts = [gradient(model, SupervisedLoss(), collate([[one]], 32))[1] for row in rows for one in row]
    total = {name: sum((part[name] for part in parts[1:]), start=parts[0][name]) for name in packed}
    # Rotary angles further down a row round differently; at equal offsets it is under 1e-6.
    assert off_by(packed, total) <= 5e-5


def test_recomputed_layers_keep_segments_apart_on_the_way_back() -> None:
    model = model_of("gpt_oss")
    batch = packed_batch(np.random.default_rng(4))
    _, expected = gradient(model, SupervisedLoss(), batch)
    with recomputed(model):
        _, found = gradient(model, SupervisedLoss(), batch)
    # Rounding: a layer that is computed again needn't be multiplied in the same pieces on every machine.
    assert off_by(found, expected) <= 2e-6


def test_a_window_shorter_than_a_segment_still_counts() -> None:
    model = tiny.build_model(
        tiny.config(sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    )
    model.train()
    numbers = np.repeat([[1, 2, 3]], [20, 30, 13], axis=1).astype(np.int32)
    ids = np.random.default_rng(5).integers(1, 100, numbers.shape)
    packed = logits(model, ids, numbers)[0]
    alone = [np.array(model(mx.array(part[None])))[0] for part in np.split(ids[0], [20, 50])]
    np.testing.assert_allclose(packed, np.concatenate(alone), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["causal", "bool", "additive"])
def test_a_mask_of_the_models_own_is_kept_and_isolated(kind: str) -> None:
    q, k, v = (mx.random.normal((1, 2, 30, 8), key=mx.random.key(i)) for i in range(3))
    numbers = np.repeat([1, 2, 3], [9, 4, 17])
    seen = mx.arange(30)[:, None] >= mx.arange(30)
    # Besides what is later, a key of each segment is hidden.
    hidden = seen & (mx.arange(30) != 3) & (mx.arange(30) != 20) if kind != "causal" else seen
    masks = {"causal": "causal", "bool": hidden, "additive": mx.where(hidden, 0.5, -1e30)}
    cache = segments.SegmentCache(segments.Layout(numbers), None)
    found = segments.attend(q, k, v, cache, scale=0.3, mask=masks[kind])
    same = mx.array(numbers[:, None] == numbers[None])
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=hidden & same)
    assert mx.allclose(found, expected, rtol=1e-5, atol=1e-5).item()


def test_positions_far_down_a_row_cost_rounding_only() -> None:
    model = tiny.build_model(tiny.config(max_position_embeddings=8192))
    layout = segments.Layout(np.ones(40, np.int32))
    ids = mx.random.randint(1, 100, (1, 40), key=mx.random.key(0))

    def at(offset: int) -> mx.array:
        with segments.isolated_by(model, [segments.segment_caches(model, layout, offset)]):
            held: Any = model
            return held(ids)

    start = at(0)
    assert (mx.abs(at(2000) - start).max() / mx.abs(start).max()).item() < 1e-4
    assert (mx.abs(at(8000) - start).max() / mx.abs(start).max()).item() < 1e-3


def test_a_position_scaled_late_is_refused_only_for_rows_that_reach_it() -> None:
    config = CONFIGS["ministral3"] | {
        "rope_parameters": {**CONFIGS["ministral3"]["rope_parameters"], "original_max_position_embeddings": 256}  # type: ignore[dict-item]
    }
    model = build("ministral3", config)
    assert refusal(model, config, width=200) == ""
    assert "down a row" in refusal(model, config, width=512)


@pytest.mark.parametrize(
    ("case", "packable"),
    [
        ("llama", True),
        ("gemma2", True),
        ("phi3", True),
        ("hunyuan_v1_dense", False),
        ("ministral3", False),
        ("gpt2", False),
    ],
)
def test_half_precision_gets_the_same_answer(case: str, packable: bool) -> None:
    model = build(case, CONFIGS[case])
    model.set_dtype(mx.bfloat16)
    assert (not refusal(model, CONFIGS[case])) is packable


def build(module: str, config: dict[str, object]) -> nn.Module:
    from tests.conformance import weights

    return weights.build(module, config)


def test_a_recurrent_model_is_refused_with_the_reason() -> None:
    model = model_of("mamba2")
    batch = packed_batch(np.random.default_rng(6))
    with pytest.raises(UnsupportedModelError, match="only attention over keys and values can be packed"):
        SupervisedLoss()(model, batch)
    assert refusal(model, CONFIGS["mamba2"])


def test_rows_of_one_segment_need_nothing_of_the_model() -> None:
    model = model_of("mamba2")
    rng = np.random.default_rng(7)
    total, count = SupervisedLoss()(model, collate([[example(rng, 9)], [example(rng, 12)]], 16))
    assert np.isfinite(total.item())
    assert count.item() == 6 + 9


@pytest.mark.parametrize(
    ("numbers", "packed"),
    [([1, 1, 0, 0], False), ([1, 1, 2, 0], True), ([0, 1, 1, 1], True), ([0, 0, 0, 0], False), ([1, 1, 1, 1], False)],
)
def test_a_row_is_packed_when_a_segment_has_something_before_it(numbers: list[int], packed: bool) -> None:
    assert segments.is_packed(mx.array([numbers])) is packed


def test_the_model_is_what_it_was_afterwards() -> None:
    model = model_of("llama")
    own = type(model)
    numbers = mx.array([[1] * 4 + [2] * 4])
    with pytest.raises(ZeroDivisionError), segments.isolated(model, numbers):
        raise ZeroDivisionError
    assert type(model) is own
    assert model.training


def test_can_pack_leaves_each_module_in_the_mode_it_had() -> None:
    model = model_of("llama")
    model.model.layers[0].eval()
    assert refusal(model, CONFIGS["llama"]) == ""
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training


def test_a_leak_too_small_to_change_a_logit_much_is_still_one() -> None:
    net = model_of("llama")
    own: Any = type(net)

    def leaky(self: Any, inputs: mx.array, **options: Any) -> mx.array:
        return own.__call__(self, inputs, **options) + 1e-7 * inputs.astype(mx.float32).sum()

    config = {"vocab_size": 100, "max_position_embeddings": 4096}
    assert refusal(net, config, 256) == ""
    net.__class__ = type("Leaky", (own,), {"__call__": leaky})
    assert refusal(net, config, 256) == "what a segment holds shows in the logits of another"
