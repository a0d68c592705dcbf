"""`mlxinfer doctor`: look at everything a run depends on; each finding says what is wrong and how to mend it."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mlxinfer import __version__, runtime
from mlxinfer.cli import options, output, progress
from mlxinfer.config import Settings, as_dict, config_path, load_settings
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Status = Literal["ok", "warning", "error"]
MARKS: dict[Status, tuple[str, str]] = {"ok": ("ok", "green"), "warning": ("!!", "yellow"), "error": ("XX", "red")}
PACKAGES = ("mlx", "mlx-lm", "huggingface-hub", "tokenizers", "safetensors", "gguf", "fastapi", "uvicorn")
HUB_SECONDS = 3.0
BLAS_PACKAGE = "libopenblas0-pthread"
LOW_DISK = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    status: Status
    detail: str
    fix: str | None = None
    """The command, or the act, that mends it."""


@click.command("doctor", epilog=options.example("mlxinfer doctor", "mlxinfer doctor --build-kernels"))
@click.option("--build-kernels", is_flag=True, help="Build the CPU kernels now, also when an earlier build failed.")
@options.json_option
def doctor(build_kernels: bool, as_json: bool) -> None:
    """Check device, memory, BLAS, CPU kernels, versions, configuration, caches and the hub.

    Ends with 1 if something is broken; a warning or being offline is not.
    """
    findings = list(examine(build_kernels=build_kernels))
    broken = any(f.status == "error" for f in findings)
    if as_json:
        output.emit_json(
            {"ok": not broken, "version": __version__, "findings": [dataclasses.asdict(f) for f in findings]}
        )
    else:
        width = max(len(f.name) for f in findings)
        for finding in findings:
            click.echo(_line(finding, width))
    if broken:
        click.get_current_context().exit(1)


def _line(finding: Finding, width: int) -> str:
    mark, colour = MARKS[finding.status]
    mark = output.style(mark, to=sys.stdout, fg=colour)
    text = f"{mark}  {finding.name.ljust(width)}  {output.printable(finding.detail)}"
    return text if finding.fix is None else f"{text}\n    {' ' * width}  fix: {finding.fix}"


def examine(*, build_kernels: bool = False) -> Iterator[Finding]:
    """All findings, in the order in which one thing rests on another. Kernels that aren't built yet may be, now."""
    yield from _machine()
    yield from _packages()
    yield from _device()
    settings, findings = _settings()
    yield from findings
    yield from _kernels(settings, build_now=build_kernels)
    yield from _caches(settings)
    yield _hub()


def _machine() -> Iterator[Finding]:
    version = runtime.macos_version()
    oldest = ".".join(map(str, runtime.MIN_MACOS))
    if version and version < runtime.MIN_MACOS:
        yield Finding(
            "system", "error", f"{runtime.os_name()}; mlx needs macOS {oldest}", "update macOS in System Settings"
        )
    else:
        yield Finding("system", "ok", runtime.os_name())
    python = f"{sys.version.split()[0]} at {sys.executable}"
    if runtime.under_rosetta():
        fix = "uv python install 3.12 && uv venv --python 3.12 .venv   (from a terminal that does not run in Rosetta)"
        yield Finding("python", "error", f"{python}: an Intel build under Rosetta; mlx needs an arm64 Python", fix)
    else:
        yield Finding("python", "ok", f"{python} ({sysconfig.get_platform()})")


def _packages() -> Iterator[Finding]:
    wanted = _requirements()
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "error", "not installed", f"{sys.executable} -m pip install --upgrade mlxinfer")
            continue
        accepts = wanted.get(name)
        if accepts is not None and not accepts(version):
            yield Finding(
                name, "error", f"{version}; mlxinfer {__version__} needs {accepts.__doc__}",
                f'{sys.executable} -m pip install "{name}{accepts.__doc__}"',
            )  # fmt: skip
        else:
            yield Finding(name, "ok", version)


