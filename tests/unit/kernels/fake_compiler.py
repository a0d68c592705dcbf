"""A compiler that takes no time: it writes its arguments into the file it is to make, and a line into a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer.kernels import build, compiling

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake compiler $(cat "$0.version")"; exit 0; fi
echo "$$ $*" >> "$0.log"
{body}
while [ "$1" != -o ]; do shift; done
echo "made by $0" > "$2"
"""


class FakeCompiler:
    """Stands where $CXX says."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "c++"
        self._log = folder / "c++.log"
        self.has_version("1.0")
        self.does("")

    def does(self, body: str) -> None:
        """Let it run `body`, in sh, before it writes the file."""
        self.path.write_text(SCRIPT.format(body=body))
        self.path.chmod(0o755)

    def has_version(self, version: str) -> None:
        self.path.with_name("c++.version").write_text(version)

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started."""
        return [int(line.split()[0]) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    @property
    def calls(self) -> int:
        return len(self.pids)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Builds of three small sources, by a compiler of ours; caches are below the test's own folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fake = FakeCompiler(folder)
    sources = tmp_path / "cpp"
    sources.mkdir()
    for name in ("isa.cpp", "a.cpp", "b.cpp", "a.h"):
        (sources / name).write_text(f"// {name}")
    for module in (build, compiling):
        monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setenv("CXX", str(fake.path))
    monkeypatch.delenv("MLXINFER_KERNELS_DIR", raising=False)
    monkeypatch.delenv("MLXINFER_KERNELS_CXXFLAGS", raising=False)
    return fake
