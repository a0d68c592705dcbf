"""What the page stands on before a browser comes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from mlxinfer.app.door import preferred
from mlxinfer.app.mount import languages_of, prepare_gradio, uploads_folder
from mlxinfer.config import Settings
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(UnsupportedModelError, match=r"pip install 'mlxinfer\[app\]'"):
        prepare_gradio(tmp_path)


def test_uploads_are_this_users_and_what_the_dead_left_is_swept(tmp_path: Path) -> None:
    above = tmp_path / "app-uploads"
    for name in ("999999999", "not a number"):
        (above / name).mkdir(parents=True)
        (above / name / "file").write_text("x")
    (above / str(os.getppid())).mkdir()
    mine = uploads_folder(Settings(cache_dir=tmp_path))
    assert mine.stat().st_mode & 0o077 == 0
    assert {one.name for one in above.iterdir()} == {str(os.getpid()), str(os.getppid())}
    (mine / "left").write_text("x")
    assert not list(uploads_folder(Settings(cache_dir=tmp_path)).iterdir())


@pytest.mark.parametrize(
    ("header", "language"),
    [("", "en"), ("ja", "ja"), ("ja-JP,en;q=0.9", "ja"), ("en,ja", "en"), ("de;q=1,ja;q=0.2", "ja"),
     ("JA;q=junk", "ja"), ("ja;q=0", "en"), (",;;,=", "en")],
)  # fmt: skip
def test_the_browsers_first_language_that_is_there_counts(header: str, language: str) -> None:
    assert preferred(header, ("en", "ja")) == language


def test_a_language_that_is_set_is_the_only_one() -> None:
    assert languages_of("ja") == ("ja",)
    assert languages_of(None) == ("en", "ja")
