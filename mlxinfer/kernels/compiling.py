"""Run the compilers: several at once, none left behind, whatever ends the build."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxinfer.kernels.tools import BuildCancelledError, BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlxinfer.kernels.tools import Tools

SOURCES = Path(__file__).parent / "cpp"
ISAS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx512": [
            "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c",
            "-mprefer-vector-width=512",
        ],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "base": [],
    },
    "aarch64": {"neon": [], "base": ["-DKERNELS_PLAIN"]},
}  # fmt: skip
ISAS["arm64"] = ISAS["aarch64"]
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-ffp-contract=fast"]
COMPILE_SECONDS = 600.0
"""Of one file; a minute is long."""
POLL_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Job:
    """One call of the compiler, and the file it makes."""

    out: Path
    command: list[str]


def extra_flags() -> list[str]:
    """MLXINFER_KERNELS_CXXFLAGS, for compiling and linking: sanitizers, a debug build."""
    return os.environ.get("MLXINFER_KERNELS_CXXFLAGS", "").split()


def instruction_sets() -> dict[str, list[str]]:
    """Name → flags, for this machine's processors."""
    return ISAS.get(platform.machine(), {"base": []})


def compile_extension(
    tools: Tools, work: Path, progress: Callable[[int, int], None], cancel: threading.Event | None = None
) -> Path:
    """Make the extension inside the folder `work`; `progress` gets files done and files in all. Raises BuildError."""
    jobs = list(_jobs(tools, work))
    progress(0, len(jobs) + 1)
    _run_all(jobs, work, lambda done: progress(done, len(jobs) + 1), cancel)
    out = work / "_kernels.so"
    command = [
        *tools.compiler, "-shared", "-pthread", "-o", str(out), *(str(job.out) for job in jobs), f"-L{tools.library}",
        "-lmlx", f"-Wl,-rpath,{tools.library}", *extra_flags(),
        *(["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []),
    ]  # fmt: skip
    _run_all([Job(out, command)], work, lambda done: None, cancel)
    progress(len(jobs) + 1, len(jobs) + 1)
    return out


def _jobs(tools: Tools, work: Path) -> Iterator[Job]:
    """Every compilation, the longest first."""
    kernels = [*tools.compiler, *COMMON, "-c"]
    bindings = [*kernels, "-DNB_DOMAIN=mlx", *(f"-I{folder}" for folder in tools.includes)]
    for isa, flags in instruction_sets().items():
        names = [f"-DISA=isa_{isa}", f'-DKERNELS_NAME="{isa}"', f"-DKERNELS_TABLE=table_{isa}"]
        yield _job([*kernels, *flags, *names], SOURCES / "isa.cpp", work / f"isa_{isa}.o")
    # nanobind's own code: its warnings are not ours, and its type puns need the flag.
    nanobind = tools.nanobind / "src" / "nb_combined.cpp"
    yield _job([*bindings, "-w", "-fno-strict-aliasing"], nanobind, work / "nanobind.o")
    for source in sorted(SOURCES.glob("*.cpp")):
        if source.name != "isa.cpp":
            yield _job(bindings, source, work / f"{source.stem}.o")


def _job(command: list[str], source: Path, out: Path) -> Job:
    return Job(out, [*command, *extra_flags(), str(source), "-o", str(out)])


def _run_all(jobs: list[Job], work: Path, done: Callable[[int], None], cancel: threading.Event | None) -> None:
    """Run the jobs, as many at once as there are cores. When one fails, or Ctrl-C comes, the others are killed.

    In a thread of its own, where Ctrl-C can't come between the start of a compiler and the note that it runs.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            future = pool.submit(_run_until, stop, jobs, work, done)
            while not wait([future], timeout=POLL_SECONDS).done:
                if cancel is not None and cancel.is_set():
                    stop.set()
        finally:
            stop.set()
    future.result()


def _run_until(stop: threading.Event, jobs: list[Job], work: Path, done: Callable[[int], None]) -> None:
    waiting, running = list(jobs), list[_Running]()
    finished = 0
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                running.append(_Running(waiting.pop(0), work))
            stop.wait(POLL_SECONDS)
            if stop.is_set():
                raise BuildCancelledError("the build was cancelled")
            for compiler in [c for c in running if c.has_ended()]:
                running.remove(compiler)
                finished += 1
                done(finished)
    finally:
        for compiler in running:
            compiler.kill()


class _Running:
    """A compiler at work. What it says goes into a file, so that none waits for a reader."""

    def __init__(self, job: Job, work: Path) -> None:
        self._job = job
        self._said = job.out.with_suffix(".txt")
        self._until = time.monotonic() + COMPILE_SECONDS
        # Its temporary files go with the build folder. A session of its own: what it starts is killed with it.
        env = os.environ | {"TMPDIR": str(work), "LC_ALL": "C"}
        try:
            with self._said.open("wb") as said:
                self._process = subprocess.Popen(
                    job.command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=env, start_new_session=True
                )
        except OSError as error:
            raise BuildError(f"{job.command[0]} can't be run: {error.strerror}") from error

    def has_ended(self) -> bool:
        """Raises BuildError when it ended badly, or was killed because it took too long."""
        code = self._process.poll()
        if code == 0:
            return True
        if code is None and time.monotonic() < self._until:
            return False
        name = f"{self._job.command[0]} ({self._job.out.stem})"
        if code is None:
            self.kill()
            raise BuildError(f"{name} took longer than {COMPILE_SECONDS:.0f} s")
        if code < 0:
            raise BuildError(f"{name} was ended by {signal_name(-code)}")
        lines = self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = (
            [line for line in lines if re.search(r"\b(error|Killed|No space)\b", line)] or lines or ["it said nothing"]
        )
        raise BuildError(f"{name} ended with {code}: {telling[0].strip()[:300]}")

    def kill(self) -> None:
        """End the compiler and what it started, and wait for that."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def signal_name(number: int) -> str:
    """For example "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
