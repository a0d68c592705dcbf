"""Kernels are put to use once, from any thread, and whatever is wrong with them is a line and no error."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlxinfer import kernels as public
from mlxinfer import runtime
from mlxinfer.config import Settings
from mlxinfer.kernels import build as building
from mlxinfer.kernels import calls, enabling, tools
from mlxinfer.kernels.build import find
from mlxinfer.kernels.load import LoadError
from mlxinfer.kernels.tools import BuildCancelledError, BuildError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from mlxinfer.types import ProgressEvent


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has enabled nothing yet, on a CPU."""
    monkeypatch.setattr(enabling, "_status", None)
    monkeypatch.setattr(runtime, "on_cpu", lambda: True)
    monkeypatch.delenv("MLXINFER_KERNELS_DIR", raising=False)
    yield
    calls.uninstall()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path)


@pytest.fixture
def built(kernels: ModuleType, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real extension in the cache of `settings`."""
    source = Path(kernels.__file__ or "")
    folder = settings.cache_dir / "kernels" / source.parent.name
    folder.mkdir(parents=True)
    shutil.copy(source, folder / source.name)
    return folder / source.name


def test_the_kernels_take_their_places_and_the_status_says_so(built: Path, settings: Settings) -> None:
    original = mx.fast.rms_norm
    found = public.enable(settings)
    assert found == public.status()
    assert (found.reason, found.fix, found.path) == (None, None, built)
    assert "rms_norm" in found.in_use
    assert not found.left_out
    assert found.isa in ("avx512", "avx2", "neon", "base")
    assert found.threads >= 1
    assert mx.fast.rms_norm is not original
    assert public.kernel("rms_norm") is mx.fast.rms_norm
    x = mx.random.normal((3, 64))
    assert mx.allclose(mx.fast.rms_norm(x, None, 1e-5), original(x, None, 1e-5), atol=1e-5).item()


def test_many_threads_enable_once(built: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[Path] = []
    real = enabling._put_to_use
    monkeypatch.setattr(enabling, "_put_to_use", lambda path: times.append(path) or real(path))
    found: list[public.Status] = []
    threads = [threading.Thread(target=lambda: found.append(public.enable(settings))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(times) == 1
    assert len(found) == 6
    assert all(status is found[0] for status in found)


def test_on_metal_and_cuda_nothing_happens(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(enabling, "find", lambda cache: pytest.fail("looked for"))
    original = mx.fast.rms_norm
    found = public.enable(settings)
    assert "not needed" in (found.reason or "")
    assert not found.wrong
    assert mx.fast.rms_norm is original


def test_turned_off_nothing_happens_and_on_again_it_does(built: Path, settings: Settings) -> None:
    off = dataclasses.replace(settings, kernels="off")
    assert "turned off" in (public.enable(off).reason or "")
    assert not calls.in_use()
    assert public.enable(dataclasses.replace(settings, kernels="on")).reason is None


def test_without_leave_to_build_nothing_is_built_and_a_later_call_may(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enabling, "build", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(enabling, "earlier_failure", lambda cache: None)
    found = public.enable(settings, may_build=False)
    assert "not built yet" in (found.reason or "")
    assert not found.wrong
    monkeypatch.setattr(enabling, "build", planted(BuildError("tried")))
    assert public.enable(settings).reason == "tried"


def planted(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        BuildError("no compiler", "install one"), OSError(28, "No space left"), RuntimeError("odd"), TypeError("odd"),
        MemoryError("none left"), LookupError("odd"), ValueError("odd"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["find", "build", "_put_to_use"])
def test_whatever_fails_is_a_line_and_mlxs_own_stay(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    monkeypatch.setattr(enabling, "find", lambda cache: None)
    monkeypatch.setattr(enabling, "build", lambda *_, **__: Path("x"))
    monkeypatch.setattr(enabling, where, planted(error))
    original = mx.fast.rms_norm
    found = public.enable(settings)
    assert str(error) in (found.reason or "")
    assert found.in_use == ()
    assert found.wrong
    assert mx.fast.rms_norm is original
    # The second model doesn't try it all again.
    monkeypatch.setattr(enabling, where, planted(AssertionError("tried again")))
    assert public.enable(settings) is found


def test_ctrl_c_is_raised_and_a_later_call_tries_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enabling, "find", lambda cache: None)
    monkeypatch.setattr(enabling, "build", planted(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        public.enable(settings)
    monkeypatch.setattr(enabling, "build", planted(BuildCancelledError("the build was cancelled")))
    assert "cancelled" in (public.enable(settings).reason or "")
    monkeypatch.setattr(enabling, "build", planted(BuildError("tried")))
    assert public.enable(settings).reason == "tried"


def test_progress_counts_files(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(cache: Path, progress: Any, **_: Any) -> Path:
        progress(5, 12)
        raise BuildError("enough")

    events: list[ProgressEvent] = []
    monkeypatch.setattr(enabling, "find", lambda cache: None)
    monkeypatch.setattr(enabling, "build", fake)
    public.enable(settings, progress=events.append)
    assert [(e.phase, e.done, e.total) for e in events] == [("build", 5, 12)]
    assert "CPU kernels (once" in events[0].label


def test_a_broken_file_in_the_cache_is_built_again_once(
    built: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = built.read_bytes()
    built.write_bytes(whole[: len(whole) // 3])
    builds: list[bool] = []

    def fake(cache: Path, progress: Any, *, again: bool, **_: Any) -> Path:
        builds.append(again)
        built.unlink()
        built.write_bytes(whole)
        return built

    monkeypatch.setattr(enabling, "build", fake)
    found = public.enable(settings)
    assert builds == [True]
    assert found.reason is None, found
    assert "rms_norm" in found.in_use


def test_a_file_that_is_broken_after_that_too_is_given_up_and_remembered(
    built: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[Path] = []
    monkeypatch.setattr(enabling, "build", lambda *_, **__: builds.append(built) or built)
    monkeypatch.setattr(enabling, "_put_to_use", planted(LoadError("ended with SIGILL")))
    assert "SIGILL" in (public.enable(settings).reason or "")
    assert builds == [built]
    assert "SIGILL" in (built.parent / building.FAILED).read_text()
    # Found no more: the next process is told, and builds nothing.
    assert not built.exists()
    assert find(settings.cache_dir) is None


def test_a_kernel_that_differs_is_left_out_alone(
    built: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = mx.fast.rms_norm
    real = enabling.check
    monkeypatch.setattr(
        enabling, "check", lambda ext, name: "differs by 0.5" if name == "rms_norm" else real(ext, name)
    )
    found = public.enable(settings)
    assert found.reason is None
    assert found.left_out == {"rms_norm": "differs by 0.5"}
    assert "rms_norm" not in found.in_use
    assert mx.fast.rms_norm is original


def test_a_machine_without_a_compiler_says_what_to_install(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    for may_build in (False, True):
        found = public.enable(settings, may_build=may_build)
        assert "no C++ compiler" in (found.reason or "")
        assert found.fix == tools.install_command()
        monkeypatch.setattr(enabling, "_status", None)


def test_a_kernel_that_ended_the_trial_is_never_called_here(
    built: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = mx.fast.rms_norm
    real = enabling.check
    monkeypatch.setattr(enabling, "faults", lambda path: {"rms_norm": "ended with SIGSEGV"})
    monkeypatch.setattr(
        enabling, "check", lambda ext, name: pytest.fail("called") if name == "rms_norm" else real(ext, name)
    )
    found = public.enable(settings)
    assert found.left_out == {"rms_norm": "ended with SIGSEGV"}
    assert "rms_norm" not in found.in_use
    assert "rope" in found.in_use
    assert mx.fast.rms_norm is original


def test_the_status_is_what_the_last_call_came_to(
    built: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    public.enable(dataclasses.replace(settings, kernels="off"))
    assert "turned off" in (public.status().reason or "")
    with monkeypatch.context() as patch:
        patch.setattr(enabling, "find", lambda cache: None)
        patch.setattr(enabling, "earlier_failure", lambda cache: None)
        public.enable(settings, may_build=False)
        assert "not built yet" in (public.status().reason or "")
        patch.setattr(enabling, "build", planted(BuildCancelledError("the build was cancelled")))
        public.enable(settings)
        assert "cancelled" in (public.status().reason or "")
    assert public.expected(settings)
    public.enable(settings)
    assert public.status().reason is None
    # It stands: a later "off" finds them in use.
    assert public.enable(dataclasses.replace(settings, kernels="off")) is public.status()
    assert public.status().in_use


@pytest.mark.parametrize("size", [0, 4096])
def test_a_damaged_file_says_how_to_build_it_again(built: Path, settings: Settings, size: int) -> None:
    built.write_bytes(built.read_bytes()[:size])
    found = public.enable(settings, may_build=False)
    assert found.wrong
    assert found.fix == "mlxinfer doctor --build-kernels"
