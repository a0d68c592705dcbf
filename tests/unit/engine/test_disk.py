"""The disk tier: what is written is found again, by its owner and its model only, within its limits."""

from __future__ import annotations

import logging
import os
import stat
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mlxinfer.engine import disk_files
from mlxinfer.engine.disk import PAUSE_S, DiskTier
from mlxinfer.engine.disk_format import ALIGN, DTYPES, StoredArray

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20


def arrays(length: int, *, seed: int = 0, width: int = 4) -> list[StoredArray]:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((1, 2, length, width), np.float32)
    return [
        StoredArray("0.keys", "float32", keys),
        StoredArray("0.values", "bfloat16", rng.integers(0, 2**16, (1, 2, length, 3), np.uint16)),
        StoredArray("empty", "float16", np.zeros((0, 3), np.float16)),
    ]


def tier(folder: Path, *, fingerprint: str = "f1", max_bytes: int = 10 * MB, **more) -> DiskTier:
    found = DiskTier(folder / "cache", fingerprint, max_bytes, **more)
    found.load_index()
    return found


def put(t: DiskTier, tokens, *, key: str = "k", seed: int = 0, width: int = 4, checkpoints=()) -> bool:
    return t.write(
        key, tokens, arrays(len(tokens), seed=seed, width=width), {"layers": [1, 2]}, checkpoints=checkpoints
    )


def check(t: DiskTier, tokens, *, key: str = "k", seed: int = 0, width: int = 4) -> bool:
    """Whether `tokens` are found, with exactly what `put` stored."""
    found = t.lookup(key, tokens, len(tokens), False)
    if found is None or found[1] < len(tokens):
        return False
    read = t.read(found[0])
    if read is None:
        return False
    for one, other in zip(read, arrays(len(found[0].tokens), seed=seed, width=width), strict=True):
        assert (one.name, one.dtype) == (other.name, other.dtype)
        assert one.data.dtype == DTYPES[one.dtype]
        np.testing.assert_array_equal(one.data, other.data)
    return True


def files(folder: Path, pattern: str = "*.kv") -> list[Path]:
    return sorted((folder / "cache").glob(f"*/{pattern}"))


def test_an_entry_is_found_again_after_a_restart(tmp_path):
    assert put(tier(tmp_path), (1, 2, 3), checkpoints=(1, 3))
    t = tier(tmp_path)
    assert check(t, (1, 2, 3))
    found = t.lookup("k", (1, 2, 3, 4), 4, True)
    assert found is not None
    entry, length = found
    assert (length, entry.checkpoints, entry.meta, entry.key) == (3, (1, 3), {"layers": [1, 2]}, "k")
    assert entry.nbytes == files(tmp_path)[0].stat().st_size
    assert (t.counters.read, t.counters.bytes_read) == (1, entry.nbytes)


def test_without_a_folder_nothing_is_found_and_none_is_made(tmp_path):
    t = tier(tmp_path)
    assert t.lookup("k", (1,), 1, False) is None
    assert not (tmp_path / "cache").exists()


def test_the_deepest_prefix_wins_and_a_state_only_counts_at_its_checkpoint(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2, 3, 4), checkpoints=(2, 4))
    put(t, (1, 2, 3, 9, 9), checkpoints=(1, 5), seed=1)
    for needs_state, expected in ((False, 4), (True, 2)):
        found = t.lookup("k", (1, 2, 3, 9, 8), 5, needs_state)
        assert found is not None
        assert found[1] == expected
    assert t.lookup("k", (1, 2, 3, 9, 9), 0, False) is None
    assert t.lookup("k", (2,), 1, False) is None


def test_another_key_or_another_model_never_sees_an_entry(tmp_path):
    put(tier(tmp_path), (1, 2, 3))
    assert tier(tmp_path).lookup("other", (1, 2, 3), 3, False) is None
    assert len(tier(tmp_path, fingerprint="f2")) == 0


def test_a_file_moved_into_another_models_folder_is_ignored_and_left(tmp_path):
    put(tier(tmp_path), (1, 2, 3))
    put(tier(tmp_path, fingerprint="f2"), (5,))
    source = next(p for p in files(tmp_path) if p.parent.name == "f1")
    moved = tmp_path / "cache" / "f2" / source.name
    source.rename(moved)
    t = tier(tmp_path, fingerprint="f2")
    assert (len(t), t.counters.foreign, moved.exists()) == (1, 1, True)


