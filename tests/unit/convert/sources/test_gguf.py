"""GGUF as a source of `convert`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
import tokenizers
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from mlx.utils import tree_flatten

from mlxinfer.convert.sources.base import Packing
from mlxinfer.convert.sources.gguf import GGUFSource
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import load_gguf
from tests.unit.formats.gguf_files import auto, tensor, tiny_model
from tests.unit.formats.gguf_writer import CASES, Case, blueprint, build, own

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.convert.sources.base import PackedArrays


def source(folder: Path, arch: str = "llama", kind: Kind = Kind.F32) -> GGUFSource:
    return GGUFSource(tiny_model(arch, kind).write(folder / "m.gguf"))


def dequantized(packed: PackedArrays, packing: Packing | None) -> np.ndarray:
    assert packing is not None
    assert packed.biases is not None
    w, scales, biases = (mx.array(a) for a in (packed.weight, packed.scales, packed.biases))
    return np.array(mx.dequantize(w, scales, biases, group_size=packing.group_size, bits=packing.bits))


def parameter(model: Any, name: str) -> np.ndarray:
    return np.array(dict(tree_flatten(model.parameters()))[name])


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2"])
def test_the_source_names_and_reads_what_the_engine_loads(tmp_path: Path, arch: str) -> None:
    found = source(tmp_path, arch)
    loaded = load_gguf(found.path, dtype=mx.float32)
    assert found.tensors.keys() == loaded.weights.keys()
    assert dict(found.config) == loaded.config
    for name, logical in found.tensors.items():
        values = found.read(name)
        assert (values.shape, values.dtype.name, logical.dtype) == (logical.shape, "float32", "float32")
        np.testing.assert_array_equal(values, np.array(loaded.weights[name]))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda k: k.name)
def test_packed_codes_stand_for_the_floats_also_where_rows_are_moved(tmp_path: Path, kind: Kind) -> None:
    found = source(tmp_path, "llama", kind)
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        logical = found.tensors[name]
        assert logical.packing is not None
        assert (logical.handling, logical.dtype) == ("exact", "float32")
        packed = found.read_packed(name)
        assert (packed.weight.dtype, packed.scales.dtype) == (np.uint32, np.float32)
        np.testing.assert_array_equal(dequantized(packed, logical.packing), found.read(name))


def test_one_expert_can_be_read_alone_in_floats_and_packed(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]
    found = GGUFSource(blueprint(case, build(case), Kind.Q8_0).write(tmp_path / "m.gguf"))
    name = "model.layers.1.mlp.switch_mlp.down_proj.weight"
    logical = found.tensors[name]
    assert (logical.shape, logical.packing) == ((8, 64, 32), Packing(8, 32))
    whole, packed = found.read(name), found.read_packed(name)
    np.testing.assert_array_equal(dequantized(packed, logical.packing), whole)
    for part in (0, 7):
        np.testing.assert_array_equal(found.read(name, part), whole[part])
        np.testing.assert_array_equal(found.read_packed(name, part).weight, packed.weight[part])
        np.testing.assert_array_equal(found.read_packed(name, part).scales, packed.scales[part])
    with pytest.raises(ValueError, match="no part 8"):
        found.read(name, 8)


def test_q_k_and_v_joined_into_one_matrix_stay_packed(tmp_path: Path) -> None:
    case = CASES["internlm2"]
    model = build(case)
    found = GGUFSource(blueprint(case, model, Kind.Q8_0).write(tmp_path / "m.gguf"))
    name = "model.layers.0.attention.wqkv.weight"
    logical = found.tensors[name]
    assert logical.made_of == ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight")
    assert logical.packing == Packing(8, 32)
    np.testing.assert_array_equal(dequantized(found.read_packed(name), logical.packing), found.read(name))
    np.testing.assert_allclose(found.read(name), parameter(model, name), atol=0.05)


def test_matrices_of_two_types_that_are_joined_become_floats(tmp_path: Path) -> None:
    case = CASES["internlm2"]
    model = build(case)
    plan, other = blueprint(case, model, Kind.Q8_0), blueprint(case, model)
    plan.tensors = [
        o if t.name == "blk.0.attn_k.weight" else t for t, o in zip(plan.tensors, other.tensors, strict=True)
    ]
    found = GGUFSource(plan.write(tmp_path / "m.gguf"))
    name = "model.layers.0.attention.wqkv.weight"
    assert found.tensors[name].packing is None
    assert "dequantized" in found.tensors[name].note
    np.testing.assert_allclose(found.read(name), parameter(model, name), atol=0.05)


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, "float16"), (Kind.BF16, "bfloat16")])
def test_half_precision_comes_as_it_is_stored(tmp_path: Path, kind: Kind, dtype: str) -> None:
    plan = tiny_model("qwen2")
    values = np.random.default_rng(1).standard_normal((96, 64)).astype(np.float32)
    plan.tensors = [tensor(t.name, values, kind) if t.name == "blk.0.ffn_up.weight" else t for t in plan.tensors]
    found = GGUFSource(plan.write(tmp_path / "m.gguf"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert (found.tensors[name].dtype, found.tensors[name].handling) == (dtype, "exact")
    stored = next(t for t in plan.tensors if t.name == "blk.0.ffn_up.weight").data
    assert found.read(name).tobytes() == stored


def test_norms_without_their_one_are_float32_and_say_so(tmp_path: Path) -> None:
    plan = tiny_model("gemma3")
    values = np.linspace(0.5, 1.5, 64)
    plan.tensors = [tensor(t.name, values, Kind.F16) if t.name == "output_norm.weight" else t for t in plan.tensors]
    found = GGUFSource(plan.write(tmp_path / "m.gguf"))
    assert found.tensors["model.norm.weight"].dtype == "float32"
    assert found.tensors["model.norm.weight"].note == "1 taken off"
    expected = values.astype(np.float16).astype(np.float32) - 1
    np.testing.assert_array_equal(found.read("model.norm.weight"), expected)


def test_types_without_a_counterpart_are_requantized_and_say_so(tmp_path: Path) -> None:
    case = Case("qwen2", "qwen2", own(hidden_size=256, head_dim=64))
    plan = blueprint(case, build(case))
    raw = np.random.default_rng(2).integers(0, 256, (272, 84), dtype=np.uint8)
    raw[:, 80:] = np.array([0.01, 0.02], dtype="<f2").view(np.uint8)
    for t in plan.tensors:
        if t.name == "token_embd.weight":
            t.kind, t.data = int(Kind.Q2_K), raw.tobytes()
    found = GGUFSource(plan.write(tmp_path / "m.gguf"))
    logical = found.tensors["model.embed_tokens.weight"]
    assert (logical.handling, logical.packing, logical.dtype) == ("requantized", None, "float32")
    assert "Q2_K has no counterpart" in logical.note
    np.testing.assert_array_equal(found.read("model.embed_tokens.weight"), dequantize(raw, Kind.Q2_K))
    with pytest.raises(ValueError, match="cannot be had packed"):
        found.read_packed("model.embed_tokens.weight")


def test_six_bits_are_near_in_eight_and_floats_stay_exact(tmp_path: Path) -> None:
    case = Case("qwen2", "qwen2", own(hidden_size=256, head_dim=64))
    plan = blueprint(case, build(case))
    raw = np.random.default_rng(2).integers(0, 256, (272, 210), dtype=np.uint8)
    raw[:, 208:] = np.array([0.01], dtype="<f2").view(np.uint8)
    for t in plan.tensors:
        if t.name == "token_embd.weight":
            t.kind, t.data = int(Kind.Q6_K), raw.tobytes()
    found = GGUFSource(plan.write(tmp_path / "m.gguf"))
    name = "model.embed_tokens.weight"
    logical, reference = found.tensors[name], dequantize(raw, Kind.Q6_K)
    assert (logical.handling, logical.packing) == ("near", Packing(8, 32))
    assert "6e-3" in logical.note
    np.testing.assert_array_equal(found.read(name), reference)
    error = dequantized(found.read_packed(name), Packing(8, 32)) - reference
    assert 0 < np.linalg.norm(error) < 6e-3 * np.linalg.norm(reference)


def test_tokenizer_template_and_generation_config_come_as_files(tmp_path: Path) -> None:
    found = source(tmp_path)
    files = {name: value for name, value in found.extras.items() if isinstance(value, bytes)}
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("<|im_start|>hello").ids == [1, 262]
    config = json.loads(files["tokenizer_config.json"])
    assert config["chat_template"] == "{{ messages[0].content }}"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2, 0]


def test_what_is_dropped_is_listed_with_a_reason(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.tensors.append(tensor("rope_freqs.weight", np.ones(8)))
    found = GGUFSource(plan.write(tmp_path / "m.gguf"))
    assert found.dropped == {"rope_freqs.weight": "its factors are in the config"}
    used = {name for logical in found.tensors.values() for name in logical.made_of}
    assert used | found.dropped.keys() == {t.name for t in plan.tensors}


def test_the_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    first = source(tmp_path)
    before = first.fingerprint()
    assert GGUFSource(first.path).fingerprint() == before
    plan = tiny_model("llama")
    plan.set("general.name", auto("another"))
    assert GGUFSource(plan.write(first.path)).fingerprint() != before
    first.path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read"):
        first.fingerprint()


def test_a_tensor_scaled_by_another_is_multiplied_and_not_packed(tmp_path: Path) -> None:
    plan = tiny_model("qwen2", Kind.Q8_0)
    plan.tensors.append(tensor("blk.0.ffn_up.scale", np.array([0.5])))
    plain = source(tmp_path, "qwen2", Kind.Q8_0)
    name = "model.layers.0.mlp.up_proj.weight"
    found = GGUFSource(plan.write(tmp_path / "scaled.gguf"))
    assert found.tensors[name].packing is None
    assert found.tensors[name].made_of == ("blk.0.ffn_up.weight", "blk.0.ffn_up.scale")
    np.testing.assert_array_equal(found.read(name), plain.read(name) * np.float32(0.5))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    plan = tiny_model("llama")
    plan.set("general.architecture", auto("whisper"))
    with pytest.raises(UnsupportedModelError, match="'whisper'"):
        GGUFSource(plan.write(tmp_path / "m.gguf"))
