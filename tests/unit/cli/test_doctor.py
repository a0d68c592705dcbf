"""`mlxinfer doctor`: each thing that can be wrong is found, named and given a remedy."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer import kernels, runtime
from mlxinfer.cli import doctor

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Invoke


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda url: "")


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], doctor.Finding]:
    """One finding of a fresh examination, by name."""
    return lambda name: next(f for f in doctor.examine() if f.name == name)


Find = Callable[[str], doctor.Finding]


def test_a_sound_machine_ends_with_0_and_names_what_it_looked_at(invoke: Invoke) -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.stdout
    for name in (
        "system",
        "python",
        "mlx",
        "mlx-lm",
        "tokenizers",
        "gguf",
        "device",
        "memory",
        "blas",
        "config",
        "kernels",
        "hub",
    ):
        assert f"  {name} " in result.stdout
    assert "\x1b" not in result.stdout


def test_json_has_the_same_findings(invoke: Invoke) -> None:
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["ok"] is True
    assert {f["status"] for f in report["findings"]} <= {"ok", "warning"}
    assert report["findings"][0].keys() == {"name", "status", "detail", "fix"}


def test_a_broken_configuration_is_a_finding_with_a_fix_and_ends_with_1(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("prot = 1")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "unknown setting 'prot'" in result.stdout
    assert f"fix: edit {tmp_path / 'config.toml'}" in result.stdout
    assert json.loads(invoke("doctor", "--json").stdout)["ok"] is False


def test_settings_that_differ_from_the_default_are_shown(finding: Find, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("port = 9000")
    assert "port = 9000" in finding("config").detail
    assert "host" not in finding("config").detail


def test_being_offline_is_no_error(finding: Find, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda url: "Name or service not known")
    hub = finding("hub")
    assert hub.status == "warning"
    assert "Name or service not known" in hub.detail
    assert invoke("doctor").exit_code == 0


def test_a_hub_that_does_not_answer_is_not_waited_for(finding: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.05)
    monkeypatch.setattr(doctor, "_ask", lambda url: time.sleep(1) or "")
    begun = time.monotonic()
    assert "no answer within 0.05 s" in doctor._hub().detail
    assert time.monotonic() - begun < 0.8


def test_a_set_offline_variable_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(doctor, "_ask", lambda url: pytest.fail("asked"))
    assert "HF_HUB_OFFLINE is set" in doctor._hub().detail


def test_an_intel_python_on_apple_silicon_is_an_error(finding: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "under_rosetta", lambda: True)
    python = finding("python")
    assert python.status == "error"
    assert "uv python install" in (python.fix or "")


def test_a_macos_older_than_mlx_needs_is_an_error(finding: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "macos_version", lambda: (13, 6))
    system = finding("system")
    assert system.status == "error"
    assert "macOS 13.6" in system.detail
    assert "needs macOS 14.0" in system.detail
    monkeypatch.setattr(runtime, "macos_version", lambda: (14, 0))
    assert finding("system").status == "ok"


def test_a_missing_package_and_one_of_the_wrong_version_are_errors(
    finding: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "gguf":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "mlx-lm" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert (finding("gguf").status, finding("gguf").detail) == ("error", "not installed")
    wrong = finding("mlx-lm")
    assert wrong.status == "error"
    assert "needs" in wrong.detail
    assert "pip install" in (wrong.fix or "")


def test_an_mlx_that_does_not_load_is_an_error_not_a_traceback(finding: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ImportError("libmlx.dylib not found")

    monkeypatch.setattr(runtime, "device_name", broken)
    device = finding("device")
    assert device.status == "error"
    assert "libmlx.dylib not found" in device.detail


def test_a_cpu_without_a_fast_blas_is_a_warning_with_the_package_to_install(
    finding: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "on_cpu", lambda: True)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(runtime, "blas", lambda: (None, "none found"))
    blas = finding("blas")
    assert blas.status == "warning"
    assert "apt-get install libopenblas0-pthread " in (blas.fix or "")
    for value in ("off", "nope"):
        monkeypatch.setenv("MLXINFER_BLAS", value)
        assert (finding("blas").fix or "").startswith("unset MLXINFER_BLAS ")


def test_readme_and_doctor_name_the_same_blas_package() -> None:
    assert doctor.BLAS_PACKAGE in (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


def kernels_are(monkeypatch: pytest.MonkeyPatch, status: kernels.Status) -> list[dict[str, Any]]:
    """What `enable` comes to, and how it was asked."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(kernels, "enable", lambda settings, **how: asked.append(how) or status)
    return asked


def test_kernels_in_use_are_named_with_instruction_set_and_threads(
    finding: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_are(monkeypatch, kernels.Status(isa="avx2", threads=8, in_use=("rms_norm", "rope")))
    found = finding("kernels")
    assert (found.status, found.fix) == ("ok", None)
    assert found.detail == "avx2, 8 threads, 2 kernels: rms_norm, rope"


def test_a_kernel_that_was_left_out_is_a_warning_with_the_reason(
    finding: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_are(monkeypatch, kernels.Status(isa="avx2", threads=8, in_use=("rope",), left_out={"rms_norm": "differs"}))
    assert finding("kernels").status == "warning"
    assert "left out: rms_norm: differs" in finding("kernels").detail


def test_missing_kernels_are_a_warning_with_the_command_and_no_fault(
    finding: Find, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    kernels_are(monkeypatch, kernels.Status("no C++ compiler", "sudo apt-get install g++", wrong=True))
    found = finding("kernels")
    assert (found.status, found.fix) == ("warning", "sudo apt-get install g++")
    assert "no C++ compiler; mlx's own, many" in found.detail
    assert invoke("doctor").exit_code == 0


def test_kernels_that_are_not_needed_or_turned_off_are_no_warning(
    finding: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_are(monkeypatch, kernels.Status("not needed: mlx computes on the GPU"))
    assert finding("kernels") == doctor.Finding("kernels", "ok", "not needed: mlx computes on the GPU")


def test_doctor_builds_kernels_only_when_told_to(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    asked = kernels_are(monkeypatch, kernels.Status("not built yet"))
    invoke("doctor")
    invoke("doctor", "--build-kernels")
    assert [(how["may_build"], how["again"]) for how in asked] == [(False, False), (True, True)]


def test_little_free_memory_is_a_warning(finding: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "memory", lambda: runtime.Memory(16 * 10**9, 10**8, 13 * 10**9))
    assert finding("memory").status == "warning"


def test_a_cache_that_cannot_be_written_is_an_error(finding: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert finding("cache").status == "error"
    assert "not writable" in finding("cache").detail


def test_a_home_that_takes_no_files_is_not_writable_and_not_full(
    finding: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(doctor, "LOW_DISK", 10**18)
    cache = finding("cache")
    assert cache.status == "error"
    assert f"not writable ({tmp_path} is not)" in cache.detail
    assert "free" not in cache.detail
    assert "set MLXINFER_CACHE_DIR" in (cache.fix or "")


def test_a_full_disk_is_a_warning(finding: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOW_DISK", 10**18)
    assert finding("cache").status == "warning"


def test_the_size_of_a_cache_counts_blobs_once_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "blob").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "blob")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert doctor.tree_size(tmp_path) == 1000
    assert doctor.tree_size(tmp_path / "nowhere") == 0
