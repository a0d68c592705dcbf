"""torch's .bin files: one that torch made, and others assembled opcode by opcode."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mlxinfer.convert.sources import open_source
from mlxinfer.convert.sources.torch_pickle import MAX_OPCODES, read_tensors
from mlxinfer.errors import MlxinferError, ModelFileError, UnsupportedModelError
from tests.unit.convert.sources.checkpoints import bf16_values, opened

STATE = Path(__file__).with_name("data") / "torch_state.bin"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
ORDERED = b"ccollections\nOrderedDict\n)R"


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def storage(key: str, count: int, kind: bytes = b"FloatStorage") -> bytes:
    return b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(source: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    sizes = b"(" + b"".join(map(number, shape)) + b"t"
    steps = b"(" + b"".join(map(number, strides)) + b"t"
    return REBUILD + b"(" + source + number(offset) + sizes + steps + b"\x89" + ORDERED + b"tR"


def state(**tensors: bytes) -> bytes:
    items = b"".join(text(name.replace("__", ".")) + body for name, body in tensors.items())
    return b"\x80\x02}(" + items + b"u."


def archive(
    path: Path, pickled: bytes, data: dict[str, bytes] | None = None, *, order: bytes = b"little", method: int = 0
) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", order)
        for key, raw in (data or {}).items():
            file.writestr(f"archive/data/{key}", raw)
        file.writestr("archive/version", b"3\n")


def folder(
    path: Path, pickled: bytes, data: dict[str, bytes] | None = None, *, order: bytes = b"little", method: int = 0
) -> Path:
    path.mkdir(exist_ok=True)
    archive(path / "pytorch_model.bin", pickled, data, order=order, method=method)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


SIX = np.arange(6, dtype=np.float32)
ONE = state(a__weight=tensor(storage("0", 6), 0, (2, 3), (3, 1)))


def test_a_file_that_torch_made_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(STATE.read_bytes())
    (tmp_path / "config.json").write_text("{}")
    source = opened(tmp_path, "torch")
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = {
        "whole": base, "transposed": base.T, "corner": base[1:3, 2:5], "every_second": base[:, ::2],
        "half": base.astype(np.float16), "double": (base.astype(np.float64) / 3).astype(np.float32),
        "table": np.arange(5), "mask": np.array([True, False]), "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }  # fmt: skip
    assert set(source.tensors) == {*expected, "brain"}
    for name, right in expected.items():
        assert source.read(name).dtype == right.dtype
        assert source.tensors[name].shape == right.shape
        np.testing.assert_array_equal(source.read(name), right)
    np.testing.assert_array_equal(bf16_values(source.read("brain")), base)
    assert source.tensors["brain"].dtype == "bfloat16"
    np.testing.assert_array_equal(source.read("transposed", 2), base.T[2])


def test_shards_follow_their_index(tmp_path: Path) -> None:
    folder(tmp_path, ONE, {"0": SIX.tobytes()}).joinpath("pytorch_model.bin").rename(tmp_path / "one.bin")
    folder(tmp_path, state(b=tensor(storage("0", 6), 0, (6,), (1,))), {"0": (SIX + 1).tobytes()})
    index = {"weight_map": {"a.weight": "one.bin", "b": "pytorch_model.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    source = opened(tmp_path, "torch")
    np.testing.assert_array_equal(source.read("a.weight"), SIX.reshape(2, 3))
    np.testing.assert_array_equal(source.read("b"), SIX + 1)
    (tmp_path / "one.bin").unlink()
    with pytest.raises(ModelFileError, match=r"one\.bin is missing"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["../evil.bin", "/etc/passwd", "model.pkl", 3])
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    folder(tmp_path, ONE, {"0": SIX.tobytes()})
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(ModelFileError, match="weight_map names"):
        opened(tmp_path)


def test_a_missing_numbered_piece_is_named(tmp_path: Path) -> None:
    folder(tmp_path, ONE, {"0": SIX.tobytes()})
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(ModelFileError, match="pytorch_model-00002-of-00002"):
        opened(tmp_path)


class _Evil:
    """Pickles as a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


