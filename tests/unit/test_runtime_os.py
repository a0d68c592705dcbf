"""Which machine this is: what doctor and the Makefile's checks rest on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlxinfer import runtime


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Mac whose sysctl answers with this table."""
    table = {"kern.osproductversion": "15.3.1", "sysctl.proc_translated": "0"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(runtime, "_sysctl", lambda name: table.get(name, ""))
    return table


def test_the_version_of_macos_is_the_kernels(mac: dict[str, str]) -> None:
    assert runtime.macos_version() == (15, 3, 1)
    assert runtime.os_name().startswith("macOS 15.3.1 ")


def test_without_the_kernels_answer_python_is_asked(mac: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    del mac["kern.osproductversion"]
    monkeypatch.setattr("platform.mac_ver", lambda: ("14.1", ("", "", ""), "arm64"))
    assert runtime.macos_version() == (14, 1)


def test_an_intel_python_on_apple_silicon_is_known_by_the_translation(mac: dict[str, str]) -> None:
    assert not runtime.under_rosetta()
    mac["sysctl.proc_translated"] = "1"
    assert runtime.under_rosetta()
    del mac["sysctl.proc_translated"]  # an Intel Mac has no such key
    assert not runtime.under_rosetta()


def test_elsewhere_there_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(runtime, "_sysctl", lambda name: pytest.fail("asked sysctl"))
    assert runtime.macos_version() is None
    assert not runtime.under_rosetta()
    assert not runtime.os_name().startswith("macOS")


def test_a_sysctl_that_is_missing_or_hangs_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (FileNotFoundError(), subprocess.TimeoutExpired("sysctl", 5)):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(subprocess, "run", fail)
        assert runtime._sysctl("kern.osproductversion") == ""
