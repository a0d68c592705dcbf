"""From a GGUF file to an mlx-lm config and weights."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import arrays, load_gguf, plan_gguf, read_weights
from mlxinfer.formats.gguf.parameters import halves_apart
from tests.unit.formats.gguf_files import F32, U32, Blueprint, auto, tensor, tiny_model, typed
from tests.unit.formats.gguf_writer import CASES, blueprint, build

if TYPE_CHECKING:
    from pathlib import Path

ARCHS = ("gemma", "gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3")


def test_reading_headers_imports_no_mlx() -> None:
    code = "import sys, mlxinfer.formats.gguf, mlxinfer.formats.safetensors; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def load(plan: Blueprint, folder: Path, dtype: mx.Dtype | None = mx.float32) -> Any:
    return load_gguf(plan.write(folder / "m.gguf"), dtype=dtype)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_tensor_of_a_supported_architecture_becomes_a_parameter(tmp_path: Path, arch: str) -> None:
    plan = tiny_model(arch)
    model = load(plan, tmp_path)
    assert len(model.weights) == len(plan.tensors)
    assert model.config["vocab_size"] == 272
    assert model.config["tie_word_embeddings"] == ("output.weight" not in {t.name for t in plan.tensors})
    assert "quantization" not in model.config


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_matrices_are_named_in_the_config(tmp_path: Path, arch: str) -> None:
    model = load(tiny_model(arch, Kind.Q4_0), tmp_path)
    assert model.config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    packed = [name.removesuffix(".scales") for name in model.weights if name.endswith(".scales")]
    assert "model.embed_tokens" in packed
    for name in packed:
        assert model.weights[f"{name}.weight"].dtype == mx.uint32
        assert model.weights[f"{name}.scales"].shape == model.weights[f"{name}.biases"].shape


def test_layers_of_another_width_are_listed_one_by_one(tmp_path: Path) -> None:
    plan, eight = tiny_model("llama", Kind.Q4_0), tiny_model("llama", Kind.Q8_0)
    plan.tensors = [
        e if e.name == "blk.1.ffn_down.weight" else t for t, e in zip(plan.tensors, eight.tensors, strict=True)
    ]
    quantization = load(plan, tmp_path).config["quantization"]
    assert quantization["bits"] == 4
    assert quantization["model.layers.1.mlp.down_proj"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert len(quantization) == 4


def test_rows_of_q_and_k_come_out_with_the_halves_of_each_head_apart(tmp_path: Path) -> None:
    # llama.cpp's converter splits each head into two halves and interleaves them; this is the way back.
    heads, head_dim = 4, 16
    original = np.arange(heads * head_dim, dtype=np.float32)[:, None] * np.ones((1, 64), dtype=np.float32)
    stored = original.reshape(heads, 2, head_dim // 2, 64).swapaxes(1, 2).reshape(original.shape)
    np.testing.assert_array_equal(stored[halves_apart(heads)(len(stored))], original)
    plan = tiny_model("llama")
    plan.tensors = [tensor(t.name, stored) if t.name == "blk.0.attn_q.weight" else t for t in plan.tensors]
    weights = load(plan, tmp_path).weights
    np.testing.assert_array_equal(np.array(weights["model.layers.0.self_attn.q_proj.weight"]), original)


def test_packed_rows_of_q_and_k_are_moved_like_float_ones(tmp_path: Path) -> None:
    floats = load(tiny_model("llama"), tmp_path).weights
    model = load(tiny_model("llama", Kind.Q8_0), tmp_path).weights
    for name in ("q_proj", "k_proj", "v_proj"):
        path = f"model.layers.1.self_attn.{name}"
        w = mx.dequantize(*(model[f"{path}.{p}"] for p in ("weight", "scales", "biases")), group_size=32, bits=8)
        np.testing.assert_allclose(np.array(w), np.array(floats[f"{path}.weight"]), atol=0.02)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_0])
def test_weights_can_be_read_in_pieces_and_large_tensors_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    path = tiny_model("llama", kind).write(tmp_path / "m.gguf")
    whole = load_gguf(path, dtype=mx.float32)
    plan = plan_gguf(path)
    assert "quantization" not in plan.config
    coarse = sum(1 for _ in read_weights(plan, dtype=mx.float32))
    assert coarse >= 2 * len(plan.parameters)
    monkeypatch.setattr(arrays, "SLICE_ELEMENTS", 64 * 16)
    reading, count = read_weights(plan, dtype=mx.float32), 0
    while True:
        try:
            next(reading)
        except StopIteration as done:
            weights, config = done.value
            break
        count += 1
    assert count > coarse + 10
    assert config == whole.config
    assert weights.keys() == whole.weights.keys()
    assert all(mx.array_equal(weights[name], whole.weights[name]) for name in weights)


def test_gemma_norms_lose_the_one_that_the_file_adds(tmp_path: Path) -> None:
    plan = tiny_model("gemma3")
    stored = next(t for t in plan.tensors if t.name == "blk.0.attn_q_norm.weight")
    weights = load(plan, tmp_path).weights
    expected = np.frombuffer(stored.data, dtype=np.float32) - 1
    np.testing.assert_array_equal(np.array(weights["model.layers.0.self_attn.q_norm.weight"]), expected)


@pytest.mark.parametrize(("arch", "dtype"), [("llama", mx.float16), ("gemma3", mx.bfloat16)])
def test_without_a_dtype_the_file_decides(tmp_path: Path, arch: str, dtype: mx.Dtype) -> None:
    weights = load(tiny_model(arch, Kind.Q8_0), tmp_path, None).weights
    assert {w.dtype for w in weights.values()} == {mx.uint32, dtype}


def test_gemma3_layers_take_turns(tmp_path: Path) -> None:
    plan = tiny_model("gemma3")
    assert load(plan, tmp_path).config["sliding_window_pattern"] == 6
    plan.set("gemma3.attention.sliding_window_pattern", auto([True, False] * 3))
    assert load(plan, tmp_path).config["sliding_window_pattern"] == 2
    plan.set("gemma3.attention.sliding_window_pattern", auto([True, True, False, False, True, False]))
    with pytest.raises(UnsupportedModelError, match="do not follow a period"):
        load(plan, tmp_path)


def _llama3_factors(head_dim: int, theta: float, factor: float) -> list[float]:
    """As transformers' _compute_llama3_parameters has it: frequency / scaled frequency."""
    factors = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192:
            scaled = frequency / factor
        elif wavelength < 8192 / 4:
            scaled = frequency
        else:
            smooth = (8192 / wavelength - 1) / 3
            scaled = (1 - smooth) * frequency / factor + smooth * frequency
        factors.append(frequency / scaled)
    return factors


