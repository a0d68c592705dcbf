"""From a source to a folder: the right bytes, with little memory, and nothing half-made."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import quantize_model

from mlxinfer import upstream
from mlxinfer.convert import making, report
from mlxinfer.convert.job import CancelledError, ConvertOptions, convert, plan
from mlxinfer.convert.sources import open_source
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ConversionError, InvalidRequestError, ModelFileError
from mlxinfer.formats.safetensors import check_safetensors, shard_files
from tests import tiny
from tests.conformance.configs import CONFIGS
from tests.unit.convert.fake import (
    FakeSource,
    fake_source,
    folder_bytes,
    llama_config,
    moe_config,
    parameters,
    random_weights,
    stored,
)

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.types import ProgressEvent

Q4 = Packing(4, 64)
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_the_folder_is_what_mlx_lm_loads_with_everything_beside_it(out: Path) -> None:
    source = fake_source()
    source.extras = {"tokenizer.json": b"{}", "generation_config.json": b'{"temperature": 0.5}'}
    outcome = convert(source, out, ConvertOptions(packing=Q4))
    names = {"config.json", "conversion.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == names | {"model.safetensors.index.json"}
    assert (out / "generation_config.json").read_bytes() == b'{"temperature": 0.5}'
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    loaded, config = upstream.load_folder(out, shard_files(out))
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert loaded(mx.array([[1, 2, 3]])).shape == (1, 3, 96)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored(out).keys()
    assert index["metadata"]["total_size"] == outcome.total_bytes == sum(a.nbytes for a in stored(out).values())


def test_several_shards_hold_together_what_one_holds(tmp_path: Path) -> None:
    convert(fake_source(), tmp_path / "one", ConvertOptions(packing=Q4))
    convert(fake_source(), tmp_path / "many", ConvertOptions(packing=Q4, max_shard_bytes=8_000))
    assert len(shard_files(tmp_path / "many")) > 3
    for shard in shard_files(tmp_path / "many"):
        check_safetensors(shard)
    one, many = stored(tmp_path / "one"), stored(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(mx.array_equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_codes_of_the_source_are_kept_bit_for_bit(mode: Any, dtype: str, out: Path) -> None:
    packing = {"affine": Q4, "mxfp4": Packing(4, 32, "mxfp4"), "mxfp8": Packing(8, 32, "mxfp8")}.get(
        mode, Packing(4, 16, "nvfp4")
    )
    source = fake_source(packed={HEAD: packing})
    outcome = convert(source, out, ConvertOptions(dtype=dtype))
    kept = source.read_packed(HEAD)
    arrays = stored(out)
    assert np.array_equal(np.array(arrays[HEAD]), kept.weight)
    scales = mx.array(kept.scales)
    wanted = scales if mode != "affine" else scales.astype(getattr(mx, dtype))
    assert mx.array_equal(arrays["lm_head.scales"], wanted)
    decision = next(d for d in outcome.decisions if d.name == HEAD)
    rounded = mode == "affine" and dtype != "float32"
    assert decision.handling == ("near" if rounded else "exact")
    assert decision.note == (f"scales rounded to {dtype}" if rounded else "")


def test_scales_that_the_dtype_holds_are_exact(out: Path) -> None:
    source = fake_source(packed={HEAD: Packing(8, 32, "affine")})
    # Each group spans 0 to 255: a scale of 1.
    source.arrays[HEAD] = mx.tile(mx.array([0.0, 255.0]), (96, 32)).astype(mx.bfloat16)
    outcome = convert(source, out, ConvertOptions(dtype="float16"))
    assert next(d for d in outcome.decisions if d.name == HEAD).handling == "exact"


def test_biases_that_the_dtype_rounds_are_said_where_the_scales_are_exact(out: Path) -> None:
    source = fake_source(packed={HEAD: Packing(8, 32, "affine")})
    # Each group spans 2050 to 2305: a scale of -1 and a bias of 2305, which float16 doesn't hold.
    source.arrays[HEAD] = mx.tile(mx.array([2050.0, 2305.0]), (96, 32))
    assert mx.array_equal(mx.abs(mx.array(source.read_packed(HEAD).scales)), mx.ones((96, 2)))
    outcome = convert(source, out, ConvertOptions(dtype="float16"))
    decision = next(d for d in outcome.decisions if d.name == HEAD)
    assert (decision.handling, decision.note) == ("near", "scales rounded to float16")


def test_floats_are_cast_and_rounding_is_said(out: Path) -> None:
    source = FakeSource(llama_config(), random_weights(llama_config(), mx.float32))
    source.arrays["model.norm.weight"] = mx.ones((64,))
    outcome = convert(source, out, ConvertOptions(dtype="bfloat16"))
    arrays = stored(out)
    assert all(mx.array_equal(arrays[n], a.astype(mx.bfloat16)) for n, a in source.arrays.items())
    handled = {d.name: (d.handling, d.note) for d in outcome.decisions}
    assert handled["model.norm.weight"] == ("exact", "")
    assert handled[HEAD] == ("near", "values rounded to bfloat16")


def test_a_value_beyond_float16_is_an_error_that_names_the_tensor(out: Path) -> None:
    source = fake_source()
    source.arrays[HEAD] = source.arrays[HEAD] * 1e6
    with pytest.raises(ConversionError, match=r"lm_head\.weight has values up to .*beyond the range of float16"):
        convert(source, out, ConvertOptions(dtype="float16"))
    assert not out.exists()


def test_an_infinity_of_the_source_is_its_own_business(out: Path) -> None:
    source = fake_source()
    source.arrays[HEAD] = mx.full((96, 64), float("inf"), mx.bfloat16)
    convert(source, out, ConvertOptions(dtype="float16"))
    assert mx.all(mx.isinf(stored(out)[HEAD]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_infinity_is_not_packed_in_silence(value: float, dtype: mx.Dtype, out: Path) -> None:
    source = FakeSource(llama_config(), random_weights(llama_config(), dtype))
    source.arrays[HEAD][0, 0] = 65504 if dtype == mx.float16 else 3e38
    source.arrays[HEAD][5, 7] = value
    with pytest.raises(ConversionError, match=r"lm_head\.weight holds infinities or NaN"):
        convert(source, out, ConvertOptions(packing=Q4))
    assert not out.exists()
    source.arrays[HEAD][5, 7] = 1
    convert(source, out, ConvertOptions(packing=Q4))


def test_rows_in_chunks_give_the_bytes_of_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(fake_source(moe_config()), tmp_path / "whole", ConvertOptions(packing=Q4, dtype="float16"))
    monkeypatch.setattr(making, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(making, "SMALL_PART", 1)
    convert(fake_source(moe_config()), tmp_path / "chunks", ConvertOptions(packing=Q4, dtype="float16"))
    assert folder_bytes(tmp_path / "whole") == folder_bytes(tmp_path / "chunks")


def test_experts_in_one_tensor_are_read_one_by_one(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = moe_config()
    names = parameters(upstream.empty_model(config))
    weights = {name: mx.random.normal(a.shape).astype(mx.bfloat16) for name, a in names.items()}
    monkeypatch.setattr(making, "SMALL_PART", 64 * 64)
    source = FakeSource(config, weights)
    convert(source, out, ConvertOptions(packing=Q4))
    name = "model.layers.0.mlp.switch_mlp.up_proj.weight"
    assert [part for n, part in source.reads if n == name] == [0, 1, 2, 3]
    assert mx.array_equal(stored(out)[name], mx.quantize(weights[name], 64, 4)[0])


def deepseek() -> tuple[dict[str, Any], dict[str, mx.array]]:
    """As published: kv_b_proj, which the model's code takes apart and transposes, and experts one by one."""
    config = {**CONFIGS["deepseek_v3"], "model_type": "deepseek_v3"}
    config |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32}
    model = upstream.empty_model(config)
    weights: dict[str, mx.array] = {}
    for name, a in parameters(model).items():
        values = mx.random.normal(a.shape).astype(mx.bfloat16)
        if ".switch_mlp." in name:
            weights |= {name.replace("switch_mlp", f"experts.{e}"): values[e] for e in range(len(values))}
        elif ".embed_q." in name:
            heads = len(values)
            own = mx.random.normal((heads * 64, 32)).astype(mx.bfloat16)
            weights[name.replace("embed_q", "kv_b_proj")] = own
        elif ".unembed_out." not in name:
            weights[name] = values
    mx.eval(weights)
    return config, weights


