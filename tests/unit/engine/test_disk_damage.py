"""Damaged, foreign and hostile files in the disk tier: never an error, never a wrong byte, never much memory."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxinfer.engine.disk_format import CHUNK, PREFIX, VERSION, BodyDigest, aligned
from tests.unit.engine.test_disk import check, files, put, tier

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.engine.disk import DiskTier

TOKENS = (1, 2, 3)
FIELDS = {"magic": 0, "version": 8, "JSON bytes": 12, "tokens": 16, "body bytes": 24, "body digest": 32, "digest": 64}
"""Where each field of the prefix begins."""


def entry(folder: Path, *, width: int = 4) -> Path:
    assert put(tier(folder), TOKENS, width=width)
    return files(folder)[0]


def assert_gone(folder: Path, path: Path, *, removed: bool = True) -> DiskTier:
    """A fresh start doesn't find `path`, serves nothing from it and has counted it."""
    t = tier(folder)
    assert not check(t, TOKENS)
    assert path.exists() != removed
    assert (t.counters.damaged, t.counters.foreign) == (int(removed), int(not removed))
    assert put(t, TOKENS)
    assert check(t, TOKENS)
    return t


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_that_ends_within_a_field_of_the_prefix_is_removed(tmp_path, field):
    path = entry(tmp_path)
    os.truncate(path, FIELDS[field] + 1)
    assert_gone(tmp_path, path)


@pytest.mark.parametrize("at", [0, PREFIX.size, PREFIX.size + 40, -65, -1])
def test_a_file_that_ends_in_its_json_or_its_body_is_removed(tmp_path, at):
    path = entry(tmp_path)
    os.truncate(path, at % path.stat().st_size)
    assert_gone(tmp_path, path)


def test_a_file_that_is_longer_than_it_says_is_removed(tmp_path):
    path = entry(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(64))
    assert_gone(tmp_path, path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("field", [f for f in FIELDS if f != "version"])
def test_a_flipped_bit_in_any_field_of_the_prefix_is_noticed_at_the_start(tmp_path, field):
    path = entry(tmp_path)
    flip(path, FIELDS[field] + 1)
    assert_gone(tmp_path, path)


def test_a_file_of_another_version_is_ignored_and_left(tmp_path):
    path = entry(tmp_path)
    flip(path, FIELDS["version"])
    assert_gone(tmp_path, path, removed=False)


def test_a_flipped_bit_in_the_json_the_tokens_or_the_padding_is_noticed_at_the_start(tmp_path):
    path = entry(tmp_path)
    whole = path.read_bytes()
    _, _, json_bytes, count, *_ = PREFIX.unpack(whole[: PREFIX.size])
    end = PREFIX.size + json_bytes + 4 * count
    for at in (PREFIX.size, PREFIX.size + json_bytes - 1, PREFIX.size + json_bytes, end - 1, end, aligned(end) - 1):
        path.write_bytes(whole)
        flip(path, at)
        assert_gone(tmp_path, path)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 0.9999999])
