"""The folder appears whole or not at all: locks, resumes, full disks, and what is replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.convert import writing
from mlxinfer.convert.job import ConvertOptions, convert
from mlxinfer.convert.places import locked, set_aside, work_folder
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ConversionError, InvalidRequestError
from tests.unit.convert import fake
from tests.unit.convert.fake import FakeSource, folder_bytes

Q4 = ConvertOptions(packing=Packing(4, 64), max_shard_bytes=20_000)
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def fake_source(**rest: Any) -> FakeSource:
    """Its first tensor is packed, with scales that bfloat16 rounds: the report must say so after a resume too."""
    return fake.fake_source(packed={EMBED: Packing(4, 64)}, **rest)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed conversion writes."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    convert(fake_source(), folder, Q4)
    return folder_bytes(folder)


class Killed(BaseException):
    """In place of a kill: nothing catches it."""


def killed_at(source: FakeSource, name: str, destination: Path, options: ConvertOptions = Q4) -> None:
    """Begin a conversion and break it off when `name` is read, as a kill would: nothing is tidied up."""

    def die(read: str) -> None:
        if read == name:
            raise Killed

    source.before_read = die
    with pytest.raises(Killed):
        convert(source, destination, options)
    source.before_read = lambda read: None


OLD = {"config.json": b"{}", "model.safetensors": b"old"}


def old_model(folder: Path) -> None:
    folder.mkdir()
    for name, data in OLD.items():
        (folder / name).write_bytes(data)


def test_a_run_that_was_cut_off_is_taken_up_and_gives_the_same_bytes(out: Path, whole: dict[str, bytes]) -> None:
    source = fake_source()
    killed_at(source, HEAD, out)
    assert not out.exists()
    source.reads.clear()
    convert(source, out, Q4)
    assert [name for name, _ in source.reads] == [HEAD]
    assert folder_bytes(out) == whole
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("change", ["options", "source"])
def test_another_plan_starts_from_nothing(change: str, out: Path, whole: dict[str, bytes]) -> None:
    source = fake_source()
    if change == "source":
        source.salt = "before"
    killed_at(source, HEAD, out, ConvertOptions() if change == "options" else Q4)
    source.salt = ""
    source.reads.clear()
    convert(source, out, Q4)
    assert EMBED in [name for name, _ in source.reads]
    assert folder_bytes(out) == whole


@pytest.mark.parametrize(
    "state", [b"", b"[]", b"{}", b'{"plan": "x", "done": 3, "rounded": []}', b'{"plan": 1}', b"\xff\xfe", b'{"a": ']
)
def test_a_state_that_makes_no_sense_is_thrown_away(state: bytes, out: Path, whole: dict[str, bytes]) -> None:
    killed_at(fake_source(), HEAD, out)
    (work_folder(out) / writing.STATE).write_bytes(state)
    (work_folder(out) / "stray").mkdir()
    convert(fake_source(), out, Q4)
    assert folder_bytes(out) == whole


@pytest.mark.parametrize("left", [None, 0, -1])
def test_a_shard_that_was_deleted_or_cut_meanwhile_is_written_again(
    left: int | None, out: Path, whole: dict[str, bytes]
) -> None:
    killed_at(fake_source(), HEAD, out)
    shard = work_folder(out) / sorted(name for name in whole if name.endswith(".safetensors"))[0]
    if left is None:
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size - 1 if left else 0)
    convert(fake_source(), out, Q4)
    assert folder_bytes(out) == whole


@pytest.mark.parametrize("done", [-1, 10**9, True, "3", None])
def test_a_state_with_an_impossible_count_is_thrown_away(done: Any, out: Path, whole: dict[str, bytes]) -> None:
    killed_at(fake_source(), HEAD, out)
    path = work_folder(out) / writing.STATE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"done": done}))
    convert(fake_source(), out, Q4)
    assert folder_bytes(out) == whole


def test_the_state_never_says_more_than_was_synced(
    out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int | None]] = []
    fsync, save = os.fsync, writing.Work._save

    def syncing(descriptor: int) -> None:
        events.append(("sync", descriptor))
        fsync(descriptor)

    def saving(work: writing.Work) -> None:
        if work.done:
            assert events[-1] == ("sync", work._file)
        events.append(("save", work.done))
        save(work)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(writing, "SYNC_BYTES", 1)
    monkeypatch.setattr(writing.Work, "_save", saving)
    convert(fake_source(), out, Q4)
    saved = [done for event, done in events if event == "save"]
    assert saved == list(range(len(saved)))
    assert len(saved) > 10
    assert folder_bytes(out) == whole


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, set[int]()

    def syncing(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", syncing)
    convert(fake_source(), out, Q4)
    assert {path.stat().st_ino for path in (out, out.parent, *out.iterdir())} <= synced


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_said_and_what_was_done_is_kept(
    code: int, out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, written = os.pwrite, [0]

    def full(descriptor: int, data: Any, offset: int) -> int:
        written[0] += len(data)
        if written[0] > 30_000:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConversionError, match=r"the disk of .* is full, with .* still to write; what is done is kept"):
        convert(fake_source(), out, Q4)
    assert not out.exists()
    monkeypatch.setattr(os, "pwrite", pwrite)
    source = fake_source()
    convert(source, out, Q4)
    assert EMBED not in [name for name, _ in source.reads]
    assert folder_bytes(out) == whole


def test_a_real_limit_on_file_sizes_is_an_error_and_no_signal(out: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(ConversionError, match="the disk"):
            convert(fake_source(), out, ConvertOptions())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not out.exists()


def test_too_little_room_is_said_before_anything_is_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_source()
    usage = shutil.disk_usage(out.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConversionError, match=r"are needed and 1\.0 kB are free"):
        convert(source, out, Q4)
    assert source.reads == []
    assert list(out.parent.iterdir()) == []


def test_too_little_room_for_the_rest_keeps_what_is_done(
    out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(fake_source(), HEAD, out)
    usage = shutil.disk_usage(out.parent)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ConversionError, match="are needed"):
            convert(fake_source(), out, Q4)
    source = fake_source()
    convert(source, out, Q4)
    assert [name for name, _ in source.reads] == [HEAD]
    assert folder_bytes(out) == whole


def test_short_writes_are_continued(out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:777], offset))
    convert(fake_source(), out, Q4)
    assert folder_bytes(out) == whole


def test_two_conversions_into_one_place_do_not_mix(out: Path, whole: dict[str, bytes]) -> None:
    refused: list[str] = []
    source = fake_source()

    def meanwhile(name: str) -> None:
        if name == HEAD:
            with pytest.raises(ConversionError) as error:
                convert(fake_source(), out, Q4)
            refused.append(str(error.value))

    source.before_read = meanwhile
    convert(source, out, Q4)
    assert len(refused) == 1
    assert "another conversion is writing" in refused[0]
    assert folder_bytes(out) == whole


def test_a_lock_on_a_folder_that_was_renamed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = tmp_path / "work", tmp_path / "done"
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        """As if the one who held it had just finished."""
        if not done.exists():
            folder.rename(done)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(folder):
        assert folder.is_dir()


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    code = (
        "import os\nfrom pathlib import Path\nfrom mlxinfer.convert.places import locked\n"
        f"with locked(Path({str(folder)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with locked(folder):
        pass


def test_a_destination_that_exists_is_left_alone_unless_told(out: Path, whole: dict[str, bytes]) -> None:
    old_model(out)
    (out / "old").write_text("old")
    source = fake_source()
    with pytest.raises(InvalidRequestError, match="exists; name another destination, or --overwrite replaces it"):
        convert(source, out, Q4)
    assert source.reads == []
    assert (out / "old").read_text() == "old"
    convert(source, out, ConvertOptions(packing=Q4.packing, max_shard_bytes=20_000, overwrite=True))
    assert folder_bytes(out) == whole
    assert list(out.parent.iterdir()) == [out]


def test_an_overwriting_run_that_fails_leaves_the_old_model(out: Path) -> None:
    old_model(out)
    killed_at(fake_source(), HEAD, out, ConvertOptions(overwrite=True))
    assert folder_bytes(out) == OLD


def test_a_rename_that_fails_puts_the_old_model_back(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_model(out)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source == work_folder(out):
            raise PermissionError(errno.EACCES, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ConversionError, match="no"):
        convert(fake_source(), out, ConvertOptions(overwrite=True))
    assert folder_bytes(out) == OLD


def test_a_kill_between_the_two_renames_is_mended_by_the_same_command(
    out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    old_model(out)
    rename = os.rename
    options = ConvertOptions(packing=Q4.packing, max_shard_bytes=20_000, overwrite=True)

    def dying(source: Path, target: Path) -> None:
        if source == work_folder(out):
            raise Killed
        rename(source, target)

    monkeypatch.setattr(os, "rename", dying)
    with pytest.raises(Killed):
        convert(fake_source(), out, options)
    assert (set_aside(out) / "config.json").read_text() == "{}"
    monkeypatch.setattr(os, "rename", rename)
    convert(fake_source(), out, options)
    assert folder_bytes(out) == whole
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("overwrite", [False, True])
def test_source_and_destination_may_not_hold_each_other(overwrite: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(folder)
    source = fake_source(path=folder)
    options = ConvertOptions(overwrite=overwrite)
    for destination, problem in (
        (folder, "is the source itself"),
        (tmp_path / "link", "is the source itself"),
        (folder / "sub", "lies inside the source"),
        (tmp_path / "link" / "sub", "lies inside the source"),
        (tmp_path / "a", "holds the source"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            convert(source, destination, options)
    assert folder_bytes(folder) == {"config.json": b"{}"}


def test_only_a_model_folder_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "docs")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.json").write_text("{}")
    for name, problem in (
        ("docs", "no model folder"), ("project", "no model folder"), ("file", "is no folder"), ("link", "is no folder")
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=problem):
            convert(fake_source(), tmp_path / name, ConvertOptions(overwrite=True))
    assert (tmp_path / "docs" / "thesis.txt").read_text() == "years"


def test_missing_folders_above_the_destination_are_made_and_a_file_there_is_an_error(tmp_path: Path) -> None:
    convert(fake_source(), tmp_path / "a" / "b" / "out", Q4)
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequestError, match="is no folder"):
        convert(fake_source(), tmp_path / "file" / "out", Q4)


def test_a_destination_that_cannot_be_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, problem in (
        ("x" * 300, "File name too long"), ("x" * 245, "File name too long"), ("circle/out", "can't be used")
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=problem):
            convert(fake_source(), tmp_path / name, Q4)

    def refused(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(InvalidRequestError, match="can't be used: Permission denied"):
        convert(fake_source(), tmp_path / "locked" / "out", Q4)


def test_a_folder_of_someone_elses_is_not_replaced(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(fake_source(), out, Q4)
    monkeypatch.setattr(os, "access", lambda path, mode: path != out)
    with pytest.raises(InvalidRequestError, match="no permission to delete what is in"):
        convert(fake_source(), out, ConvertOptions(overwrite=True))


def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidRequestError, match="no permission to write in"):
        convert(fake_source(), tmp_path / "out", Q4)


def test_a_link_in_place_of_a_shard_is_not_followed(out: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine" * 100_000)
    source = fake_source()
    killed_at(source, HEAD, out)
    shards = [name for name in whole if name.endswith(".safetensors")]
    for shard in work_folder(out).glob("*.safetensors"):
        shard.unlink()
        shard.symlink_to(victim)

    def link(read: str) -> None:
        with contextlib.suppress(FileExistsError):
            (work_folder(out) / shards[-1]).symlink_to(victim)

    source.before_read = link
    with pytest.raises(ConversionError):
        convert(source, out, Q4)
    assert victim.read_bytes() == b"mine" * 100_000
    (work_folder(out) / shards[-1]).unlink()
    convert(fake_source(), out, Q4)
    assert folder_bytes(out) == whole
    assert victim.read_bytes() == b"mine" * 100_000


def test_the_destination_is_relative_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    convert(fake_source(), Path("out"), Q4)
    assert folder_bytes(tmp_path / "out") == whole
