"""Files of models are read only where they are regular files: nothing else blocks, fills memory or leaks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import open_regular, read_json_object, read_regular
from mlxinfer.formats.gguf import read_gguf
from mlxinfer.formats.safetensors import INDEX_NAME, check_safetensors, shard_files
from tests.unit.formats.odd_files import ODD, put_odd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)


def read_index(path: Path) -> object:
    return shard_files(path.parent)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.json", lambda p: read_regular(p, 100)),
        ("a.json", read_json_object),
        ("a.safetensors", check_safetensors),
        ("a.gguf", read_gguf),
        (INDEX_NAME, read_index),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, kind: str, name: str, read: Callable[[Path], object]
) -> None:
    path = put_odd(tmp_path / name, kind)
    with pytest.raises(ModelFileError, match="no regular file"):
        read(path)


def test_a_refused_folder_costs_no_descriptor(tmp_path: Path) -> None:
    spare = os.dup(0)
    os.close(spare)
    for _ in range(3):
        with pytest.raises(ModelFileError):
            open_regular(tmp_path)
    again = os.dup(0)
    os.close(again)
    assert again == spare


def test_a_name_without_a_file_is_none_and_an_impossible_name_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("absent", "file/below"):
        assert read_regular(tmp_path / name, 10) is None
    for name in ("a" * 300, "nul\0"):
        with pytest.raises(ModelFileError, match="cannot be opened"):
            read_regular(tmp_path / name, 10)


def test_a_file_is_read_up_to_its_limit_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ModelFileError, match="more than 4 bytes"):
        read_regular(tmp_path / "a", 4)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000, "\udcff"])
def test_what_is_no_json_object_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelFileError, match=r"a\.json"):
        read_json_object(tmp_path / "a.json")
