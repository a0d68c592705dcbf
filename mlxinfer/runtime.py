"""The machine: BLAS on Linux, device, dtype policy, memory figures. mlx is imported inside functions only.

The one place that may assume an operating system.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    import mlx.core as mx

# mlx's Linux wheel calls cblas_sgemm of the reference BLAS it links. A faster library with the same symbols,
# loaded first and globally, wins symbol resolution. In order of measured speed.
BLAS_LIBRARIES = ("libmkl_rt.so.2", "libmkl_rt.so", "libopenblas.so.0", "libopenblas64.so.0", "libblis.so.4")

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Of glibc's malloc.h."""

_blas: str | None = None
_blas_note = "not looked for"


def preload_blas() -> None:
    """Load a fast BLAS globally before mlx is imported; only on Linux. `MLXINFER_BLAS=off` or a library name.

    Runs when the package is imported, so that no order of imports inside it can miss it.
    """
    global _blas, _blas_note
    wanted = os.environ.get("MLXINFER_BLAS", "")
    if not sys.platform.startswith("linux"):
        _blas_note = "Accelerate" if sys.platform == "darwin" else "none"
        return
    if wanted.lower() in ("off", "0", "no"):
        _blas_note = "turned off by MLXINFER_BLAS"
        return
    if "mlx.core" in sys.modules:
        _blas_note = "mlx was imported before mlxinfer, too late to choose a BLAS"
        return
    for name in (wanted,) if wanted else BLAS_LIBRARIES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        _blas, _blas_note = name, "loaded"
        return
    _blas_note = f"{wanted} cannot be loaded" if wanted else "none found"


def blas() -> tuple[str | None, str]:
    """(library loaded or None, one phrase that says why)."""
    return _blas, _blas_note


@cache
def on_cpu() -> bool:
    """True where mlx computes on the CPU, that is without Metal and without CUDA."""
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.DeviceType.cpu)


def device_name() -> str:
    """For example "Apple M3 Max (Metal)" or "AMD EPYC (CPU)"."""
    import mlx.core as mx

    info = mx.device_info()
    back_end = "Metal" if mx.metal.is_available() and not on_cpu() else "CPU" if on_cpu() else "CUDA"
    return f"{info.get('device_name', 'unknown device')} ({back_end})"


def compute_dtype(setting: str, model_dtype: mx.Dtype) -> mx.Dtype:
    """The dtype a model's floating-point weights get. `setting` is Settings.dtype.

    mlx's CPU back end computes half precision element by element, about 25 times slower than float32.
    """
    import mlx.core as mx

    if setting != "auto":
        return {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[setting]
    return mx.float32 if on_cpu() else model_dtype


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `budget` is what weights and KV together may take."""

    total: int
    available: int
    budget: int


def memory() -> Memory:
    """This machine's memory: Metal's recommended working set, else the cgroup's limit or 85 % of RAM."""
    vm = psutil.virtual_memory()
    total, available = int(vm.total), int(vm.available)
    limit = _metal_working_set()
    if limit is None:
        cgroup = cgroup_limit()
        if cgroup is not None and cgroup < total:
            total, available = cgroup, min(available, cgroup)
        limit = int(total * 0.85)
    return Memory(total=total, available=available, budget=limit)


def set_wired_limit(mib: int | None) -> None:
    """How many MiB Metal keeps resident; None is its recommended working set, 0 none. Without Metal nothing happens.

    macOS caps it at iogpu.wired_limit_mb; more is an InvalidRequestError.
    """
    recommended = _metal_working_set()
    if recommended is None:
        return
    import mlx.core as mx

    try:
        mx.set_wired_limit(recommended if mib is None else mib << 20)
    except ValueError as error:
        raise InvalidRequestError(
            f"wired_limit_mb is {mib}; this machine recommends {recommended >> 20}: {error}", param="wired_limit_mb"
        ) from error


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GiB that mlx has freed: each step of training asks for the same sizes again.

    Pages that the system hands out anew are cleared first, which took up to a sixth of a step. Of no effect elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, (2 << 30) - 1), (M_TOP_PAD, 64 << 20)):
            mallopt(option, value)


@contextlib.contextmanager
def least_memory(slack: float = 0.0) -> Iterator[Callable[[], None]]:
    """Have mlx wait for running operations before it makes arrays beyond what the computation itself needs.

    On a CPU mlx issues some hundred operations ahead of those that free their inputs, further the busier the machine:
    the same step peaked at 348 and at 380 MiB. In the scope it waits wherever memory is in use beyond a bound, at first
    0; each call of what is handed over lets it use `slack` more than was ever made in the scope. Elsewhere nothing
    changes: Metal would empty its cache of buffers at the same bound.
    """
    import mlx.core as mx

    if not on_cpu():
        yield lambda: None
        return

    held = mx.get_active_memory()

    def settle() -> None:
        mx.set_memory_limit(held + int((mx.get_peak_memory() - held) * (1 + slack)))

    before = mx.set_memory_limit(0)
    try:
        yield settle
    finally:
        mx.set_memory_limit(before)


def _metal_working_set() -> int | None:
    if sys.platform != "darwin":
        return None
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])


def cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's control group in bytes, version 2 or 1; None when there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


MIN_MACOS = (14, 0)
"""The oldest macOS that mlx's wheels install on."""


def under_rosetta() -> bool:
    """Whether this Python is an Intel build on Apple silicon; mlx has no wheels for it."""
    return sys.platform == "darwin" and _sysctl("sysctl.proc_translated") == "1"


def macos_version() -> tuple[int, ...] | None:
    """(major, minor, …); None elsewhere. Asked of the kernel, since Python may report 10.16 for compatibility."""
    if sys.platform != "darwin":
        return None
    text = _sysctl("kern.osproductversion") or platform.mac_ver()[0]
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def os_name() -> str:
    """For example "macOS 15.3 arm64" or "Linux 6.1.0 x86_64"."""
    version = macos_version()
    system = f"macOS {'.'.join(map(str, version))}" if version else f"{platform.system()} {platform.release()}"
    return f"{system} {platform.machine()}"


def chip_name() -> str | None:
    """For example "Apple M3 Max"; None where this is no Apple silicon Mac."""
    name = _sysctl("machdep.cpu.brand_string") if sys.platform == "darwin" else ""
    return name if name.startswith("Apple ") else None


def is_wireless(interface: str) -> bool:
    """Whether Linux knows a network interface as Wi-Fi; elsewhere False."""
    return Path("/sys/class/net", interface, "wireless").exists()


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def lower_priority(thread: threading.Thread) -> None:
    """Let a thread have only what the others leave of the CPU, where the system can be told so: Linux."""
    if sys.platform == "linux" and thread.native_id is not None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, 19)