def test_what_the_models_code_computes_is_quantized_as_mlx_lm_does(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = deepseek()
    expected = upstream.empty_model(config)
    expected.load_weights(list(upstream.sanitized(expected, weights).items()), strict=True)
    expected = quantize_model(expected, config, 32, 4)[0]
    monkeypatch.setattr(making, "BATCH_BYTES", 1)
    source = FakeSource(config, weights)
    outcome = convert(source, out, ConvertOptions(packing=Packing(4, 32)))
    arrays, theirs = stored(out), parameters(expected)
    assert arrays.keys() == theirs.keys()
    assert [n for n in theirs if not mx.array_equal(arrays[n], theirs[n])] == []
    made = [d for d in outcome.decisions if "embed_q" in d.name]
    assert made
    assert made[0].source == (f"file.{made[0].name.replace('embed_q', 'kv_b_proj')}",)
    assert made[0].note == "made by the model's own code"


def test_inputs_of_computed_parameters_are_read_once_while_they_are_small(out: Path) -> None:
    config, weights = deepseek()
    source = FakeSource(config, weights)
    convert(source, out, ConvertOptions(packing=Packing(4, 32)))
    counts = [sum(n == name for n, _ in source.reads) for name in weights if "kv_b_proj" in name]
    assert counts == [1] * len(counts)
    assert counts


def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "CHUNK_BYTES", 1 << 16)

    def peak(layers: int) -> int:
        config = llama_config(num_hidden_layers=layers, hidden_size=256, intermediate_size=1024)
        source = FakeSource(config, random_weights(config))
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        convert(source, tmp_path / str(layers), ConvertOptions(packing=Q4, dtype="float32"))
        return mx.get_peak_memory() - before

    largest = 1024 * 256 * 2
    assert peak(8) <= 1.5 * (largest + 2 * largest)


