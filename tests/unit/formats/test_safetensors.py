"""Hostile and sound safetensors headers, and which files make up a model folder."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlxinfer.errors import ModelFileError
from mlxinfer.formats import safetensors
from mlxinfer.formats.safetensors import TensorInfo, check_dtypes, check_safetensors, shard_files

if TYPE_CHECKING:
    from pathlib import Path

SOUND: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "U8", "shape": [0], "data_offsets": [32, 32]},
}


def write(path: Path, header: dict[str, Any] | bytes, data: int = 32, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data))
    return path


def changed(name: str = "b", **fields: Any) -> dict[str, Any]:
    return {**SOUND, name: {**SOUND[name], **fields}}


def test_what_mlx_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    mx.save_safetensors(str(path), {"w": mx.ones((2, 3)), "x": mx.zeros((5,), mx.uint32)}, {"format": "mlx"})
    found = check_safetensors(path)
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in found.items()} == {
        "w": ("F32", (2, 3), 24),
        "x": ("U32", (5,), 20),
    }
    raw = path.read_bytes()
    w = found["w"]
    assert raw[w.offset : w.offset + w.nbytes] == struct.pack("<6f", *[1.0] * 6)


def test_sub_byte_and_empty_tensors_are_sound(tmp_path: Path) -> None:
    header = SOUND | {
        "f4": {"dtype": "F4", "shape": [2, 3], "data_offsets": [32, 35]},
        "__metadata__": {"format": "pt"},
    }
    assert check_safetensors(write(tmp_path / "m", header, 35))["f4"].nbytes == 3


HOSTILE: dict[str, tuple[dict[str, Any] | bytes, dict[str, int], str]] = {
    "header of 2^40": (SOUND, {"length": 2**40}, "1099511627776"),
    "header of 2^64 - 1": (SOUND, {"length": 2**64 - 1}, "18446744073709551615"),
    "header of 0": (SOUND, {"length": 0}, "header of 0"),
    "no JSON": (b"nonsense", {}, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', {}, "not valid JSON"),
    "an array": (b"[1, 2]", {}, "object is expected"),
    "100,000 nested": (b'{"a":' + b"[" * 100_000, {}, "nested too deeply"),
    "an integer of 5000 digits": (b'{"a":' + b"9" * 5000 + b"}", {}, "not valid JSON"),
    "a doubled tensor": (b'{"a": {}, "a": {}}', {}, "'a' occurs twice"),
    "an entry that is a list": ({"a": []}, {}, "exactly dtype"),
    "an entry without dtype": ({"a": {"shape": [], "data_offsets": [0, 0]}}, {}, "exactly dtype"),
    "an unknown dtype": (changed(dtype="F128"), {}, "'F128' is unknown"),
    "a dtype that is a list": (changed(dtype=["F32"]), {}, "is unknown"),
    "a negative dimension": (changed(shape=[-4]), {}, "shape"),
    "a bool dimension": (changed(shape=[True]), {}, "shape"),
    "a float dimension": (changed(shape=[4.0]), {}, "shape"),
    "17 dimensions": (changed(shape=[1] * 17), {}, "shape"),
    "a product that overflows": (changed(shape=[2**32, 2**32]), {}, "does not take 8 bytes"),
    "offsets in reverse": (changed(data_offsets=[32, 24]), {}, "begin and an end"),
    "three offsets": (changed(data_offsets=[24, 32, 40]), {}, "begin and an end"),
    "negative offsets": (changed(data_offsets=[-8, 0]), {}, "begin and an end"),
    "NaN offsets": (changed(data_offsets=[24, float("nan")]), {}, "begin and an end"),
    "overlapping offsets": (changed(data_offsets=[20, 28]), {}, "overlaps"),
    "a gap": (changed(data_offsets=[28, 36]), {"data": 36}, "gap"),
    "data past the end": (SOUND, {"data": 31}, "truncated"),
    "offsets of 2^62": (changed(dtype="U8", shape=[2**62], data_offsets=[24, 24 + 2**62]), {}, "gap|end"),
    "bytes that belong to nothing": (SOUND, {"data": 33}, "belong to nothing"),
    "metadata with numbers": ({**SOUND, "__metadata__": {"a": 1}}, {}, "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_an_error_that_names_the_problem(tmp_path: Path, case: str) -> None:
    header, options, named = HOSTILE[case]
    path = write(tmp_path / "hostile.safetensors", header, **options)
    with pytest.raises(ModelFileError, match=named) as caught:
        check_safetensors(path)
    assert "hostile.safetensors" in str(caught.value)


def test_a_header_longer_than_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 50)
    with pytest.raises(ModelFileError, match="2 to 50"):
        check_safetensors(write(tmp_path / "m", SOUND))


def test_a_file_cut_at_any_byte_is_an_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "m", SOUND).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "m").write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            check_safetensors(tmp_path / "m")


def test_random_damage_never_gives_another_exception(tmp_path: Path) -> None:
    whole = write(tmp_path / "m", SOUND).read_bytes()
    rng = random.Random(21)
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(len(whole) - 32)] = rng.choice((0, 34, 44, 45, 57, 91, 123, 255, rng.randrange(256)))
        (tmp_path / "m").write_bytes(damaged)
        try:
            check_safetensors(tmp_path / "m")
        except ModelFileError:
            refused += 1
    assert 0 < refused < 500


def test_what_is_no_regular_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelFileError, match=r"no regular file|is missing"):
            check_safetensors(path)


def folder_of(folder: Path, *names: str, index: dict[str, str] | None = None) -> Path:
    for name in names:
        write(folder / name, SOUND)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_the_index_wins_over_stray_files(tmp_path: Path) -> None:
    index = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00001-of-00002.safetensors",
    }
    folder_of(tmp_path, *set(index.values()), "model-stray.safetensors", "model.safetensors", index=index)
    assert [p.name for p in shard_files(tmp_path)] == sorted(set(index.values()))


def test_a_missing_shard_is_named_with_and_without_an_index(tmp_path: Path) -> None:
    folder_of(tmp_path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003\.safetensors is missing"):
        shard_files(tmp_path)
    folder_of(tmp_path, index={"a": "model-00001-of-00003.safetensors", "b": "model-00009-of-00009.safetensors"})
    with pytest.raises(ModelFileError, match=r"model-00009-of-00009\.safetensors is missing"):
        shard_files(tmp_path)


@pytest.mark.parametrize(
    "name", ["../m.safetensors", "/etc/m.safetensors", "x/m.safetensors", "..", "m.bin", "x\\m.safetensors", 5, None]
)
def test_an_index_that_names_no_plain_file_is_refused(tmp_path: Path, name: Any) -> None:
    folder_of(tmp_path, "model.safetensors", index={"a": name})
    with pytest.raises(ModelFileError, match="weight_map names"):
        shard_files(tmp_path)


def test_an_index_that_names_a_file_of_thousands_of_letters_names_a_missing_one(tmp_path: Path) -> None:
    folder_of(tmp_path, "model.safetensors", index={"a": f"{'x' * 5000}.safetensors"})
    with pytest.raises(ModelFileError, match=r"the shard x{120} is missing"):
        shard_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_a_broken_index_is_an_error(tmp_path: Path, text: str) -> None:
    folder_of(tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"index\.json"):
        shard_files(tmp_path)


def test_links_are_followed_and_broken_ones_are_missing(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    blob = write(tmp_path / "blobs" / "abc", SOUND)
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to("../blobs/abc")
    assert shard_files(tmp_path / "snapshot") == [link]
    assert check_safetensors(link).keys() == SOUND.keys()
    blob.unlink()
    with pytest.raises(ModelFileError, match=r"model\.safetensors is missing"):
        shard_files(tmp_path / "snapshot")


def test_other_names_count_only_where_no_model_file_is(tmp_path: Path) -> None:
    folder_of(tmp_path, "consolidated.safetensors", "adapters.safetensors", "adapter_model.safetensors")
    assert [p.name for p in shard_files(tmp_path)] == ["consolidated.safetensors"]
    folder_of(tmp_path, "model.safetensors")
    assert [p.name for p in shard_files(tmp_path)] == ["model.safetensors"]


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no model"):
        shard_files(tmp_path)


def infos(**dtypes: str) -> dict[str, TensorInfo]:
    names = {name.replace("__", "."): dtype for name, dtype in dtypes.items()}
    return {name: TensorInfo(name, dtype, (1,), 0, 4) for name, dtype in names.items()}


@pytest.mark.parametrize(
    "tensors",
    [
        infos(a__weight="I32"),
        infos(a__weight="U32", b__scales="F16"),
        infos(a__weight="I32", a__scales="F16"),
        infos(a__weight="U32", a__scales="U32"),
        infos(a__weight="U32", a__scales="F16", a__biases="I16"),
        infos(a__weight="F32", a__bias="I32"),
        infos(a__weight="U8"),
    ],
)
def test_a_weight_relabelled_as_integers_is_refused(tensors: dict[str, TensorInfo]) -> None:
    with pytest.raises(ModelFileError, match=r"m: tensor 'a\.\w+' is [IU]\d+; floats"):
        check_dtypes(tensors, "m")


@pytest.mark.parametrize(
    "tensors",
    [
        infos(a__weight="BF16", a__bias="F32"),
        infos(a__weight="U32", a__scales="F16", a__biases="F16", norm__weight="F32"),
        infos(a__weight="U32", a__scales="U8"),
        infos(a__weight="U8", a__weight_scale="BF16"),
        infos(a__weight="U8", a__weight__absmax="F32"),
        infos(a__weight="I8", a__SCB="F32"),
        infos(a__weight="F8_E4M3", a__weight_scale_inv="F32"),
        infos(a__qweight="I32", a__qzeros="I32", a__scales="F16"),
        infos(a__blocks="U8", attn__bias="U8", mask__bias="BOOL", position_ids="I64", num_batches_tracked="I64"),
    ],
)
def test_integers_that_are_packed_weights_or_tables_are_left_alone(tensors: dict[str, TensorInfo]) -> None:
    check_dtypes(tensors, "m")