def test_a_flipped_bit_in_the_body_is_noticed_before_anything_is_served(tmp_path, place):
    path = entry(tmp_path, width=3 * CHUNK // 24)
    size = path.stat().st_size
    body = size - PREFIX.unpack(path.read_bytes()[: PREFIX.size])[4]
    flip(path, body + int(place * (size - body)))
    t = tier(tmp_path)
    assert not check(t, TOKENS)
    assert (t.counters.damaged, path.exists()) == (1, False)


def test_a_file_damaged_after_the_start_is_not_served(tmp_path):
    path = entry(tmp_path)
    t = tier(tmp_path)
    os.truncate(path, 200)
    assert not check(t, TOKENS)
    assert (t.counters.damaged, path.exists(), len(t)) == (1, False, 0)


def test_a_file_that_cannot_be_read_is_left_where_it_is(tmp_path, monkeypatch):
    path = entry(tmp_path)
    t = tier(tmp_path)

    def broken(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", broken)
        assert not check(t, TOKENS)
    assert (t.counters.read_errors, t.counters.damaged, path.exists()) == (1, 0, True)


def forge(path: Path, *, body: bytes = bytes(64), numbers: dict[str, int] | None = None, **changed: Any) -> None:
    """A file with right digests and whatever else is given."""
    values = {"fingerprint": "f1", "key": "k", "checkpoints": [], "meta": {}, "arrays": [["x", "uint8", [64], 0]]}
    values |= changed
    text = values.pop("text", None) or json.dumps(values).encode()
    ids = np.asarray(TOKENS, "<u4").tobytes()
    size = PREFIX.size + len(text) + len(ids)
    rest = text + ids + bytes(aligned(size) - size)
    digest = BodyDigest()
    digest.update(memoryview(body))
    fields = {"version": VERSION, "json": len(text), "tokens": len(TOKENS), "body": len(body)} | (numbers or {})
    start = PREFIX.pack(b"mlxikv\r\n", *fields.values(), digest.digest(), bytes(32))[:-32]
    path.write_bytes(start + hashlib.sha256(start + rest).digest() + rest + body)


@pytest.fixture
def folder(tmp_path) -> Path:
    entry(tmp_path).unlink()
    return tmp_path / "cache" / "f1"


def found(folder: Path) -> tuple[DiskTier, bool]:
    """Load and read `folder` as a request would; whether there was anything to serve."""
    t = tier(folder.parent.parent)
    hit = t.lookup("k", TOKENS, 3, False)
    return t, hit is not None and t.read(hit[0]) is not None


def test_a_forged_file_without_a_fault_is_read_so_that_the_next_tests_mean_something(folder):
    forge(folder / "a.kv")
    assert found(folder)[1]


HUGE = 2**63


@pytest.mark.parametrize(
    "changed",
    [
        {"numbers": {"json": 2**32 - 1}},
        {"numbers": {"tokens": HUGE}},
        {"numbers": {"tokens": 0}},
        {"numbers": {"body": HUGE}},
        {"numbers": {"json": 5}},
        {"arrays": [["x", "uint8", [HUGE], 0]]},
        {"arrays": [["x", "uint8", [2**39, 2**39, 2**39], 0]]},
        {"arrays": [["x", "uint8", [-64], 0]]},
        {"arrays": [["x", "uint8", [64.0], 0]]},
        {"arrays": [["x", "uint8", [True], 0]]},
        {"arrays": [["x", "uint8", [1] * 9, 0]]},
        {"arrays": [["x", "uint8", 64, 0]]},
        {"arrays": [["x", "uint8", [64], 64]]},
        {"arrays": [["x", "uint8", [64], -64]]},
        {"arrays": [["x", "uint8", [64], 0.0]]},
        {"arrays": [["x", "uint8", [64], False]]},
        {"arrays": [["x", "uint8", [32], 0], ["y", "uint8", [32], 32]]},
        {"arrays": [["x", "uint8", [64], 0], ["y", "uint8", [64], 0]]},
        {"arrays": [["x", "uint8", [65], 0]]},
        {"arrays": [["x", "uint8", [0], 0]]},
        {"arrays": [["x", "uint8", [64], 0], ["x", "uint8", [0], 64]]},
        {"arrays": [["x", "object", [8], 0]]},
        {"arrays": [["x", ["uint8"], [64], 0]]},
        {"arrays": [["x" * 257, "uint8", [64], 0]]},
        {"arrays": [[None, "uint8", [64], 0]]},
        {"arrays": [["x", "uint8", [64]]]},
        {"arrays": [{"name": "x"}]},
        {"arrays": {}},
        {"arrays": [["x", "uint8", [0], 0]] * 70_000},
        {"checkpoints": [0]},
        {"checkpoints": [4]},
        {"checkpoints": [2, 2]},
        {"checkpoints": ["1"]},
        {"checkpoints": None},
        {"meta": []},
        {"key": 5},
        {"fingerprint": None},
        {"more": 1},
        {"text": b"["},
        {"text": b"[]"},
        {"text": b"\xff"},
        {"text": b"[" * 200_000},
        {"text": b'{"a":' * 100_000},
        {"text": b"9" * 10_000},
    ],
)
def test_a_hostile_head_with_right_digests_is_removed_without_asking_for_its_memory(folder, changed):
    path = folder / "a.kv"
    forge(path, **changed)
    tracemalloc.start()
    try:
        t, served = found(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not served
    assert (t.counters.damaged, path.exists()) == (1, False)
    assert peak < 40 * 2**20


def test_a_sparse_file_above_the_cap_is_not_read(folder):
    path = folder / "a.kv"
    forge(path)
    os.truncate(path, 2**40)
    t, served = found(folder)
    assert not served
    assert t.counters.damaged == 0


class TestFuzz:
    """Any bytes at all in place of a head: nothing but "not there"."""

    common = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

    @common
    @given(data=st.binary(max_size=300))
    def test_any_file_is_ignored(self, folder, data):
        (folder / "a.kv").write_bytes(data)
        assert not found(folder)[1]

    @common
    @given(at=st.integers(0, 400), new=st.binary(min_size=1, max_size=12))
    def test_a_file_with_other_bytes_anywhere_is_served_only_if_they_are_the_same(self, folder, at, new):
        path = folder / "a.kv"
        forge(path, body=bytes(range(64)))
        whole = path.read_bytes()
        at = min(at, len(whole) - len(new))
        other = whole[:at] + new + whole[at + len(new) :]
        path.write_bytes(other)
        assert found(folder)[1] == (other == whole)

    @common
    @given(
        values=st.dictionaries(
            st.sampled_from(["fingerprint", "key", "checkpoints", "meta", "arrays"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["x", "uint8", "f1", "k"]),
                lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
                max_leaves=12,
            ),
        ),
        numbers=st.dictionaries(st.sampled_from(["json", "tokens", "body"]), st.integers(0, 2**32 - 1), max_size=1),
    )
    def test_any_json_with_right_digests_is_ignored_or_served_as_it_says(self, folder, values, numbers):
        forge(folder / "a.kv", numbers=numbers, **values)
        t, served = found(folder)
        if served:
            ((_, entries),) = t._entries.items()
            assert len(entries) == 1


def test_the_prefix_has_the_size_that_the_format_says():
    assert PREFIX.size == struct.calcsize("<8sIIQQ32s32s") == 96
