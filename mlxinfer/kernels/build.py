"""Compile the extension into the cache: by whichever C++ compiler is there, against the mlx that is installed.

A failed build is a reason in words, never an error.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCES = Path(__file__).parent / "cpp"
ISAS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx512": [
            "-mavx512f",
            "-mavx512bw",
            "-mavx512vl",
            "-mavx512dq",
            "-mavx2",
            "-mfma",
            "-mf16c",
            "-mprefer-vector-width=512",
        ],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "base": [],
    },
    "aarch64": {"neon": [], "base": ["-DKERNELS_PLAIN"]},
}
ISAS["arm64"] = ISAS["aarch64"]
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-ffp-contract=fast"]
COMPILE_SECONDS = 600


class BuildError(Exception):
    """Why there is no extension, in one line."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a build takes. `compiler` is a command, `includes` are folders."""

    compiler: list[str]
    includes: list[Path]
    library: Path
    nanobind: Path


def find_tools() -> Tools:
    """The compiler, headers and libraries of this machine. Raises BuildError with what is missing."""
    compiler = next(
        (p for p in (os.environ.get("CXX"), "c++", "g++", "clang++") if p and shutil.which(p.split()[0])), None
    )
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++ or clang++) is on the PATH")
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise BuildError(f"Python's headers are missing ({python}/Python.h)")
    try:
        import nanobind
    except ImportError:
        raise BuildError("the package nanobind is missing") from None
    import mlx

    root = Path(next(iter(mlx.__path__)))
    bound = Path(nanobind.__file__).parent
    includes = [python, root / "include", bound / "include", bound / "ext" / "robin_map" / "include"]
    return Tools(compiler.split(), includes, root / "lib", bound)


def key(tools: Tools) -> str:
    """Changes whenever the extension has to be built again."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([*tools.compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    facts = [
        importlib.metadata.version("mlx"), importlib.metadata.version("nanobind"), sysconfig.get_config_var("SOABI") or "",
        platform.machine(), version.stdout.splitlines()[0] if version.stdout else "", repr(ISAS), repr(COMMON),
    ]  # fmt: skip
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:16]


def build(cache: Path, progress: Callable[[str], None] | None = None) -> Path:
    """The extension's path, built when it isn't there yet. Raises BuildError."""
    tools = find_tools()
    folder = cache / "kernels" / key(tools)
    target = folder / "_kernels.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder, ignore_cleanup_errors=True) as work:
            made = _compile(tools, Path(work), progress or (lambda _: None))
            os.replace(made, target)
    return target


def _compile(tools: Tools, work: Path, progress: Callable[[str], None]) -> Path:
    jobs = list(_jobs(tools, work))
    done = 0
    progress(f"0/{len(jobs)}")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(_run, [command for _, command in jobs]):
            done += 1
            progress(f"{done}/{len(jobs)}")
    out = work / "_kernels.so"
    _run([
        *tools.compiler, "-shared", "-pthread", "-o", str(out), *(str(o) for o, _ in jobs), f"-L{tools.library}", "-lmlx",
        f"-Wl,-rpath,{tools.library}", *(["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []),
    ])  # fmt: skip
    return out


def _jobs(tools: Tools, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """(object file, command) of every compilation, the longest first."""
    bindings = [*tools.compiler, *COMMON, "-DNB_DOMAIN=mlx", *(f"-I{i}" for i in tools.includes), "-c"]
    kernels = [*tools.compiler, *COMMON, "-c"]
    for isa, flags in ISAS[platform.machine()].items():
        names = [f"-DISA=isa_{isa}", f'-DKERNELS_NAME="{isa}"', f"-DKERNELS_TABLE=table_{isa}"]
        out = work / f"isa_{isa}.o"
        yield out, [*kernels, *flags, *names, str(SOURCES / "isa.cpp"), "-o", str(out)]
    out = work / "nanobind.o"
    yield (
        out,
        [*bindings, "-w", "-fno-strict-aliasing", str(tools.nanobind / "src" / "nb_combined.cpp"), "-o", str(out)],
    )
    for source in sorted(SOURCES.glob("*.cpp")):
        if source.name != "isa.cpp":
            out = work / f"{source.stem}.o"
            yield out, [*bindings, str(source), "-o", str(out)]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no output"]
        )
        raise BuildError(f"{command[0]} ended with {done.returncode}: {lines[0][:300]}")
