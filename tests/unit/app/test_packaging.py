"""What the packaged program is told to do, and its icon."""

import plistlib
import tomllib
from pathlib import Path

import pytest

from mlxinfer.cli import packaged

ROOT = Path(__file__).parents[3]
HERE = ROOT / "app" / "packaging"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["mlxinfer"], ["mlxinfer", "app"]),
        (["mlxinfer", "-psn_0_12345"], ["mlxinfer", "app"]),
        (["mlxinfer", "ls", "--json"], ["mlxinfer", "ls", "--json"]),
        (["mlxinfer", "--version"], ["mlxinfer", "--version"]),
    ],
)
def test_a_double_click_opens_the_app_and_arguments_are_a_command_line(given, expected):
    assert packaged.arguments(given) == expected


def test_the_packaged_program_runs_a_script_for_its_own_child(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mlxinfer", "-c", "import sys; print(sys.argv)", "a", "b"])
    packaged.main()
    assert capsys.readouterr().out == "['-c', 'a', 'b']\n"


def test_the_entitlements_can_be_read_and_ask_for_one_thing():
    asked = plistlib.loads((HERE / "entitlements.plist").read_bytes())
    assert asked == {"com.apple.security.cs.allow-unsigned-executable-memory": True}


def test_the_icon_in_the_repository_is_what_the_script_draws():
    image = pytest.importorskip("PIL.Image")
    from mlxinfer.app.packaging import icon

    with image.open(HERE / "icon.png") as kept:
        assert kept.size == (icon.SIZE, icon.SIZE)
        assert kept.tobytes() == icon.draw(icon.SIZE).tobytes()


def test_the_icon_keeps_its_lines_at_16_pixels():
    pytest.importorskip("PIL")
    from mlxinfer.app.packaging import icon

    small = icon.draw(16)
    row = [small.getpixel((x, 5)) for x in range(16)]
    assert row[4] == row[11] == (255, 255, 255, 255)
    assert {row[x] for x in range(5, 11)} == {(62, 66, 190, 255)}
    assert small.getpixel((0, 0))[3] == 0


def test_an_iconset_has_every_size_once_and_twice(tmp_path):
    image = pytest.importorskip("PIL.Image")
    from mlxinfer.app.packaging import icon

    icon.write(tmp_path)
    sizes = {}
    for file in (tmp_path / "icon.iconset").iterdir():
        with image.open(file) as drawn:
            sizes[file.name] = drawn.size[0]
    assert sizes == {f"icon_{n}x{n}.png": n for n in icon.SIZES} | {f"icon_{n}x{n}@2x.png": 2 * n for n in icon.SIZES}


def test_the_bundle_has_an_extra_of_its_own():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(name.startswith("pyinstaller") for name in extras["bundle"])
