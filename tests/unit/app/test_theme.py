"""The file that says light or dark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer.app import theme

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_chosen_last_holds(tmp_path: Path) -> None:
    folder = tmp_path / "not yet there"
    assert theme.read(folder) == ""
    for chosen in ("dark", "light"):
        theme.write(folder, chosen)
        assert theme.read(folder) == chosen


@pytest.mark.parametrize("text", ["", "[]", "{", '{"theme": "blue"}', '{"theme": ["dark"]}', "x" * 5000])
def test_a_file_that_holds_anything_else_leaves_it_to_the_system(tmp_path: Path, text: str) -> None:
    (tmp_path / theme.FILE).write_text(text)
    assert theme.read(tmp_path) == ""


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    theme.write(tmp_path / "file" / "data", "dark")
    assert theme.read(tmp_path / "file" / "data") == ""
