"""The layout holds: links resolve, a wheel carries every room, importing stays light."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mlxinfer

ROOT = Path(__file__).parents[2]
ROOMS = ("convert", "lora", "distributed", "app")


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_one_folder_reached_by_a_relative_link(room):
    link = ROOT / "mlxinfer" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
    assert (link / "__init__.py").is_file()
    assert __import__(f"mlxinfer.{room}", fromlist=["_"]).__doc__


def test_a_built_wheel_holds_every_room_every_module_and_the_data_files(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    links = {ROOT / "mlxinfer" / room for room in ROOMS}
    expected = {
        f"mlxinfer/{path.relative_to(ROOT / 'mlxinfer')}"
        for path in (ROOT / "mlxinfer").rglob("*.py")
        if not links & set(path.parents)
    }
    expected |= {f"mlxinfer/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    expected |= {f"mlxinfer/zoo/{path.name}" for path in (ROOT / "mlxinfer" / "zoo").glob("*.toml")}
    expected |= {f"mlxinfer/kernels/cpp/{path.name}" for path in (ROOT / "mlxinfer" / "kernels" / "cpp").iterdir()}
    expected |= {"mlxinfer/app/page/page.js", "mlxinfer/app/page/style.css"}
    assert expected | {"mlxinfer/py.typed"} <= names


def test_importing_the_package_imports_neither_mlx_nor_a_ui_nor_a_server():
    code = "import sys, mlxinfer; print(*[m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"mlx", "mlx_lm", "gradio", "transformers", "fastapi", "torch"} & set(loaded)


def test_the_public_names_are_exactly_those_in_all():
    for name in mlxinfer.__all__:
        assert getattr(mlxinfer, name) is not None
    public = {n for n, v in vars(mlxinfer).items() if getattr(v, "__module__", "").startswith("mlxinfer")}
    public -= {"__getattr__", "__dir__"}
    assert public <= set(mlxinfer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mlxinfer.nothing


def test_every_error_has_a_place_in_the_tree_of_its_docstring():
    from mlxinfer import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.MlxinferError)]
    assert errors.__doc__
    for error in classes:
        assert error.__name__ in errors.__doc__
        assert error.exit_code in (1, 2, 3, 4)
        assert 400 <= error.status < 600


def test_ci_minutes_leave_room_for_every_part():
    minutes = tomllib.loads((ROOT / ".ci" / "minutes.toml").read_text())
    assert sum(minutes.values()) <= 55