def test_folders_and_files_are_for_their_owner_only(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    old = os.umask(0)
    try:
        put(tier(tmp_path), (1, 2, 3))
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "cache", tmp_path / "cache" / "f1")}
    assert modes == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in files(tmp_path)} == {0o600}


def test_a_longer_entry_takes_the_place_of_those_it_begins_with(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2))
    put(t, (1, 3))
    put(t, (1, 2), key="other")
    put(t, (1, 2, 3))
    assert (len(files(tmp_path)), len(t), t.counters.superseded) == (3, 3, 1)
    assert check(t, (1, 2, 3))


def test_a_shorter_entry_that_alone_has_a_checkpoint_stays(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2), checkpoints=(2,))
    put(t, (1, 2, 3), checkpoints=(3,))
    assert len(t) == 2
    put(t, (1, 2, 3, 4), checkpoints=(1, 4))
    assert len(t) == 1


def test_what_a_longer_entry_holds_is_not_written_again(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2, 3, 4), checkpoints=(2, 4))
    before = t.counters.bytes_written
    assert put(t, (1, 2), checkpoints=(2,))
    assert (t.counters.bytes_written, t.counters.covered, len(t)) == (before, 1, 1)
    assert put(t, (1, 2, 3), checkpoints=(3,))
    assert (t.counters.written, len(t)) == (2, 2)


def test_an_entry_whose_file_is_gone_is_written_again(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2))
    files(tmp_path)[0].unlink()
    assert put(t, (1, 2))
    assert check(t, (1, 2))


def test_the_longest_unused_entries_of_any_model_make_room(tmp_path):
    size = 300_000
    t = tier(tmp_path, max_bytes=int(3.5 * size))
    other = tier(tmp_path, fingerprint="f2", max_bytes=int(3.5 * size))
    width = size // 8
    put(other, (9,), width=width)
    put(t, (1,), width=width)
    put(t, (2,), width=width)
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    first = t.lookup("k", (1,), 1, False)
    assert first is not None
    os.utime(first[0].path, (1_000_000, 1_000_000))
    assert check(t, (1,), width=width)
    assert put(t, (3,), width=width)
    assert put(t, (4,), width=width)
    assert [check(t, (n,), width=width) for n in (1, 2, 3, 4)].count(True) == 3
    assert check(t, (1,), width=width)
    assert not check(other, (9,), width=width)
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 3.5 * size


def test_what_was_removed_for_room_is_not_promised_any_more(tmp_path):
    t = tier(tmp_path, max_bytes=500_000)
    put(t, (1,), width=40_000)
    put(t, (2,), width=40_000)
    assert (len(t), t.lookup("k", (1,), 1, False)) == (1, None)


def test_an_entry_above_the_cap_is_refused_and_nothing_is_removed_for_it(tmp_path):
    t = tier(tmp_path, max_bytes=100_000)
    put(t, (1, 2))
    assert not put(t, (3,), width=100_000)
    assert (t.counters.refused, t.counters.evicted, len(files(tmp_path))) == (1, 0, 1)


def test_reading_counts_as_use(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2))
    (path,) = files(tmp_path)
    os.utime(path, (1, 1))
    check(t, (1, 2))
    assert path.stat().st_mtime > 1_000_000_000


def test_an_entry_that_another_process_removed_is_not_there(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2))
    files(tmp_path)[0].unlink()
    assert not check(t, (1, 2))
    assert (len(t), t.counters.damaged, t.counters.read_errors) == (0, 0, 0)


def test_an_entry_that_another_process_wrote_anew_is_read_the_next_time(tmp_path):
    t, other = tier(tmp_path), tier(tmp_path)
    put(t, (1, 2), checkpoints=(1,))
    put(other, (1, 2), checkpoints=(2,), seed=3)
    assert not check(t, (1, 2))
    assert check(t, (1, 2), seed=3)


def test_links_and_pipes_in_the_folder_are_left_alone(tmp_path):
    t = tier(tmp_path)
    put(t, (1, 2))
    (path,) = files(tmp_path)
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    os.mkfifo(path.with_name("a.kv"))
    (path.with_name("b.kv")).mkdir()
    assert not check(t, (1, 2))
    assert len(tier(tmp_path)) == 0
    assert outside.exists()


