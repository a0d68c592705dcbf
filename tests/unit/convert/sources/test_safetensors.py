from __future__ import annotations

import json
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.convert.sources import METHODS
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from tests.unit.convert.sources.checkpoints import (
    bf16,
    bf16_values,
    dequantized,
    opened,
    plain,
    write_folder,
    write_safetensors,
    write_shards,
)

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_every_float_type_is_read_as_its_values(tmp_path: Path) -> None:
    values = floats(4, 8)
    tensors = {
        **plain({"a.weight": values, "b.weight": values.astype(np.float16), "c.weight": values.astype(np.float64) / 3}),
        "d.weight": bf16(values),
    }
    source = opened(write_folder(tmp_path, tensors), "safetensors")
    assert {name: t.dtype for name, t in source.tensors.items()} == {
        "a.weight": "float32", "b.weight": "float16", "c.weight": "float32", "d.weight": "bfloat16",
    }  # fmt: skip
    np.testing.assert_array_equal(source.read("a.weight"), values)
    np.testing.assert_array_equal(source.read("b.weight"), values.astype(np.float16))
    np.testing.assert_array_equal(source.read("c.weight"), (values.astype(np.float64) / 3).astype(np.float32))
    np.testing.assert_array_equal(source.read("d.weight"), tensors["d.weight"][1])
    assert [source.tensors[n].handling for n in ("a.weight", "c.weight")] == ["exact", "near"]


def test_integer_tables_pass_through(tmp_path: Path) -> None:
    table = np.arange(6, dtype=np.int64).reshape(2, 3)
    source = opened(write_folder(tmp_path, plain({"relative_index": table, "a.weight": floats(2, 2)})))
    assert source.tensors["relative_index"].dtype == "int64"
    np.testing.assert_array_equal(source.read("relative_index"), table)


def test_one_expert_is_read_alone(tmp_path: Path) -> None:
    stack = floats(5, 4, 8)
    source = opened(write_folder(tmp_path, plain({"experts.weight": stack})))
    np.testing.assert_array_equal(source.read("experts.weight", 3), stack[3])


def test_lazy_arrays_are_given_where_the_bytes_stay(tmp_path: Path) -> None:
    values = floats(4, 8)
    folder = write_folder(tmp_path, {**plain({"a.weight": values}), "b.weight": bf16(values)})
    source = opened(folder)
    for name in ("a.weight", "b.weight"):
        array = source.lazy(name)  # type: ignore[attr-defined]
        assert array.dtype == (mx.float32 if name == "a.weight" else mx.bfloat16)
        expected = source.read(name) if name == "a.weight" else bf16_values(source.read(name))
        np.testing.assert_array_equal(np.array(array.astype(mx.float32)), expected)
    write_folder(tmp_path / "wide", plain({"a.weight": values.astype(np.float64)}))
    assert opened(tmp_path / "wide").lazy("a.weight") is None  # type: ignore[attr-defined]


def test_a_stray_shard_does_not_win_over_the_index(tmp_path: Path) -> None:
    right = floats(2, 4)
    folder = write_shards(tmp_path, [plain({"a.weight": right}), plain({"b.weight": right})])
    write_safetensors(folder / "model.safetensors", plain({"a.weight": right + 1, "c.weight": right}))
    source = opened(folder)
    assert set(source.tensors) == {"a.weight", "b.weight"}
    np.testing.assert_array_equal(source.read("a.weight"), right)


def test_the_index_chooses_among_copies(tmp_path: Path) -> None:
    right = floats(2, 4)
    folder = write_shards(tmp_path, [plain({"a.weight": right}), plain({"a.weight": right + 1, "b.weight": right})])
    index = folder / "model.safetensors.index.json"
    first = "model-00001-of-00002.safetensors"
    index.write_text(
        index.read_text().replace('"a.weight": "model-00002-of-00002', '"a.weight": "model-00001-of-00002')
    )
    assert json.loads(index.read_text())["weight_map"]["a.weight"] == first
    np.testing.assert_array_equal(opened(folder).read("a.weight"), right)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_shards(
        tmp_path, [plain({"a.weight": floats(2, 2)})], gone__weight="model-00001-of-00001.safetensors"
    )
    with pytest.raises(ModelFileError, match=r"model-00001-of-00001.*'gone\.weight' is missing"):
        opened(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, [plain({"a.weight": floats(2, 2)}), plain({"b.weight": floats(2, 2)})])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match="model-00002-of-00002"):
        opened(folder)


def test_two_shards_with_one_name_and_no_index_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plain({"a.weight": floats(2, 2)}))
    write_safetensors(folder / "model-extra.safetensors", plain({"a.weight": floats(2, 2)}))
    with pytest.raises(ModelFileError, match=r"'a\.weight' is in"):
        opened(folder)


def test_integers_in_the_place_of_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"a\.weight"):
        opened(write_folder(tmp_path, plain({"a.weight": np.zeros((2, 2), np.int32)})))


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plain({"a.weight": floats(64, 64)}))
    source = opened(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelFileError, match=r"a\.weight.*shorter"):
        source.read("a.weight")