MARKER = "it-ran"
HOSTILE = {
    "os.system": pickle.dumps({"a": _Evil(os.system, f"touch {MARKER}")}, 2),
    "eval": pickle.dumps({"a": _Evil(eval, f"open({str(MARKER)!r}, 'w')")}, 2),
    "getattr": b"\x80\x02c__builtin__\ngetattr\n.",
    "protocol 4": pickle.dumps({"a": _Evil(os.system, f"touch {MARKER}")}, 4),
    "protocol 0": pickle.dumps({"a": _Evil(os.system, f"touch {MARKER}")}, 0),
    "torch.load": b"\x80\x02ctorch\nload\n" + b"(" + text("x") + b"tR.",
    "a dotted name": b"\x80\x02ctorch\nFloatStorage.__init__\n.",
    "instance opcode": b"\x80\x02(" + text(f"touch {MARKER}") + b"ios\nsystem\n.",
    "object opcode": b"\x80\x02(cos\nsystem\n" + text("x") + b"o.",
    "new object": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "extension": b"\x80\x02\x82\x01.",
    "ordered dict with arguments": b"\x80\x02ccollections\nOrderedDict\n](e\x85R.",
    "nested tuples": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "nested tuples as a key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "nested lists": b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b".",
    "a dict in itself": b"\x80\x02}q\x00" + text("state_dict") + b"h\x00s.",
    "too many opcodes": b"\x80\x02" + b"N" * MAX_OPCODES,
    "huge memo": b"\x80\x02}r\xff\xff\xff\xff.",
    "unset memo": b"\x80\x02j\x01\x00\x00\x00.",
    "empty stack": b"\x80\x02.",
    "empty": b"",
    "no end": b"\x80\x02}",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xffabc",
    "number of 255 bytes": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "name without an end": b"\x80\x02c" + b"a" * 5000,
    "no tensors": b"\x80\x02}" + text("a") + number(3) + b"s.",
    "a list": b"\x80\x02].",
    "build of no dict": b"\x80\x02]}b.",
    "odd items": b"\x80\x02}(" + text("a") + b"u.",
    "list key": b"\x80\x02}]Ns.",
    "mark as a value": b"\x80\x02}(u(.",
    "not utf-8": b"\x80\x02}X\x01\x00\x00\x00\xff.",
    "a storage alone": b"\x80\x02}" + text("a") + storage("0", 6) + b"s.",
    "persistent id of another kind": b"\x80\x02" + text("x") + b"Q.",
    "storage below zero": state(a=tensor(storage("0", -1), 0, (2,), (1,))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_and_nothing_runs(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin"):
        opened(folder(tmp_path, HOSTILE[name], {"0": SIX.tobytes()}))
    assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(1, (2, 3), (3, 1)), (0, (7,), (1,)), (0, (2, 3), (4, 1)), (0, (2**40,), (0,)), (2**40, (1,), (1,)),
     (0, (2, 3), (3,)), (0, (1,) * 17, (1,) * 17), (0, (-1,), (1,)), (0, (2,), (-1,))],
)  # fmt: skip
def test_views_that_leave_their_storage_are_refused(
    tmp_path: Path, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    pickled = state(a=tensor(storage("0", 6), offset, shape, strides))
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin.*makes a tensor"):
        opened(folder(tmp_path, pickled, {"0": SIX.tobytes()}))


@pytest.mark.parametrize("data", [{}, {"0": SIX.tobytes()[:-1]}, {"0": SIX.tobytes() * 2}, {"1": SIX.tobytes()}])
def test_storages_that_are_missing_or_of_another_size_are_refused(tmp_path: Path, data: dict[str, bytes]) -> None:
    with pytest.raises(ModelFileError, match=r"a\.weight.*archive/data/0|archive/data/0.*a\.weight"):
        opened(folder(tmp_path, ONE, data))


def test_the_old_format_and_big_endian_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder(tmp_path, ONE, {"0": SIX.tobytes()}, order=b"big")
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        opened(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))
    with pytest.raises(UnsupportedModelError, match="save it again"):
        opened(tmp_path)


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, ONE, {"0": SIX.tobytes()}, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelFileError, match="compressed"):
        opened(tmp_path)


def test_every_truncation_and_every_changed_byte_is_an_error_or_reads(tmp_path: Path) -> None:
    folder(tmp_path, ONE, {"0": SIX.tobytes()})
    path = tmp_path / "pytorch_model.bin"
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    for length in range(len(sound)):
        path.write_bytes(sound[:length])
        with pytest.raises(MlxinferError):
            opened(tmp_path)
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            source = opened(tmp_path)
            for name in source.tensors:
                source.read(name)
        except MlxinferError as error:
            assert "pytorch_model.bin" in str(error)  # noqa: PT017


def test_the_length_of_a_pickle_is_bounded() -> None:
    with pytest.raises(ModelFileError, match="at most"):
        read_tensors(b"N" * (17 << 20), "x.bin")


@pytest.mark.parametrize("count", ["00000", "10001"])
def test_a_number_of_pieces_that_cannot_be_is_refused(tmp_path: Path, count: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / f"pytorch_model-00001-of-{count}.bin").write_bytes(b"PK")
    with pytest.raises(ModelFileError, match=f"there are {int(count)} pieces"):
        open_source(tmp_path)


def test_the_fingerprint_notices_a_file_that_is_written_into(tmp_path: Path) -> None:
    folder(tmp_path, ONE, {"0": SIX.tobytes()})
    source = opened(tmp_path)
    before = source.fingerprint()
    assert source.fingerprint() == before
    os.utime(tmp_path / "pytorch_model.bin", ns=(1, 1))
    assert source.fingerprint() != before
