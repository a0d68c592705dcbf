"""A model's fingerprint changes with anything that changes its keys and values."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from mlxinfer.engine.fingerprint import GGUF_HEAD_BYTES, fingerprint
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

EXTRA = {"dtype": "float32", "kv_bits": "none"}


def write(path: Path, data: bytes, time: int = 1_000_000) -> None:
    path.write_bytes(data)
    os.utime(path, (time, time))


def safetensors(name: str, size: int) -> bytes:
    header = json.dumps({name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "config.json", b'{"model_type": "llama"}')
    write(tmp_path / "model.safetensors", safetensors("a", 100))
    return tmp_path


def test_the_same_files_give_the_same_fingerprint_which_can_name_a_folder(folder):
    first = fingerprint("folder", folder, EXTRA)
    assert fingerprint("folder", folder, dict(reversed(EXTRA.items()))) == first
    assert len(first) == 40
    assert first.isalnum()


@pytest.mark.parametrize(
    "change",
    [
        lambda f: write(f / "config.json", b'{"model_type": "qwen3"}'),
        lambda f: (f / "config.json").unlink(),
        lambda f: write(f / "model.safetensors", safetensors("b", 100)),
        lambda f: write(f / "model.safetensors", safetensors("a", 101)),
        lambda f: write(f / "model.safetensors", safetensors("a", 100), 1_000_001),
        lambda f: write(f / "model-extra.safetensors", safetensors("c", 100)),
        lambda f: (f / "model.safetensors").rename(f / "model-other.safetensors"),
    ],
)
def test_any_change_of_the_files_changes_it(folder, change):
    before = fingerprint("folder", folder, EXTRA)
    change(folder)
    assert fingerprint("folder", folder, EXTRA) != before


@pytest.mark.parametrize(
    "extra", [{}, {"dtype": "float16", "kv_bits": "none"}, {"dtypefloat32": "kv_bitsnone"}, EXTRA | {"x": ""}]
)
def test_how_the_model_is_run_changes_it(folder, extra):
    assert fingerprint("folder", folder, extra) != fingerprint("folder", folder, EXTRA)


def test_files_that_are_no_weights_dont_change_it(folder):
    before = fingerprint("folder", folder, EXTRA)
    write(folder / "README.md", b"words")
    assert fingerprint("folder", folder, EXTRA) == before


def test_a_gguf_is_known_by_its_first_megabyte_size_and_time(tmp_path):
    path = tmp_path / "m.gguf"
    data = bytes(GGUF_HEAD_BYTES + 10)
    seen = set()
    for content, time in ((data, 1), (b"x" + data[1:], 1), (data + b"y", 1), (data, 2)):
        write(path, content, time)
        seen.add(fingerprint("gguf", path, EXTRA))
    assert len(seen) == 4
    write(path, data, 1)
    assert fingerprint("gguf", path, EXTRA) in seen
    assert len(seen | {fingerprint("gguf", path, EXTRA)}) == 4


def test_every_part_of_a_split_gguf_counts(tmp_path):
    first = tmp_path / "m-00001-of-00002.gguf"
    second = tmp_path / "m-00002-of-00002.gguf"
    write(first, b"one")
    write(second, b"two")
    write(tmp_path / "m-00001-of-00003.gguf", b"another model")
    before = fingerprint("gguf", first, EXTRA)
    write(tmp_path / "m-00001-of-00003.gguf", b"another model, changed")
    assert fingerprint("gguf", first, EXTRA) == before
    write(second, b"too")
    assert fingerprint("gguf", first, EXTRA) != before


def test_a_missing_model_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ModelFileError, match=r"m\.gguf is missing"):
        fingerprint("gguf", tmp_path / "m.gguf", EXTRA)
    with pytest.raises(ModelFileError, match="safetensors"):
        fingerprint("folder", tmp_path, EXTRA)
