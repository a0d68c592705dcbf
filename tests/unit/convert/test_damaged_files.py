"""Model files with something wrong in them: a slice of `python -m tests.fuzz.files`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.convert import open_source
from tests.fuzz import files

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_damaged_files_end_in_errors_that_name_them() -> None:
    found = files.campaign(2000, seed=17)
    assert found["findings"] == []
    assert sum(found["counts"].values()) == 2000
    assert found["counts"]["ModelFileError"] > 1000
    assert found["counts"]["read"] > 50, "damage of every kind would have to be found"


def test_what_is_no_error_of_ours_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise KeyError("tensor")

    monkeypatch.setattr("mlxinfer.convert.open_source", broken)
    assert files.examine(tmp_path) == ("finding", "KeyError: 'tensor'")
    monkeypatch.undo()
    assert open_source is not broken
    outcome, finding = files.examine(tmp_path / "none")
    assert outcome != "read"
    assert finding is None
