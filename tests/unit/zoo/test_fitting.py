"""What fits and how fast. Figures are checked against ones that others published."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer import runtime, zoo
from mlxinfer.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, OfflineError
from mlxinfer.zoo import fitting
from mlxinfer.zoo.entries import CacheShape
from mlxinfer.zoo.shapes import cache_bytes, largest_context, shape_from_config, shape_from_gguf
from tests.unit.zoo.models import safetensors, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.config import Settings

GIB = 2**30


def machine(gb: float, *, free: float | None = None) -> runtime.Memory:
    """A Mac whose GPU may use three quarters of its memory."""
    return runtime.Memory(int(gb * GIB), int((gb if free is None else free) * GIB), int(gb * GIB * 0.75))


def report(name: str, settings: Settings, gb: float = 64, **more: Any) -> zoo.FitReport:
    options: dict[str, Any] = {"memory": machine(gb), "bandwidth": (100.0, "Apple M4, published"), "on_cpu": False}
    return zoo.fit(name, settings, **options | more)


def entry_cache(alias: str) -> CacheShape:
    entry = zoo.find_entry(alias)
    assert entry is not None
    return entry.cache


@pytest.mark.parametrize(
    ("alias", "per_token"),
    [
        ("llama3.1-8b", 131_072),  # 128 KiB in half precision: 32 layers x 2 x 8 heads x 128
        ("llama3.3-70b", 327_680),  # 320 KiB
        ("qwen3-8b", 147_456),  # 144 KiB
        ("deepseek-v3", 70_272),  # 70 KB, DeepSeek-V3's own figure for its latent attention
    ],
)
def test_keys_and_values_per_token_are_the_published_figures(alias: str, per_token: int) -> None:
    assert cache_bytes(entry_cache(alias), 1000) == 1000 * per_token


def test_windowed_layers_stop_growing_at_their_window() -> None:
    shape = CacheShape(layers=6, kv_heads=1, head_dim=8, window_layers=5, window=100)
    per_layer = 2 * 8 * 2
    assert cache_bytes(shape, 50) == 6 * 50 * per_layer
    assert cache_bytes(shape, 1000) == (5 * 100 + 1000) * per_layer


def test_recurrent_layers_cost_the_same_at_any_length() -> None:
    shape = entry_cache("qwen3.5-4b")
    assert cache_bytes(shape, 2) - cache_bytes(shape, 1) == 8 * 2 * 4 * 256 * 2
    assert cache_bytes(CacheShape(state_bytes=77), 10**6) == 77


def test_the_largest_context_is_the_last_that_fits() -> None:
    shape = CacheShape(layers=2, kv_heads=1, head_dim=8, window_layers=1, window=10)
    for budget in (0, 31, 640, 5000, 10**9):
        longest = largest_context(shape, budget, 4096)
        assert longest == 0 or cache_bytes(shape, longest) <= budget
        assert longest == 4096 or cache_bytes(shape, longest + 1) > budget


GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
          "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}, CacheShape(4, 8, 64)),
        (GEMMA3, CacheShape(26, 1, 256, 22, 512)),
        ({"model_type": "gemma3", "text_config": GEMMA3}, CacheShape(26, 1, 256, 22, 512)),
        # A window that no layer list turns on is not used (Qwen 2, Mistral).
        (
            {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "sliding_window": 64},
            CacheShape(4, 8, 64),
        ),
        (
            {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
             "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
            CacheShape(4, 2, 64, 2, 128),
        ),
        (
            {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
             "hidden_size": 7168},
            CacheShape(61, 128, 56, latent=576),
        ),
        (
            {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
             "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
             "linear_key_head_dim": 128, "linear_value_head_dim": 128},
            CacheShape(12, 2, 256, state_bytes=36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)),
        ),
        (
            {"num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
             "global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 18,
             "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7},
            CacheShape(24, 2, 512, 20, 512, window_head_dim=256),
        ),
        ({}, CacheShape()),
        ({"num_hidden_layers": 4, "sliding_window": "wide", "kv_lora_rank": -1, "model_type": 7}, CacheShape(4)),
        (
            {
                "num_hidden_layers": 2, "hybrid_override_pattern": "*" * 9,
                "mamba_num_heads": 4, "mamba_head_dim": 4, "ssm_state_size": 4,
            },
            CacheShape(9),
        ),
        ({"num_hidden_layers": 3, "num_kv_shared_layers": 4, "layer_types": ["full_attention"] * 3}, CacheShape()),
        ({"num_hidden_layers": 2, "num_key_value_heads": [1, 4], "head_dim": 8}, CacheShape(2, 4, 8)),
    ],
)  # fmt: skip
def test_the_cache_is_read_off_a_config(config: dict[str, Any], shape: CacheShape) -> None:
    assert shape_from_config(config) == shape


@pytest.mark.parametrize("alias", ["qwen3-next-80b", "gemma4-e4b"])
def test_the_catalogue_agrees_with_the_models_own_config(alias: str) -> None:
    configs = {
        "qwen3-next-80b": {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
                           "head_dim": 256, "full_attention_interval": 4, "linear_num_value_heads": 32,
                           "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        "gemma4-e4b": {"num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
                       "global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 18,
                       "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7},
    }  # fmt: skip
    assert entry_cache(alias) == shape_from_config(configs[alias])


def test_the_cache_is_read_off_gguf_metadata() -> None:
    gemma = {"gemma3.block_count": 18, "gemma3.attention.head_count": 4, "gemma3.attention.head_count_kv": 1,
             "gemma3.attention.key_length": 256, "gemma3.attention.sliding_window": 512}  # fmt: skip
    assert shape_from_gguf("gemma3", gemma) == entry_cache("gemma3-270m")
    llama = {"llama.block_count": 30, "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3,
             "llama.embedding_length": 576}  # fmt: skip
    assert shape_from_gguf("llama", llama) == entry_cache("smollm2-135m")


@pytest.mark.parametrize(("gb", "verdict"), [(64, "yes"), (8, "tight"), (7, "no")])
def test_the_verdict_follows_the_memory(settings: Settings, gb: float, verdict: str) -> None:
    found = report("llama3.1-8b", settings, gb)
    assert found.verdict == verdict
    assert found.total_bytes == found.weight_bytes + found.cache_bytes + found.overhead_bytes
    assert (found.advice == ()) == (verdict == "yes")


def test_no_comes_with_the_context_and_the_models_that_would_fit(settings: Settings) -> None:
    found = report("llama3.1-8b", settings, 7)
    assert f"--ctx {found.max_context}" in found.advice[0]
    assert any("llama3.2-3b" in line for line in found.advice)
    assert report("llama3.1-8b", settings, 7, context=found.max_context).verdict == "tight"
    with_one_more = report("llama3.1-8b", settings, 7, context=found.max_context + 1)
    assert with_one_more.verdict == "no"
    assert with_one_more.tok_s == 0


def test_memory_that_other_programs_hold_makes_it_tight(settings: Settings) -> None:
    found = report("llama3.1-8b", settings, memory=machine(64, free=3))
    assert found.verdict == "tight"
    assert "close other programs" in found.advice[0]


def test_speed_is_bandwidth_over_the_bytes_read_per_token(settings: Settings) -> None:
    found = report("llama3.1-8b", settings)
    read = found.weight_bytes + found.cache_bytes
    assert found.tok_s == pytest.approx(100e9 * fitting.CHIP_EFFICIENCY / read, rel=0.01)
    faster = report("llama3.1-8b", settings, bandwidth=(400.0, "Apple M1 Max, published"))
    assert faster.tok_s == pytest.approx(4 * found.tok_s, rel=0.01)


def test_a_mixture_of_experts_reads_its_active_weights_only(settings: Settings) -> None:
    dense, sparse = report("qwen3-32b", settings), report("qwen3-30b-a3b", settings)
    assert sparse.tok_s > 5 * dense.tok_s
    assert sparse.weight_bytes > 0.9 * dense.weight_bytes


def test_an_embedding_model_keeps_no_cache_and_has_no_decode_speed(settings: Settings) -> None:
    found = report("bge-small-en", settings)
    assert (found.cache_bytes, found.tok_s, found.verdict) == (0, 0, "yes")


def test_a_cpu_with_the_kernels_keeps_weights_as_stored(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.kernels.expected", lambda _: True)
    found = report("smollm2-135m", settings, on_cpu=True)
    assert (found.weight_bytes, found.loaded_as) == (98_362_432, "as stored, computed in float32")


def test_a_cpu_without_them_unpacks_to_float32_while_memory_allows(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxinfer.kernels.expected", lambda _: False)
    roomy = report("smollm2-135m", settings, on_cpu=True)
    assert (roomy.weight_bytes, roomy.loaded_as) == (134_515_008 * 4, "float32")
    cramped = report("smollm2-135m", settings, 1.3, on_cpu=True)
    assert cramped.weight_bytes == 98_362_432
    assert "as stored" in cramped.loaded_as


@pytest.mark.parametrize("context", [0, -5, 10**9])
def test_a_context_the_model_does_not_have_is_refused(settings: Settings, context: int) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 131072"):
        report("llama3.1-8b", settings, context=context)


def test_a_report_is_json(settings: Settings) -> None:
    assert json.loads(json.dumps(report("qwen3-8b", settings).as_dict()))["verdict"] == "yes"


def test_a_local_model_is_measured_by_its_files(tmp_path: Path, settings: Settings) -> None:
    folder = write_model(tmp_path / "mine")
    found = report(str(folder), settings)
    assert found.weight_bytes == (folder / "model.safetensors").stat().st_size
    assert found.cache_bytes == 512 * 2 * 2 * 2 * 16 * 2


def test_a_model_whose_size_nobody_knows_is_an_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match="size is not known"):
        report("org/unknown", settings)
    with pytest.raises(ModelNotFoundError):
        report("unknown", settings)


@pytest.mark.parametrize(
    ("gb", "gb_s", "alias"),
    [(1, 100, "smollm2-135m"), (8, 100, "gemma4-e2b"), (16, 273, "qwen3-14b"), (32, 273, "qwen3.5-35b-a3b"),
     (128, 546, "gpt-oss-120b"), (64, 8, "gemma3-270m-it")],
)  # fmt: skip
def test_the_default_is_the_largest_model_that_fits_and_answers_at_reading_speed(
    settings: Settings, gb: float, gb_s: float, alias: str
) -> None:
    chosen = zoo.choose_default(settings, memory=machine(gb), bandwidth=(gb_s, "Apple, published"), on_cpu=False)
    assert chosen.alias == alias


def test_the_default_is_never_a_model_for_code_alone(settings: Settings) -> None:
    for gb in range(4, 400, 4):
        memory = machine(gb)
        chosen = zoo.choose_default(settings, memory=memory, bandwidth=(800.0, "Apple, published"), on_cpu=False)
        assert chosen.can("chat")
        assert not chosen.can("code")
        assert not chosen.superseded


@pytest.mark.parametrize(
    ("chip", "cores", "gb_s"),
    [("Apple M1", 8, 68), ("Apple M3 Max", 14, 300), ("Apple M3 Max", 16, 400), ("Apple M4 Max", 16, 546),
     ("Apple M2 Ultra", 24, 800), ("Apple M3 Max", None, 300)],
)  # fmt: skip
def test_a_chips_bandwidth_is_looked_up(chip: str, cores: int | None, gb_s: float) -> None:
    assert fitting.chip_bandwidth(chip, cores) == gb_s


def test_a_chip_that_is_not_in_the_table_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting.chip_bandwidth("Apple M99 Hyper", 64) is None
    monkeypatch.setattr(runtime, "chip_name", lambda: "Apple M99 Hyper")
    fitting.measured_bandwidth.cache_clear()
    try:
        gb_s, source = fitting.measured_bandwidth()
    finally:
        fitting.measured_bandwidth.cache_clear()
    assert source == "measured here"
    assert 0.1 < gb_s < 20_000


ABSURD = [10**30, -1, 2**31, 0.5, float("nan"), float("inf"), "12", True, {}, [{}], ["a"], [-1], [[1]]]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"])
def test_a_figure_that_cannot_be_right_is_named(tmp_path: Path, settings: Settings, key: str) -> None:
    for value in ABSURD:
        folder = str(write_model(tmp_path / "m", **{key: value}))
        with pytest.raises(ModelFileError, match=key):
            zoo.describe(folder, settings)
        with pytest.raises(ModelFileError, match=key):
            zoo.fit(folder, settings, bandwidth=(100.0, "given"), on_cpu=True)


@pytest.mark.parametrize(
    "kinds", [[{}], [1], ["full_attention", None], {"a": 1}, "full", 7, ["full_attention"] * 100_000]
)
def test_layer_types_that_are_no_list_of_words_are_named(kinds: object) -> None:
    with pytest.raises(ModelFileError, match="layer_types"):
        shape_from_config({"num_hidden_layers": 2, "layer_types": kinds})


@pytest.mark.timeout(60)
def test_no_field_of_a_config_leads_to_a_traceback(tmp_path: Path, settings: Settings) -> None:
    fields = [
        "model_type", "max_position_embeddings", "head_dim", "sliding_window", "sliding_window_pattern", "kv_lora_rank",
        "full_attention_interval", "hybrid_override_pattern", "num_kv_shared_layers", "layers_block_type", "n_layers",
        "global_head_dim", "linear_num_value_heads", "mamba_num_heads", "quantization", "quantization_config",
        "text_config", "vision_config", "torch_dtype", "dtype",
    ]  # fmt: skip
    for field in fields:
        for value in [*ABSURD, 0, None, [], "", {"bits": float("nan")}, {"bits": 10**30, "mode": {}}, {"bits": [4]}]:
            folder = str(write_model(tmp_path / "m", **{field: value}))
            with contextlib.suppress(ModelFileError):
                zoo.fit(folder, settings, bandwidth=(100.0, "given"), on_cpu=True)
            with contextlib.suppress(ModelFileError):
                card = zoo.describe(folder, settings)
                assert 0 <= card.context_length < 2**31
                assert len(card.architecture + card.quantization) < 200


@pytest.mark.parametrize("value", [["a"], [float("nan")], [2**63], "x", float("inf"), -4])
def test_odd_heads_in_gguf_metadata_are_named(value: object) -> None:
    with pytest.raises(ModelFileError, match="head_count_kv"):
        shape_from_gguf("llama", {"llama.block_count": 2, "llama.attention.head_count_kv": value})


def test_a_model_without_a_single_weight_can_be_asked_about(tmp_path: Path, settings: Settings) -> None:
    folder = write_model(tmp_path / "m", num_hidden_layers=0)
    (folder / "model.safetensors").write_bytes(safetensors())
    assert zoo.fit(str(folder), settings, bandwidth=(100.0, "given"), on_cpu=True).weight_bytes <= 10