def test_progress_counts_the_bytes_and_ends_at_the_whole(out: Path) -> None:
    events: list[ProgressEvent] = []
    outcome = convert(fake_source(moe_config()), out, ConvertOptions(packing=Q4), progress=events.append)
    assert [e.done for e in events] == sorted(e.done for e in events)
    assert (events[0].done, events[-1].done, events[-1].total) == (0, outcome.total_bytes, outcome.total_bytes)
    assert {e.phase for e in events} == {"write"}


def test_a_cancelled_conversion_goes_on_where_it_was(out: Path) -> None:
    cancel = threading.Event()
    source = fake_source()
    seen: list[int] = []

    def stop(event: ProgressEvent) -> None:
        seen.append(event.done)
        if len(seen) == 5:
            cancel.set()

    with pytest.raises(CancelledError, match="what is done is kept"):
        convert(source, out, ConvertOptions(packing=Q4), progress=stop, cancel=cancel)
    assert not out.exists()
    source.reads.clear()
    convert(source, out, ConvertOptions(packing=Q4))
    assert EMBED not in [name for name, _ in source.reads]
    convert(fake_source(), out.with_name("other"), ConvertOptions(packing=Q4))
    assert folder_bytes(out) == folder_bytes(out.with_name("other"))


def test_a_source_that_changes_meanwhile_is_noticed(out: Path) -> None:
    source = fake_source()

    def touch(name: str) -> None:
        source.salt = "touched"

    source.before_read = touch
    with pytest.raises(ConversionError, match="changed while it was converted"):
        convert(source, out, ConvertOptions())
    assert not out.exists()


def test_a_folder_that_is_written_into_meanwhile_is_noticed(tmp_path: Path, out: Path) -> None:
    folder = tiny.write_folder(tmp_path / "model")

    def write(event: ProgressEvent) -> None:
        os.utime(folder / "model.safetensors", ns=(1, 1))

    source = open_source(folder)
    with contextlib.closing(source), pytest.raises(ConversionError, match="changed while it was converted"):
        convert(source, out, ConvertOptions(), progress=write)
    assert not out.exists()


def test_a_reader_that_gives_another_shape_is_an_error_that_names_the_tensor(out: Path) -> None:
    source = fake_source()
    names = source.arrays

    def shorten(name: str) -> None:
        if name == HEAD and names[HEAD].shape[0] == 96:
            names[HEAD] = names[HEAD][:5]

    source.before_read = shorten
    with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
        convert(source, out, ConvertOptions())
    assert not out.exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "config.json", "model.safetensors", "conversion.json"])
def test_no_file_of_the_source_gets_out_of_the_folder_or_takes_the_place_of_ours(name: str, out: Path) -> None:
    source = fake_source()
    source.extras = {name: b"x"}
    with pytest.raises(ModelFileError, match="no name for a file"):
        convert(source, out, ConvertOptions())
    assert not out.exists()


def test_the_report_says_what_became_of_every_tensor(out: Path) -> None:
    source = fake_source(packed={HEAD: Q4})
    source.dropped = {"model.vision.weight": "not a text model's"}
    outcome = convert(source, out, ConvertOptions(packing=Packing(8, 64)))
    report = json.loads((out / "conversion.json").read_text())
    assert report["plan"] == plan(source, ConvertOptions(packing=Packing(8, 64))).hash
    assert report["dropped"] == {"model.vision.weight": "not a text model's"}
    assert {t["name"] for t in report["tensors"]} == set(source.arrays)
    head = next(t for t in report["tensors"] if t["name"] == HEAD)
    assert head["source"] == ["file.lm_head.weight"]
    assert head["packing"] == {"bits": 8, "group_size": 64, "mode": "affine"}
    assert (head["handling"], head["note"]) == ("requantized", "was 4-bit affine, groups of 64")
    assert report["bits_per_weight"] == pytest.approx(outcome.bits_per_weight, abs=1e-3)
    assert sum(report["handled"].values()) == report["num_weights"]


def test_half_a_surrogate_pair_in_a_name_or_config_is_written_as_it_was_read(out: Path) -> None:
    source = fake_source(llama_config(note="\ud800"))
    source.arrays["model.layers.0.self_attn.rotary_emb.inv_freq\ud800"] = mx.ones((4,))
    convert(source, out, ConvertOptions(documents=report.documents))
    assert json.loads((out / "config.json").read_text())["note"] == "\ud800"
    dropped = json.loads((out / "conversion.json").read_text())["dropped"]
    assert list(dropped) == ["model.layers.0.self_attn.rotary_emb.inv_freq\ud800"]


def test_a_dtype_that_mlx_lm_has_no_weights_in_is_refused(out: Path) -> None:
    with pytest.raises(InvalidRequestError, match="dtype is 'float64'"):
        convert(fake_source(), out, ConvertOptions(dtype="float64"))
