"""An extension that could end the process is found out in another one, and the kernel to blame is left out alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from typing import TYPE_CHECKING

import pytest

from mlxinfer.kernels import load as loading
from mlxinfer.kernels.load import LoadError, check_owner, faults, load
from mlxinfer.kernels.tools import BuildError, find_compiler

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

# An extension in plain C++, with whatever in place of the kernels.
SOURCE = """
#include <Python.h>
#include <csignal>
#include <cstdlib>
static PyObject* crash(PyObject*, PyObject*, PyObject*) { raise(SIGSEGV); return nullptr; }
static PyObject* leave(PyObject*, PyObject*, PyObject*) { _Exit(7); }
static PyObject* fine(PyObject*, PyObject*, PyObject*) { Py_RETURN_NONE; }
#define KERNEL(name, f) {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)), METH_VARARGS | METH_KEYWORDS, nullptr}
static PyMethodDef methods[] = {@METHODS@ {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__kernels() { @INIT@ return PyModule_Create(&module); }
"""  # noqa: E501


def extension(folder: Path, methods: str, init: str = "") -> Path:
    """A file like a built extension. Skips without a compiler."""
    source, path = folder / "source.cpp", folder / "_kernels.so"
    source.write_text(SOURCE.replace("@METHODS@", methods).replace("@INIT@", init))
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    headers = sysconfig.get_paths()["include"]
    subprocess.run([*compiler, "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture
def copy(kernels: ModuleType, tmp_path: Path) -> Path:
    """The real extension, in a folder of its own."""
    path = tmp_path / "_kernels.so"
    shutil.copy(kernels.__file__ or "", path)
    return path


def test_a_sound_extension_is_tried_once_and_again_when_its_bytes_changed(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    real = loading._try
    monkeypatch.setattr(loading, "_try", lambda path: tried.append(path) or real(path))
    assert faults(copy) == faults(copy) == {}
    assert len(tried) == 1
    with copy.open("ab") as file:
        file.write(b"\0")
    faults(copy)
    assert len(tried) == 2
    monkeypatch.setenv("MLXINFER_KERNELS_ISA", "base" if os.environ.get("MLXINFER_KERNELS_ISA") != "base" else "")
    faults(copy)
    assert len(tried) == 3
    for damage in ("", "[]", "{", '{"faults": 1}'):
        (copy.parent / "verified.json").write_text(damage)
        assert faults(copy) == {}
    assert json.loads((copy.parent / "verified.json").read_text())["faults"] == {}


@pytest.mark.parametrize("damage", ["empty", "half", "text", "zeros", "folder"])
def test_a_damaged_file_is_an_error_and_not_the_end_of_the_process(copy: Path, damage: str) -> None:
    whole = copy.read_bytes()
    copy.unlink()
    if damage == "folder":
        copy.mkdir()
    else:
        damaged = {"half": whole[: len(whole) // 2], "text": b"no library", "zeros": whole[:4096] + bytes(len(whole))}
        copy.write_bytes(damaged.get(damage, b""))
    with pytest.raises((LoadError, OSError)):
        faults(copy)
    assert not (copy.parent / "verified.json").exists()


def test_one_that_ends_whoever_loads_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="ended with SIGSEGV"):
        faults(extension(tmp_path, "", init="raise(SIGSEGV);"))


def test_one_made_for_something_else_is_named(tmp_path: Path) -> None:
    path = extension(tmp_path, "")
    path.write_bytes(path.read_bytes().replace(b"PyInit__kernels", b"PyInit__another"))
    with pytest.raises(LoadError, match="PyInit__kernels"):
        load(path)
    with pytest.raises(LoadError, match="PyInit__kernels"):
        faults(path)


def test_kernels_that_end_the_process_are_left_out_and_no_others(tmp_path: Path) -> None:
    methods = 'KERNEL("rms_norm", fine), KERNEL("rope", crash), KERNEL("softmax", leave), KERNEL("logsumexp", fine),'
    found = faults(extension(tmp_path, methods))
    assert found.keys() == {"rope", "softmax"}
    assert "SIGSEGV" in found["rope"]
    assert "7" in found["softmax"]
    assert json.loads((tmp_path / "verified.json").read_text())["faults"] == found


def test_one_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "TRIAL_SECONDS", 0.5)
    with pytest.raises(LoadError, match="nothing for"):
        faults(extension(tmp_path, "", init="for (volatile bool on = true; on;) {}"))


def test_an_extension_that_does_not_know_mlxs_arrays_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = iter([{"v22"}, {"v22", "v23"}])
    monkeypatch.setattr(loading, "shared_types", lambda: next(sets))
    with pytest.raises(LoadError, match="does not know mlx's arrays"):
        load(copy)


def test_a_file_that_others_may_write_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "_kernels.so"
    path.touch(0o755)
    check_owner(path)
    path.chmod(0o757)
    with pytest.raises(BuildError, match="every user may change it"):
        check_owner(path)
    path.chmod(0o755)
    owner = path.stat().st_uid
    monkeypatch.setattr(loading.os, "geteuid", lambda: 54321)
    if owner != 0:
        with pytest.raises(BuildError, match="belongs to another user"):
            check_owner(path)
    else:
        check_owner(path)  # root's files are as good as one's own
        os.chown(path, 12345, -1)
        with pytest.raises(BuildError, match="belongs to another user"):
            check_owner(path)


def test_root_loads_only_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "build" / "_kernels.so"
    path.parent.mkdir(0o755)
    path.touch(0o755)
    owner = path.stat().st_uid
    if owner != 0:
        monkeypatch.setattr(loading.os, "geteuid", lambda: 0)
    else:
        check_owner(path)
        os.chown(path, 12345, -1)
    with pytest.raises(BuildError, match="belongs to another user"):
        check_owner(path)


@pytest.mark.parametrize("which", ["file", "folder", "home"])
def test_neither_the_file_nor_its_folders_may_be_open_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    path = tmp_path / "kernels" / "build" / "_kernels.so"
    path.parent.mkdir(0o755, parents=True)
    path.touch(0o755)
    place = {"file": path, "folder": path.parent, "home": path.parent.parent}[which]
    for mode, sound in ((0o755, True), (0o757, False), (0o775, True), (0o700, True)):
        place.chmod(mode)
        if sound:
            check_owner(path)
        else:
            with pytest.raises(BuildError, match="every user may change it"):
                check_owner(path)
    # Writable by a group that the user isn't in.
    place.chmod(0o775)
    monkeypatch.setattr(loading.os, "getegid", lambda: 54321)
    monkeypatch.setattr(loading.os, "getgroups", list[int])
    monkeypatch.setattr(type(path), "stat", lambda self, **_: _of_group(self, 12345))
    with pytest.raises(BuildError, match="a group that isn't yours") as error:
        check_owner(path)
    assert str(place) in str(error.value)
    if which != "file":
        place.chmod(0o1777)  # like /tmp
        check_owner(path)


def _of_group(path: Path, group: int) -> os.stat_result:
    found = list(os.stat(path))
    found[5] = group
    return os.stat_result(found)
