"""The exported file: what llama.cpp computes from it (goldens of make_goldens.py), and what our own reader finds."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize

from mlxinfer import upstream
from mlxinfer.convert.export import folder as folders
from mlxinfer.convert.export.gguf import export_gguf
from mlxinfer.convert.export.huggingface import export_huggingface
from mlxinfer.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import load_gguf, read_gguf
from tests.unit.convert.export import models
from tests.unit.convert.export.make_goldens import FIXTURE, IDS, PROMPTS, QUANTIZATION, gguf_digest

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.convert.export.writing import Outcome

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
DOWN = "blk.1.ffn_down.weight"
READ_BACK = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
TOLERANCES = {"gemma": 1e-2, "gemma2": 1e-2, "gemma3_text": 1e-2}
"""Of log probabilities: llama.cpp looks gelu up in a table of float16, and mlx-lm's Gemma 1 has another gelu. Of the
others 6e-6 is seen."""


def edit_config(source: Path, **changes: object) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(source: Path, **changes: mx.array) -> None:
    weights: Any = mx.load(str(source / "model.safetensors"))
    mx.save_safetensors(str(source / "model.safetensors"), weights | changes)


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    return np.array(model(mx.array([ids]), cache=upstream.make_cache(model))[0].astype(mx.float32))


def values_in(path: Path, name: str) -> np.ndarray:
    """A tensor of the file as float32, by the `gguf` package."""
    tensor = read_gguf(path).tensors[name]
    return dequantize(tensor.read(), tensor.type).reshape(tensor.shape)


def values_of(source: Path, path: str) -> np.ndarray:
    """A packed matrix of the folder as float32, by mlx."""
    weights: Any = mx.load(str(source / "model.safetensors"))
    settings = json.loads((source / "config.json").read_text())["quantization"]
    scales, biases = weights[f"{path}.scales"], weights.get(f"{path}.biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return np.array(mx.dequantize(weights[f"{path}.weight"], scales, biases, **settings, dtype=mx.float32))


def fate(outcome: Outcome, name: str) -> tuple[str, str]:
    return next((o.type, o.handling) for o in outcome.outputs if o.name == name)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_llama_cpp_finds_the_probabilities_of_mlx_lm_in_an_exported_model(tmp_path: Path, family: str) -> None:
    (tmp_path / "plain").mkdir()
    source = models.write(tmp_path / "plain" / family, family)
    export_gguf(source, tmp_path / "m.gguf")
    with np.load(FIXTURE, allow_pickle=False) as file:
        golden = [file[f"gguf_{family}_{i}"] for i in range(len(PROMPTS))]
        sha256 = file[f"gguf_{family}_sha256"].tobytes()
    assert gguf_digest(tmp_path / "m.gguf") == sha256, "the export is not the one that the golden is of"
    model = models.load(source)
    for ids, best in zip(PROMPTS, golden, strict=True):
        logits = logits_of(model, ids)[-1].astype(np.float64)
        ours = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        difference = ours[best[:, 0].astype(int)] - best[:, 1]
        assert np.abs(difference).max(initial=0) <= TOLERANCES.get(family, 5e-5)


@pytest.mark.parametrize("family", READ_BACK)
def test_our_reader_finds_the_same_model_in_an_export(tmp_path: Path, family: str) -> None:
    source = models.write(tmp_path / "mlx", family)
    export_gguf(source, tmp_path / "m.gguf")
    gguf = load_gguf(tmp_path / "m.gguf", dtype=mx.float32)
    expected = logits_of(models.load(source), IDS)
    # 1 added to a norm and taken off again is rounded to float32.
    np.testing.assert_allclose(
        logits_of(upstream.build_model(gguf.config, gguf.weights), IDS), expected, rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_words_survive_the_way_there_and_back(tmp_path: Path, family: str) -> None:
    source = models.write(tmp_path / "mlx", family, dtype=mx.float16, quantization=QUANTIZATION)
    export_gguf(source, tmp_path / "m.gguf")
    before: Any = mx.load(str(source / "model.safetensors"))
    after = load_gguf(tmp_path / "m.gguf", dtype=mx.float16).weights
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("bits", "kind"), [(2, "Q4_1"), (3, "Q4_1"), (4, "Q4_1"), (5, "Q5_1")])
def test_two_to_five_bits_keep_every_value(tmp_path: Path, bits: int, kind: str, group_size: int) -> None:
    quantization = {"bits": bits, "group_size": group_size}
    source = models.write(tmp_path / "mlx", "llama", dtype=mx.float16, quantization=quantization, **WIDE)
    outcome = export_gguf(source, tmp_path / "m.gguf")
    assert fate(outcome, DOWN) == (kind, "exact")
    np.testing.assert_array_equal(
        values_in(tmp_path / "m.gguf", DOWN), values_of(source, "model.layers.1.mlp.down_proj")
    )


def test_mxfp4_keeps_every_value(tmp_path: Path) -> None:
    quantization = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    source = models.write(tmp_path / "mlx", "gpt_oss", quantization=quantization)
    outcome = export_gguf(source, tmp_path / "m.gguf")
    name = "blk.1.ffn_down_exps.weight"
    assert fate(outcome, name) == ("MXFP4", "exact")
    np.testing.assert_array_equal(
        values_in(tmp_path / "m.gguf", name), values_of(source, "model.layers.1.mlp.experts.down_proj")
    )


@pytest.mark.parametrize("mode", [("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_a_mode_without_a_type_is_quantized_anew_and_said_so(tmp_path: Path, mode: tuple[str, int, int]) -> None:
    quantization = {"bits": mode[1], "group_size": mode[2], "mode": mode[0]}
    source = models.write(tmp_path / "mlx", "llama", quantization=quantization)
    assert fate(export_gguf(source, tmp_path / "m.gguf"), DOWN) == ("Q8_0", "requantized")
    expected = values_of(source, "model.layers.1.mlp.down_proj")
    np.testing.assert_allclose(values_in(tmp_path / "m.gguf", DOWN), expected, atol=np.abs(expected).max() / 200)


def with_symmetric_biases(source: Path, zero: int) -> None:
    weights: Any = mx.load(str(source / "model.safetensors"))
    scales = {n: w for n, w in weights.items() if n.endswith(".scales")}
    edit_weights(source, **{n.replace("scales", "biases"): -zero * s for n, s in scales.items()})


@pytest.mark.parametrize(
    ("bits", "zero", "handling"),
    [(8, 128, "exact"), (6, 32, "exact"), (8, 100, "requantized"), (8, 150, "requantized")],
)
def test_eight_bits_keep_their_codes_where_zero_is_one_that_fits(
    tmp_path: Path, bits: int, zero: int, handling: str
) -> None:
    quantization = {"bits": bits, "group_size": 32}
    source = models.write(tmp_path / "mlx", "llama", dtype=mx.float16, quantization=quantization)
    with_symmetric_biases(source, zero)
    assert fate(export_gguf(source, tmp_path / "m.gguf"), DOWN) == ("Q8_0", handling)
    expected, values = values_of(source, "model.layers.1.mlp.down_proj"), values_in(tmp_path / "m.gguf", DOWN)
    if handling == "exact":
        np.testing.assert_array_equal(values, expected)
    else:
        np.testing.assert_allclose(values, expected, atol=np.abs(expected).max() / 200)


def test_six_bits_of_min_and_max_keep_their_codes_nearly(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", dtype=mx.float16, quantization={"bits": 6, "group_size": 32})
    assert fate(export_gguf(source, tmp_path / "m.gguf"), DOWN) == ("Q8_0", "near")
    expected, values = values_of(source, "model.layers.1.mlp.down_proj"), values_in(tmp_path / "m.gguf", DOWN)
    np.testing.assert_allclose(values, expected, atol=np.abs(expected).max() / 1000)


def test_a_group_of_zeros_is_zero(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", dtype=mx.float16, quantization={"bits": 8, "group_size": 32})
    with_symmetric_biases(source, 128)
    weights: Any = mx.load(str(source / "model.safetensors"))
    for part in ("scales", "biases"):
        name = f"model.layers.1.mlp.down_proj.{part}"
        weights[name] = mx.concatenate([mx.zeros_like(weights[name][:1]), weights[name][1:]])
    edit_weights(source, **weights)
    assert fate(export_gguf(source, tmp_path / "m.gguf"), DOWN) == ("Q8_0", "exact")
    np.testing.assert_array_equal(
        values_in(tmp_path / "m.gguf", DOWN), values_of(source, "model.layers.1.mlp.down_proj")
    )


def test_scales_that_float16_rounds_are_said_to_be_near(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", quantization=QUANTIZATION)
    outcome = export_gguf(source, tmp_path / "m.gguf")
    assert fate(outcome, DOWN) == ("Q4_1", "near")
    note = next(o.note for o in outcome.outputs if o.name == DOWN)
    assert "scales rounded to float16 by up to" in note
    expected = values_of(source, "model.layers.1.mlp.down_proj")
    np.testing.assert_allclose(values_in(tmp_path / "m.gguf", DOWN), expected, atol=np.abs(expected).max() / 1000)


def test_bfloat16_scales_that_float16_holds_are_exact(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", dtype=mx.bfloat16, quantization=QUANTIZATION)
    assert fate(export_gguf(source, tmp_path / "m.gguf"), DOWN) == ("Q4_1", "exact")


def test_a_scale_beyond_float16_is_refused(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", quantization=QUANTIZATION)
    name = "model.layers.1.mlp.down_proj.scales"
    weights: Any = mx.load(str(source / "model.safetensors"))
    edit_weights(source, **{name: weights[name] * 1e8})
    with pytest.raises(UnsupportedModelError, match=r"scales of model\.layers\.1\.mlp\.down_proj.* beyond float16"):
        export_gguf(source, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("floats", "kind", "handling"),
    [("float32", "F32", "exact"), (None, "BF16", "exact"), ("float16", "F16", "near"), ("q8_0", "Q8_0", "requantized")],
)
def test_floats_take_the_type_that_is_asked_for_and_vectors_float32(
    tmp_path: Path, floats: str | None, kind: str, handling: str
) -> None:
    source = models.write(tmp_path / "mlx", "qwen3_moe", dtype=mx.bfloat16)
    outcome = export_gguf(source, tmp_path / "m.gguf", floats=floats)
    assert fate(outcome, "blk.0.attn_q.weight") == (kind, handling)
    assert fate(outcome, "blk.0.attn_norm.weight") == ("F32", "exact")
    assert fate(outcome, "blk.0.ffn_gate_inp.weight") == ("F32", "exact")


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", quantization=QUANTIZATION)
    dry = export_gguf(source, tmp_path / "m.gguf", dry_run=True)
    assert [p.name for p in tmp_path.iterdir()] == ["mlx"]
    wet = export_gguf(source, tmp_path / "m.gguf")
    assert [(o.name, o.type, o.nbytes, o.note) for o in dry.outputs] == [
        (o.name, o.type, o.nbytes, o.note) for o in wet.outputs
    ]


def test_slices_of_a_tensor_make_up_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.write(tmp_path / "mlx", "mixtral", quantization=QUANTIZATION)
    export_gguf(source, tmp_path / "whole.gguf")
    monkeypatch.setattr(folders, "SLICE_ELEMENTS", 7 * 64)
    export_gguf(source, tmp_path / "sliced.gguf")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "sliced.gguf").read_bytes()


@pytest.mark.parametrize("export", [export_gguf, export_huggingface])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_name_that_the_disk_cannot_hold_is_an_error(export: Any, dry_run: bool, tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    for name in ("x" * 300, "x" * 245):
        with pytest.raises(InvalidRequestError, match="File name too long"):
            export(source, tmp_path / name, dry_run=dry_run)


@pytest.mark.parametrize("export", [export_gguf, export_huggingface])
def test_every_file_is_on_the_disk_before_it_has_its_name(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    fsync, synced = os.fsync, set[int]()

    def syncing(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", syncing)
    export(source, tmp_path / "m")
    files = [tmp_path / "m", *((tmp_path / "m").iterdir() if (tmp_path / "m").is_dir() else ())]
    assert {path.stat().st_ino for path in (tmp_path, *files)} <= synced


def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidRequestError, match="no permission to write in"):
        export_gguf(source, tmp_path / "m.gguf", dry_run=True)


def test_the_file_is_never_overwritten(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(InvalidRequestError, match=r"m\.gguf exists already"):
        export_gguf(source, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN | {"beta_fast": 32.0, "beta_slow": 1.0},
    "llama3": models.LLAMA3,
}


def test_biases_of_q_and_k_are_interleaved_as_their_rows_are(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", attention_bias=True)
    export_gguf(source, tmp_path / "m.gguf", floats="float32")
    before: Any = mx.load(str(source / "model.safetensors"))
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    for name, heads in (("q", 4), ("k", 2)):
        bias = np.array(before[f"model.layers.0.self_attn.{name}_proj.bias"])
        stored = tensors[f"blk.0.attn_{name}.bias"]
        data = np.fromfile(stored.path, np.float32, count=bias.size, offset=stored.offset)
        np.testing.assert_array_equal(data.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1), bias)
        assert not np.array_equal(data, bias)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_rope_scaling_is_read_back(tmp_path: Path, scaling: str) -> None:
    source = models.write(tmp_path / "mlx", "llama", rope_scaling=SCALINGS[scaling], rope_theta=500000.0)
    export_gguf(source, tmp_path / "m.gguf")
    read = load_gguf(tmp_path / "m.gguf", dtype=mx.float32).config
    assert read["rope_theta"] == 500000.0
    assert read["rope_scaling"] == pytest.approx(SCALINGS[scaling])


def test_a_table_of_rope_factors_is_read_back(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 8.0]
    table = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    source = models.write(tmp_path / "mlx", "llama", rope_scaling={**table, "original_max_position_embeddings": 512})
    export_gguf(source, tmp_path / "m.gguf")
    assert load_gguf(tmp_path / "m.gguf", dtype=mx.float32).config["rope_scaling"]["long_factor"] == factors


def test_yarn_without_an_original_context_has_that_of_mlx_lm(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", rope_scaling={"rope_type": "yarn", "factor": 4.0, "mscale": 1})
    export_gguf(source, tmp_path / "m.gguf")
    assert read_gguf(tmp_path / "m.gguf").metadata["llama.rope.scaling.original_context_length"] == 4096


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling is 'dynamic'"),
        ("llama", {"rope_scaling": YARN | {"mscale": 0.707}}, "mscale"),
        ("llama", {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale"),
        ("llama", {"rope_traditional": True}, "rope_traditional is set"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar is 99, not 32"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "don't alternate"),
        ("qwen3_moe", {"mlp_only_layers": [7]}, "some layers have no experts"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    source = models.write(tmp_path / "mlx", family)
    edit_config(source, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        export_gguf(source, tmp_path / "m.gguf")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    edit_config(source, model_type="xverse")
    with pytest.raises(UnsupportedModelError, match=r"'xverse' can't be exported to GGUF; known: gemma, "):
        export_gguf(source, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("field", "value"), [("max_position_embeddings", "long"), ("rms_norm_eps", None), ("rope_theta", float("inf"))]
)
def test_a_broken_number_in_the_config_is_an_error_that_names_it(tmp_path: Path, field: str, value: object) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    edit_config(source, **{field: value})
    with pytest.raises(ModelFileError, match=field if value else "config of llama"):
        export_gguf(source, tmp_path / "m.gguf")