@pytest.mark.parametrize(
    ("bits", "group_size", "mode"),
    [(2, 64, "affine"), (3, 32, "affine"), (4, 128, "affine"), (5, 64, "affine"), (6, 32, "affine"), (8, 64, "affine"),
     (4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 16, "nvfp4")],
)  # fmt: skip
def test_what_mlx_has_quantized_keeps_its_codes(tmp_path: Path, bits: int, group_size: int, mode: str) -> None:
    packed = mx.quantize(mx.array(floats(3, 8, 256)), group_size, bits, mode)
    named = dict(zip(("l.weight", "l.scales", "l.biases"), map(np.array, packed), strict=False))
    folder = write_folder(
        tmp_path, plain({**named, "n.weight": floats(4)}),
        quantization={"group_size": 64, "bits": 4, "l": {"group_size": group_size, "bits": bits, "mode": mode}},
    )  # fmt: skip
    source = opened(folder, "safetensors")
    logical = source.tensors["l.weight"]
    assert (logical.packing, logical.handling) == (Packing(bits, group_size, mode), "exact")  # type: ignore[arg-type]
    assert logical.shape == (3, 8, 256)
    arrays = source.read_packed("l.weight")
    for array, name in ((arrays.weight, "l.weight"), (arrays.scales, "l.scales"), (arrays.biases, "l.biases")):
        if array is not None:
            np.testing.assert_array_equal(array, named[name])
    expected = dequantized(source, "l.weight")
    np.testing.assert_allclose(source.read("l.weight"), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(source.read("l.weight", 2), source.read("l.weight")[2])
    assert "quantization" not in source.config


@pytest.mark.parametrize(
    ("change", "message"),
    [({"l.scales": None}, r"l\.weight"), ({"l.biases": None}, r"l\.biases"),
     ({"l.biases": np.zeros((8, 3), np.float32)}, "biases"),
     ({"l.weight": np.zeros((8, 9), np.uint32)}, "words a row")],
)  # fmt: skip
def test_a_packed_module_that_does_not_agree_is_refused(
    tmp_path: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    packed = mx.quantize(mx.array(floats(8, 128)), 64, 4)
    named = dict(zip(("l.weight", "l.scales", "l.biases"), map(np.array, packed), strict=True)) | change
    tensors = plain({name: a for name, a in named.items() if a is not None})
    folder = write_folder(tmp_path, tensors, quantization={"group_size": 64, "bits": 4})
    with pytest.raises(ModelFileError, match=message):
        opened(folder)


@pytest.mark.parametrize("bits", [7, [4], None, True, "4"])
def test_bits_that_mlx_lacks_are_refused(tmp_path: Path, bits: object) -> None:
    packed = mx.quantize(mx.array(floats(8, 128)), 64, 4)
    tensors = plain(dict(zip(("l.weight", "l.scales", "l.biases"), map(np.array, packed), strict=True)))
    folder = write_folder(tmp_path, tensors, quantization={"group_size": 64, "bits": bits})
    with pytest.raises((UnsupportedModelError, ModelFileError), match=r"config\.json: quantization of l"):
        opened(folder)


def test_an_unknown_method_is_named_with_those_that_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plain({"a.weight": floats(2, 2)}), {"quant_method": "aqlm"})
    with pytest.raises(UnsupportedModelError, match="'aqlm'") as caught:
        opened(folder)
    assert all(method in str(caught.value) for method in METHODS)


def test_settings_below_text_config_count(tmp_path: Path) -> None:
    settings = {"quantization_config": {"quant_method": "aqlm"}}
    folder = write_folder(tmp_path, plain({"a.weight": floats(2, 2)}), text_config=settings)
    with pytest.raises(UnsupportedModelError, match="'aqlm'"):
        opened(folder)


@pytest.mark.parametrize("settings", [[], "gptq", 3])
def test_settings_that_are_no_object_are_refused(tmp_path: Path, settings: object) -> None:
    with pytest.raises(ModelFileError, match="quantization_config"):
        opened(write_folder(tmp_path, plain({"a.weight": floats(2, 2)}), settings))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        opened(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedModelError, match=r"neither a model folder nor a \.gguf"):
        opened(tmp_path / "notes.txt")
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="no weights"):
        opened(tmp_path)


def test_only_known_files_are_taken_along(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plain({"a.weight": floats(2, 2)}))
    for name in ("tokenizer.json", "generation_config.json", "modeling_evil.py", "notes.txt"):
        (folder / name).write_text("{}")
    assert set(opened(folder).extras) == {"tokenizer.json", "generation_config.json"}


def test_a_shard_whose_name_is_no_text_has_a_fingerprint(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plain({"a.weight": floats(2, 2)}))
    (folder / "model.safetensors").rename(folder / "model-\udcff.safetensors")
    assert opened(folder).fingerprint()


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, plain({"a.weight": floats(2, 2)}))
    first = opened(folder).fingerprint()
    assert opened(folder).fingerprint() == first
    write_folder(tmp_path, plain({"a.weight": floats(2, 4)}))
    assert opened(folder).fingerprint() != first