def test_arrays_that_lie_scattered_in_memory_are_stored_as_they_are_seen(tmp_path):
    t = tier(tmp_path)
    whole = np.arange(60, dtype=np.float32).reshape(1, 3, 20, 1)
    t.write("k", (1,), [StoredArray("x", "float32", whole[:, :, 2:7])], {})
    found = t.lookup("k", (1,), 1, False)
    assert found is not None
    read = t.read(found[0])
    assert read is not None
    np.testing.assert_array_equal(read[0].data, whole[:, :, 2:7])


def test_arrays_begin_at_multiples_of_the_alignment(tmp_path):
    put(tier(tmp_path), (1, 2, 3))
    assert files(tmp_path)[0].stat().st_size % ALIGN == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrays": [StoredArray("x", "float99", np.zeros(1))]}, "float99"),
        ({"arrays": [StoredArray("x", "float32", np.zeros(1, np.float16))]}, "float16 doesn't hold 'float32'"),
        ({"arrays": [StoredArray("x", "uint8", np.zeros(1, np.uint8))] * 2}, "occurs twice"),
        ({"checkpoints": (2, 1)}, "checkpoints"),
        ({"checkpoints": (4,)}, "checkpoints"),
        ({"meta": {"x": float("nan")}}, "JSON compliant"),
        ({"tokens": ()}, "0 tokens"),
    ],
)
def test_what_no_file_can_hold_is_the_callers_error(tmp_path, change, message):
    call = {"key": "k", "tokens": (1, 2, 3), "arrays": arrays(3), "meta": {}} | change
    with pytest.raises(ValueError, match=message):
        tier(tmp_path).write(**call)


@pytest.mark.parametrize("fingerprint", ["", "..", "a/b", "é"])
def test_a_fingerprint_must_be_able_to_name_a_folder(tmp_path, fingerprint):
    with pytest.raises(ValueError, match="letters and digits"):
        DiskTier(tmp_path, fingerprint, 1)


def test_after_a_failed_write_the_tier_rests_and_says_so_once(tmp_path, monkeypatch, caplog):
    now = [0.0]
    t = tier(tmp_path, clock=lambda: now[0])
    put(t, (1,))

    def full(*_):
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(disk_files.os, "pwrite", full)
        assert not put(t, (2,))
        assert not put(t, (3,))
        assert (t.counters.write_errors, t.counters.skipped) == (1, 1)
        now[0] += PAUSE_S
        assert not put(t, (4,))
    assert t.counters.write_errors == 2
    assert [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()] == [caplog.messages[0]]
    assert (len(files(tmp_path)), files(tmp_path, "*.tmp")) == (1, [])
    assert check(t, (1,))
    now[0] += PAUSE_S
    assert put(t, (5,))


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "rename", "close"])
def test_a_write_that_fails_anywhere_leaves_no_trace(tmp_path, monkeypatch, call):
    t = tier(tmp_path)
    put(t, (1,))
    real = getattr(os, call)

    def failing(*args, **more):
        if call == "open" and not args[1] & os.O_CREAT:
            return real(*args, **more)
        if call == "close":
            real(*args, **more)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(disk_files.os, call, failing)
        assert not put(t, (2, 3))
    assert t.counters.write_errors == 1
    assert files(tmp_path, "*.tmp") == []
    again = tier(tmp_path)
    assert check(again, (1,))
    # Closing fails after the rename: the entry is whole and may be found.
    assert check(again, (2, 3)) == (call == "close")


def test_a_folder_that_cannot_be_made_ends_no_request(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    t = tier(tmp_path)
    assert not put(t, (1, 2))
    assert t.counters.write_errors == 1


def test_a_folder_with_the_name_of_an_entry_costs_that_entry_only(tmp_path, caplog):
    t = tier(tmp_path)
    assert put(t, [1, 2, 3])
    (name,) = files(tmp_path)
    name.unlink()
    name.mkdir()
    again = tier(tmp_path)
    assert not put(again, [1, 2, 3])
    assert "is a folder" in caplog.text
    assert put(again, [7, 8, 9]), "the others are written at once"
    assert check(again, [7, 8, 9], seed=0)
    assert not list(tmp_path.rglob("*.tmp"))