def _requirements() -> dict[str, Callable[[str], bool]]:
    """Name → test of a version, out of mlxinfer's own metadata; its docstring is the range."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("mlxinfer") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    tests: dict[str, Callable[[str], bool]] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):

            def accepts(version: str, specifier: Any = requirement.specifier) -> bool:
                return specifier.contains(version, prereleases=True)

            accepts.__doc__ = str(requirement.specifier)
            tests[requirement.name] = accepts
    return tests


def _device() -> Iterator[Finding]:
    try:
        import mlx.core as mx

        assert mx.sum(mx.ones((8, 8)) @ mx.ones((8, 8))).item() == 512, "mlx computes 512 wrongly"
        name, memory, on_cpu = runtime.device_name(), runtime.memory(), runtime.on_cpu()
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding(
            "device", "error", f"mlx does not work: {error}", f"{sys.executable} -m pip install --force-reinstall mlx"
        )
        return
    if on_cpu and sys.platform == "darwin":
        yield Finding(
            "device", "error", f"{name}: mlx sees no Metal device", "run on Apple silicon, outside a virtual machine"
        )
    else:
        yield Finding("device", "ok", name)
    yield _memory(memory)
    library, why = runtime.blas()
    if on_cpu and sys.platform != "darwin" and library is None:
        fix = f"sudo apt-get install {BLAS_PACKAGE}   (or your system's OpenBLAS; it is found at the next start)"
        if os.environ.get("MLXINFER_BLAS"):  # off, or a library that cannot be loaded: the others were not tried
            fix = f"unset MLXINFER_BLAS   (then, if none is found: sudo apt-get install {BLAS_PACKAGE})"
        yield Finding("blas", "warning", f"{why}; mlx's own is many times slower in prefill", fix)
    else:
        yield Finding("blas", "ok", f"{library}, {why}" if library else why)


def _memory(memory: runtime.Memory) -> Finding:
    from mlxinfer.zoo.files import human_bytes

    total, free, budget = (human_bytes(n) for n in (memory.total, memory.available, memory.budget))
    text = f"{total}, {free} free, {budget} for weights and context"
    if memory.available < min(1_000_000_000, memory.total // 10):
        return Finding("memory", "warning", text, "close other programs, or choose a smaller model: mlxinfer ls --all")
    return Finding("memory", "ok", text)


def _settings() -> tuple[Settings, list[Finding]]:
    path = config_path()
    try:
        settings = load_settings()
    except InvalidRequestError as error:
        fix = f"edit {path}, or unset the MLXINFER_ variable that is named"
        return Settings(), [Finding("config", "error", str(error), fix)]
    changed = {k: v for k, v in as_dict(settings).items() if v != as_dict(Settings())[k]}
    shown = ", ".join(f"{k} = {v}" for k, v in changed.items()) or "all defaults"
    return settings, [Finding("config", "ok", f"{path}{'' if path.exists() else ' (none)'}: {shown}")]


def _kernels(settings: Settings, *, build_now: bool) -> Iterator[Finding]:
    try:
        from mlxinfer import kernels
    except (ImportError, OSError, RuntimeError):
        return  # mlx doesn't work, which is another finding
    with progress.reporting() as report:
        found = kernels.enable(settings, progress=report, may_build=build_now, again=build_now)
    if found.reason is not None:
        idle = "; mlx's own, many times slower, are used" if found.wrong else ""
        yield Finding("kernels", "warning" if found.wrong else "ok", f"{found.reason}{idle}", found.fix)
        return
    text = f"{found.isa}, {found.threads} threads, {len(found.in_use)} kernels: {', '.join(found.in_use)}"
    if not found.left_out:
        yield Finding("kernels", "ok", text)
        return
    why = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
    fix = "mlxinfer doctor --json, and report it with its output; until then mlx's own are used in their place"
    yield Finding("kernels", "warning", f"{text}; left out: {why}", fix)


def _caches(settings: Settings) -> Iterator[Finding]:
    from huggingface_hub import constants

    from mlxinfer.zoo.files import human_bytes

    for name, folder, variable in (
        ("cache", settings.cache_dir, "MLXINFER_CACHE_DIR"),
        ("hub cache", Path(constants.HF_HUB_CACHE), "HF_HOME"),
    ):
        existing = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
        size = human_bytes(tree_size(folder))
        if not _writable(existing):
            own = f'sudo chown -R "$USER" {existing}, or ' if existing == folder else ""
            fix = f"{own}set {variable} to a folder that you can write to"
            where = "" if existing == folder else f" ({existing} is not)"
            yield Finding(name, "error", f"{folder}: {size}; not writable{where}", fix)
            continue
        free = shutil.disk_usage(existing).free
        text = f"{folder}: {size}, {human_bytes(free)} free on the disk"
        if free < LOW_DISK:
            yield Finding(name, "warning", f"{text}; most models need more", "mlxinfer ls, then mlxinfer rm MODEL")
        else:
            yield Finding(name, "ok", text)


def _writable(folder: Path) -> bool:
    """Tried, not asked: root may write everywhere by its rights, and still not to /proc or a read-only disk."""
    if not os.access(folder, os.W_OK):
        return False
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)  # full, which is another finding
    return True


def tree_size(folder: Path) -> int:
    """Bytes of the regular files below; links are not followed, as the hub's cache links to its own blobs."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            total += 0 if os.path.islink(os.path.join(parent, name)) else stat.st_size
    return total


def _hub() -> Finding:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Finding("hub", "ok", "not asked: HF_HUB_OFFLINE is set; only models on this machine can be used")
    why: list[str] = [f"no answer within {HUB_SECONDS:g} s"]
    # A thread, because a name server that does not answer ignores every timeout of the request.
    thread = threading.Thread(target=lambda: why.append(_ask(constants.ENDPOINT)), daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    if why[-1] == "":
        return Finding("hub", "ok", f"{constants.ENDPOINT} answers")
    fix = "check the network or HTTPS_PROXY; models on this machine and the demo model work without the hub"
    return Finding("hub", "warning", f"{constants.ENDPOINT} cannot be reached ({why[-1]})", fix)


def _ask(url: str) -> str:
    """The empty text, or why the hub cannot be reached."""
    try:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": f"mlxinfer/{__version__}"})
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return ""  # an answer, whatever it says
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, ValueError) as error:
        return str(error)
    return ""
