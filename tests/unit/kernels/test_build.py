"""A build happens once, whole or not at all, and whatever is in its way is told in words."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlxinfer.kernels import build as building
from mlxinfer.kernels import compiling, tools
from mlxinfer.kernels.build import KEPT, build, earlier_failure, find, home, identity
from mlxinfer.kernels.tools import BuildCancelledError, BuildError, find_tools
from tests.unit.kernels.fake_compiler import FakeCompiler, compiler

__all__ = ["compiler"]

ROOT = Path(__file__).parents[3]
# A process that builds with the fake compiler: what the fixture patches is told on its command line.
BUILDER = """
import sys
from pathlib import Path
from mlxinfer.kernels import build, compiling
build.SOURCES = compiling.SOURCES = Path(sys.argv[1])
print("begun", flush=True)
print(build.build(Path(sys.argv[2])), flush=True)
"""


def builder(tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "cpp"), str(tmp_path / "cache")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def jobs() -> int:
    """Calls of the compiler in one build: each instruction set, nanobind, two sources and the linker."""
    return len(compiling.instruction_sets()) + 4


def leftovers(tmp_path: Path) -> list[Path]:
    return [*home(tmp_path / "cache").glob(".build-*"), *home(tmp_path / "cache").glob("*/_kernels.so")]


def wait_until(holds: object, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not holds():  # pyright: ignore[reportCallIssue]
        assert time.monotonic() < until, "did not come about"
        time.sleep(0.02)


def test_it_is_built_once_and_found_again(tmp_path: Path, compiler: FakeCompiler) -> None:
    steps: list[tuple[int, int]] = []
    assert find(tmp_path / "cache") is None
    path = build(tmp_path / "cache", lambda done, total: steps.append((done, total)))
    assert path.read_text().startswith("made by")
    assert path == find(tmp_path / "cache") == build(tmp_path / "cache")
    assert compiler.calls == jobs()
    assert steps == [(done, jobs()) for done in range(jobs() + 1)]
    assert not list(path.parent.parent.glob(".build-*"))


def test_it_is_built_anew_for_other_sources_another_compiler_or_other_flags(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build(tmp_path)]
    (tmp_path / "cpp" / "a.h").write_text("// changed")
    paths.append(build(tmp_path))
    compiler.has_version("2.0")
    paths.append(build(tmp_path))
    monkeypatch.setenv("MLXINFER_KERNELS_CXXFLAGS", "-g")
    paths.append(build(tmp_path))
    assert len(set(paths)) == 4
    assert compiler.calls == 4 * jobs()


def test_another_process_comes_to_the_same_name(tmp_path: Path, compiler: FakeCompiler) -> None:
    process = builder(tmp_path)
    out, err = process.communicate(timeout=60)
    assert out.splitlines()[-1] == str(build(tmp_path / "cache")), err
    assert compiler.calls == jobs()


def test_what_was_built_is_found_where_there_is_no_compiler_any_more(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert find(tmp_path) == path


def test_two_processes_at_once_build_once(tmp_path: Path, compiler: FakeCompiler) -> None:
    compiler.does("sleep 0.1")
    both = [builder(tmp_path), builder(tmp_path)]
    paths = {process.communicate(timeout=60)[0].splitlines()[-1] for process in both}
    assert len(paths) == 1
    assert compiler.calls == jobs()


def test_a_builder_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path, compiler: FakeCompiler) -> None:
    compiler.does("sleep 1")
    process = builder(tmp_path)
    wait_until(lambda: compiler.calls)
    process.kill()
    process.communicate()
    assert list(home(tmp_path / "cache").glob(".build-*"))
    compiler.does("")
    assert build(tmp_path / "cache").is_file()
    # Its compilers outlive it by a second; what they still wrote goes with the next build.
    for pid in compiler.pids:
        wait_until(lambda pid=pid: not alive(pid))
    assert leftovers(tmp_path) == [build(tmp_path / "cache", again=True)]


def test_ctrl_c_stops_the_compilers_and_leaves_nothing_half_made(tmp_path: Path, compiler: FakeCompiler) -> None:
    # The compiler starts another process, as a real one does, which has to go too.
    compiler.does(f'sleep 60 & echo $! >> "{tmp_path}/children"; wait')
    process = builder(tmp_path)
    wait_until(lambda: (tmp_path / "children").exists())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in err
    for pid in (tmp_path / "children").read_text().split():
        wait_until(lambda pid=pid: not alive(int(pid)))
    assert not leftovers(tmp_path)
    assert not list(home(tmp_path / "cache").glob("*/failed.txt"))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("waits", [False, True], ids=["while it builds", "while it waits for another's build"])
def test_a_build_can_be_cancelled(tmp_path: Path, compiler: FakeCompiler, waits: bool) -> None:
    compiler.does("sleep 3")
    other = builder(tmp_path) if waits else None
    if waits:
        wait_until(lambda: compiler.calls)
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    begun = time.monotonic()
    with pytest.raises(BuildCancelledError, match="cancelled"):
        build(tmp_path / "cache", cancel=cancel)
    assert time.monotonic() - begun < 2
    if other is not None:
        other.kill()
        other.communicate()
    else:
        assert not leftovers(tmp_path)
    assert earlier_failure(tmp_path / "cache") is None


def test_the_wait_for_anothers_build_has_an_end(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.does("sleep 3")
    other = builder(tmp_path)
    wait_until(lambda: compiler.calls)
    monkeypatch.setattr(building, "WAIT_SECONDS", 0.1)
    steps: list[tuple[int, int]] = []
    with pytest.raises(BuildError, match=r"another process holds .*\.lock"):
        build(tmp_path / "cache", lambda done, total: steps.append((done, total)))
    assert steps == [(0, 1)]
    other.kill()
    other.communicate()
    assert earlier_failure(tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'a.cpp: In f:' >&2; echo 'a.cpp:7: error: none' >&2; exit 1", "ended with 1: a.cpp:7: error: none"),
        ("exit 3", "ended with 3: it said nothing"),
        ("kill -9 $$", "was ended by SIGKILL"),
        ("echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "Killed"),
        ("echo 'cannot write: No space left on device' >&2; exit 1", "No space left"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_one_line_that_is_remembered(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    compiler.does(body)
    with pytest.raises(BuildError) as error:
        build(tmp_path / "cache")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not leftovers(tmp_path)
    compiler.does("")
    calls = compiler.calls
    with pytest.raises(BuildError, match="failed earlier") as again:
        build(tmp_path / "cache")
    assert said in str(again.value)
    assert "--build-kernels" in (again.value.fix or "")
    assert compiler.calls == calls
    assert build(tmp_path / "cache", again=True).is_file()
    assert earlier_failure(tmp_path / "cache") is None


def test_a_failure_is_forgotten_after_a_day(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.does("exit 1")
    with pytest.raises(BuildError):
        build(tmp_path)
    compiler.does("")
    monkeypatch.setattr(building, "RETRY_SECONDS", 0)
    assert build(tmp_path).is_file()


def test_a_compiler_that_hangs_is_ended(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.does("sleep 60")
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.2)
    with pytest.raises(BuildError, match="took longer than"):
        build(tmp_path)


def test_the_newest_builds_stay_and_older_ones_go(tmp_path: Path, compiler: FakeCompiler) -> None:
    paths: list[Path] = []
    for number in range(KEPT):
        compiler.has_version(str(number))
        paths.append(build(tmp_path))
        os.utime(paths[-1], (number, number))
    # The first was used since: what is used stays.
    os.utime(paths[0])
    compiler.has_version("last")
    paths.append(build(tmp_path))
    assert [path.parent.exists() for path in paths] == [True, False, True, True]
    assert (home(tmp_path) / ".lock").exists()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, compiler: FakeCompiler) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BuildError, match="can't be written: Not a directory") as error:
        build(tmp_path / "cache")
    assert "MLXINFER_CACHE_DIR" in (error.value.fix or "")


def test_a_full_disk_is_one_line_with_what_makes_room(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(building.os, "replace", full)
    with pytest.raises(BuildError, match="No space left on device") as error:
        build(tmp_path / "cache")
    assert "mlxinfer rm" in (error.value.fix or "")
    assert not leftovers(tmp_path)


def test_a_machine_without_a_compiler_learns_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "apt-get").touch()
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler") as error:
        build(tmp_path)
    if sys.platform == "linux":
        assert error.value.fix == "sudo apt-get install g++ python3-dev"


def test_a_compiler_that_is_named_and_not_there_is_an_error_not_another_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no-such-compiler", "'unclosed"):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(BuildError, match=r"\$CXX"):
            find_tools()


def test_missing_python_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match=r"Python's headers are missing .*Python\.h"):
        find_tools()


def test_a_missing_nanobind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanobind", None)
    with pytest.raises(BuildError, match="nanobind is missing") as error:
        find_tools()
    assert "pip install" in (error.value.fix or "")


def test_a_nanobind_whose_types_are_not_mlxs_is_refused_before_the_build(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    header = tmp_path / "src" / "nb_internals.h"
    header.write_text("#  define NB_INTERNALS_VERSION 21\n")
    with pytest.raises(BuildError, match=r"internals of version 21, mlx was built with \d+") as error:
        tools.check_abi(tmp_path)
    assert "nanobind>=3,<4" in (error.value.fix or "")
    header.unlink()
    tools.check_abi(tmp_path)


def test_the_types_of_mlx_are_one_set_and_looking_leaves_them_there() -> None:
    assert all(tools.shared_types() == tools.shared_types() for _ in range(50))
    assert len(tools.shared_types()) == 1


def test_every_source_is_part_of_the_name(tmp_path: Path, compiler: FakeCompiler) -> None:
    before = identity()
    (tmp_path / "cpp" / "new.inl").write_text("")
    assert identity() != before


def test_a_folder_of_kernels_that_cannot_be_written_names_its_variable(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "place").write_text("a file")
    monkeypatch.setenv("MLXINFER_KERNELS_DIR", str(tmp_path / "place"))
    with pytest.raises(BuildError, match="can't be written") as error:
        build(tmp_path)
    assert "MLXINFER_KERNELS_DIR" in (error.value.fix or "")
