"""Processes that are killed, run out of disk or write at once: real processes over one folder."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.engine.test_disk import check, files, put, tier

ROOT = Path(__file__).parents[3]
CHILD = """
import os, resource, signal, sys
from pathlib import Path
from mlxinfer.engine import disk_files
from tests.unit.engine.test_disk import check, put, tier
folder = Path(sys.argv[1])
"""


def child(code: str, folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD + code, str(folder), *args]
    # Its log goes through a pipe: to pytest's own file it couldn't be written under a limit of file sizes.
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def ended(process: subprocess.Popen[str]) -> int:
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode


KILLED = """
call, count = sys.argv[2], int(sys.argv[3])
real = getattr(os, call)
def dying(*args, **more):
    global count
    count -= 1
    if count == 0:
        if call == "pwrite":
            real(args[0], args[1][: len(args[1]) // 2], args[2])
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
t = tier(folder)
setattr(os, call, dying)
put(t, (1, 2, 3))
"""


@pytest.mark.parametrize(("call", "count"), [("pwrite", 1), ("pwrite", 3), ("pwrite", 5), ("fsync", 1), ("rename", 1)])
def test_a_process_killed_in_mid_write_loses_that_entry_only(tmp_path, call, count):
    put(tier(tmp_path), (9, 9))
    assert ended(child(KILLED, tmp_path, call, str(count))) == -signal.SIGKILL
    assert len(files(tmp_path, "*.tmp")) == 1
    t = tier(tmp_path)
    assert files(tmp_path, "*.tmp") == []
    assert check(t, (9, 9))
    assert (t.lookup("k", (1, 2, 3), 3, False), t.counters.damaged) == (None, 0)
    assert put(t, (1, 2, 3))


def test_a_process_killed_right_after_the_rename_keeps_its_entry(tmp_path):
    assert ended(child(KILLED, tmp_path, "fsync", "2")) == -signal.SIGKILL
    assert check(tier(tmp_path), (1, 2, 3))


WAITS = """
real = os.rename
def waiting(*args):
    print("writing", flush=True)
    sys.stdin.readline()
    real(*args)
t = tier(folder)
os.rename = waiting
assert put(t, (1, 2, 3))
"""


def test_a_start_leaves_what_another_process_is_writing(tmp_path):
    process = child(WAITS, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert len(tier(tmp_path)) == 0
        assert len(files(tmp_path, "*.tmp")) == 1
        process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert check(tier(tmp_path), (1, 2, 3))


LIMITED = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
t = tier(folder)
assert put(t, (1,))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
assert not put(t, (2, 3), width=100_000)
assert t.counters.write_errors == 1, t.counters
assert check(t, (1,))
"""


@pytest.mark.parametrize("limit", [0, 100, 10_000, 1_000_000])
def test_a_file_that_may_not_grow_further_leaves_nothing_and_ends_nothing(tmp_path, limit):
    assert ended(child(LIMITED, tmp_path, str(limit))) == 0
    assert (len(files(tmp_path)), files(tmp_path, "*.tmp")) == (1, [])


FULL = """
t = tier(folder)
assert put(t, (1,))
assert not put(t, (2,), width=200_000)
assert t.counters.write_errors == 1, t.counters
assert [p.suffix for p in (folder / "cache" / "f1").iterdir()] == [".kv"]
assert check(tier(folder), (1,))
"""


def test_a_full_disk_leaves_what_was_there(tmp_path):
    # A file system of 1 MB that goes with the child's own mount namespace.
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(tmp_path)]
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        pytest.skip("a small file system takes Linux")
    if subprocess.run([*mount, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("this user may not mount a small file system")
    command = [*mount, sys.executable, "-c", CHILD + FULL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr


WRITES = """
t = tier(folder, max_bytes=200_000)
for n in range(40):
    put(t, (int(sys.argv[2]), n), width=1000)
    put(t, (7, n), width=1000)
    check(t, (7, n), width=1000)
assert t.counters.damaged == t.counters.read_errors == 0, t.counters
"""


def test_processes_that_write_at_once_never_see_half_an_entry(tmp_path):
    processes = [child(WRITES, tmp_path, str(n)) for n in (1, 2)]
    assert [ended(process) for process in processes] == [0, 0]
    t = tier(tmp_path)
    assert (len(t), t.counters.damaged, files(tmp_path, "*.tmp")) == (len(files(tmp_path)), 0, [])
    assert sum(check(t, (7, n), width=1000) for n in range(40)) >= 1
    # Each may have checked the cap just before the other wrote.
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 200_000 + 20_000