def test_a_llama3_rope_table_becomes_the_rule_it_was_made_with(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("llama.rope.freq_base", typed(F32, 500000.0))
    factors = _llama3_factors(16, 500000.0, 32.0)
    # Kept, smoothed and divided frequencies all occur.
    assert len(set(factors)) == 3
    plan.tensors.append(tensor("rope_freqs.weight", np.array(factors)))
    scaling = load(plan, tmp_path).config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_any_other_rope_table_is_kept_as_it_is(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.tensors.append(tensor("rope_freqs.weight", np.array([1, 1, 1, 2, 3, 4, 5, 6.5])))
    config = load(plan, tmp_path).config
    assert config["rope_scaling"]["rope_type"] == "longrope"
    assert config["rope_scaling"]["long_factor"] == [1, 1, 1, 2, 3, 4, 5, 6.5]
    # Equal lengths: mlx-lm then scales the queries by 1.
    assert config["rope_scaling"]["original_max_position_embeddings"] == config["max_position_embeddings"]


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_out_of_the_metadata(tmp_path: Path, kind: str) -> None:
    plan = tiny_model("qwen2")
    plan.set("qwen2.rope.scaling.type", auto(kind))
    plan.set("qwen2.rope.scaling.factor", auto(4.0))
    plan.set("qwen2.rope.scaling.original_context_length", auto(128))
    scaling = load(plan, tmp_path).config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == (kind, 4.0)
    assert scaling.get("original_max_position_embeddings") == (128 if kind == "yarn" else None)


BAD_METADATA: dict[str, tuple[str, bytes | None, type[Exception]]] = {
    "no block count": (".block_count", None, ModelFileError),
    "no blocks": (".block_count", auto(0), ModelFileError),
    "10^9 blocks": (".block_count", auto(10**9), ModelFileError),
    "more blocks than the file has": (".block_count", auto(3), ModelFileError),
    "fewer blocks than the file has": (".block_count", auto(1), UnsupportedModelError),
    "block count as text": (".block_count", auto("2"), ModelFileError),
    "width 0": (".embedding_length", auto(0), ModelFileError),
    "another width": (".embedding_length", auto(128), ModelFileError),
    "no heads": (".attention.head_count", auto(0), ModelFileError),
    "heads that do not divide": (".attention.head_count", auto(3), ModelFileError),
    "key heads that do not divide": (".attention.head_count_kv", auto(3), ModelFileError),
    "heads that differ by layer": (".attention.head_count_kv", auto([2, 1]), UnsupportedModelError),
    "no epsilon": (".attention.layer_norm_rms_epsilon", None, ModelFileError),
    "epsilon NaN": (".attention.layer_norm_rms_epsilon", auto(math.nan), ModelFileError),
    "epsilon as bool": (".attention.layer_norm_rms_epsilon", auto(True), ModelFileError),
    "rope base 0": (".rope.freq_base", auto(0.0), ModelFileError),
    "rope base infinite": (".rope.freq_base", auto(math.inf), ModelFileError),
    "half a rotation": (".rope.dimension_count", auto(8), UnsupportedModelError),
    "unknown rope scaling": (".rope.scaling.type", auto("spiral"), UnsupportedModelError),
    "context 0": (".context_length", auto(0), ModelFileError),
    "context 2^32": (".context_length", typed(10, 2**32), ModelFileError),
    "more experts than there can be": (".expert_count", auto(10**6), ModelFileError),
    "keys and values of different widths": (".attention.value_length", auto(8), UnsupportedModelError),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_absurd_metadata_is_an_error_that_names_the_key(tmp_path: Path, case: str) -> None:
    key, encoded, error = BAD_METADATA[case]
    plan = tiny_model("llama")
    if encoded is None:
        plan.metadata = [(k, v) for k, v in plan.metadata if k != f"llama{key}"]
    else:
        plan.set(f"llama{key}", encoded)
    with pytest.raises(error) as caught:
        load(plan, tmp_path)
    assert "m.gguf" in str(caught.value)
    if case not in ("more blocks than the file has", "fewer blocks than the file has"):
        assert key[1:].split(".")[-1].split("_")[0] in str(caught.value)


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("general.architecture", auto("whisper"))
    with pytest.raises(UnsupportedModelError, match=r"'whisper'.*gemma3.*llama"):
        load(plan, tmp_path)


@pytest.mark.parametrize("encoded", [None, typed(U32, 3), auto("")])
def test_a_file_without_an_architecture_is_an_error(tmp_path: Path, encoded: bytes | None) -> None:
    plan = tiny_model("llama")
    plan.metadata = [(k, v) for k, v in plan.metadata if k != "general.architecture"]
    if encoded is not None:
        plan.set("general.architecture", encoded)
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        load(plan, tmp_path)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_gate.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    plan = tiny_model("llama")
    plan.tensors = [t for t in plan.tensors if t.name != name]
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        load(plan, tmp_path)


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_inp.weight", "blk.2.attn_q.weight", "blk.00.attn_q.weight", "v.x", "blk.0.ffn_up.bias"]
)
def test_a_tensor_that_nothing_consumes_is_an_error(tmp_path: Path, name: str) -> None:
    plan = tiny_model("llama")
    plan.tensors.append(tensor(name, np.zeros(64)))
    with pytest.raises(UnsupportedModelError, match=f"nothing consumes the tensor '{name}'"):
        load(plan, tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.tensors = [tensor(t.name, np.zeros((64, 32))) if t.name == "blk.0.attn_k.weight" else t for t in plan.tensors]
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_k\.weight has shape \(64, 32\).*\(32, 64\)"):
        load(plan, tmp_path)


def test_a_rope_table_of_the_wrong_length_or_sign_is_an_error(tmp_path: Path) -> None:
    for values in (np.ones(7), np.array([1, 1, 1, 1, 1, 1, 1, -1]), np.array([1, 1, 1, 1, 1, 1, 1, math.nan])):
        plan = tiny_model("llama")
        plan.tensors.append(tensor("rope_freqs.weight", values))
        with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
            load(plan, tmp_path)


@pytest.mark.parametrize("name", ["blk.0.ffn_up.weight", "blk.2.ffn_up_exps.weight", "blk.1.ffn_gate_inp.weight"])
def test_a_layer_without_its_dense_or_expert_matrices_is_an_error(tmp_path: Path, name: str) -> None:
    plan = blueprint(CASES["glm4moe"], build(CASES["glm4moe"]))
    plan.tensors = [t for t in plan.tensors if t.name != name]
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        plan_gguf(plan.write(tmp_path / "m.gguf"))


def test_layers_that_predict_several_tokens_are_dropped(tmp_path: Path) -> None:
    plan = blueprint(CASES["glm4moe"], build(CASES["glm4moe"]))
    plan.set("glm4moe.block_count", auto(4))
    plan.set("glm4moe.nextn_predict_layers", auto(1))
    plan.tensors.append(tensor("blk.3.nextn.eh_proj.weight", np.zeros((64, 128))))
    found = plan_gguf(plan.write(tmp_path / "m.gguf"))
    assert found.config["num_hidden_layers"] == 3
    assert "several tokens" in found.dropped["blk.3.nextn.eh_proj.weight"]


def test_a_quantized_vector_whose_elements_have_to_move_is_refused(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.tensors.append(tensor("blk.0.attn_q.bias", np.zeros(64), Kind.Q8_0))
    with pytest.raises(UnsupportedModelError, match=r"attn_q\.bias have to be moved, which type Q8_0"):
        load(plan, tmp_path)


def test_damage_to_the_data_loads_or_is_a_model_file_error(tmp_path: Path) -> None:
    plan = tiny_model("llama", Kind.Q4_1)
    whole = plan.build()
    rng = np.random.default_rng(4)
    for _ in range(40):
        damaged = bytearray(whole)
        at = int(rng.integers(len(plan.header()), len(whole) - 2))
        damaged[at : at + 2] = struct.pack("<H", int(rng.choice([0x7C00, 0x7E00, 0xFC00, 0, 0xFFFF])))
        path = tmp_path / "m.gguf"
        path.write_bytes(damaged)
        try:
            load_gguf(path, dtype=mx.float32)
        except ModelFileError as error:
            assert "not finite" in str(error)  # noqa: PT017 - both outcomes are right
