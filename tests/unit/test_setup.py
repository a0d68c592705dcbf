""".ci/setup on machines this one isn't: stubs of uname, sysctl, sw_vers and python3 in the PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / ".ci" / "setup"


class Machine:
    """A folder with a copy of .ci/setup, and a PATH that holds stubs and the plain tools it needs."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.project = folder / "project"
        (self.project / ".ci").mkdir(parents=True)
        shutil.copy(SETUP, self.project / ".ci" / "setup")
        (self.project / "pyproject.toml").touch()
        for tool in ("sh", "dirname", "cut", "rm", "touch", "cat", "mkdir"):
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))

    def stub(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def python(self, name: str, *, suitable: bool) -> None:
        """A python that makes a venv out of itself, and answers the suitability check by its exit code."""
        venv = f'mkdir -p "$3/bin"; cat "{self.bin}/{name}" > "$3/bin/python"; /bin/chmod +x "$3/bin/python"; exit 0'
        self.stub(
            name,
            f'case "$1" in -) exit {0 if suitable else 1};; -c) echo 3.9.6 arm64;; esac\n'
            f'if [ "$2" = venv ]; then {venv}; fi\n'
            f'if [ "$2" = pip ]; then echo "pip $*" >> "{self.project}/log"; fi\nexit 0',
        )

    def mac(self, *, arm: int = 1, version: str = "15.1") -> None:
        self.stub("uname", "echo Darwin")
        self.stub("sysctl", f"echo {arm}")
        self.stub("sw_vers", f"echo {version}")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.project / ".ci" / "setup"), *arguments]
        return subprocess.run(command, env={"PATH": str(self.bin), "HOME": "/"}, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    made.stub("uname", "echo Linux")
    return made


def test_an_intel_mac_is_refused(machine):
    machine.mac(arm=0)
    result = machine.run()
    assert result.returncode == 1
    assert "Intel" in result.stderr


def test_a_macos_older_than_mlx_needs_is_refused_with_its_version(machine):
    machine.mac(version="13.6.1")
    result = machine.run()
    assert result.returncode == 1
    assert "13.6.1 is too old" in result.stderr


def test_an_old_or_rosetta_python_without_uv_gets_a_message_that_says_how_to_get_one(machine):
    machine.mac()
    machine.python("python3", suitable=False)
    result = machine.run()
    assert result.returncode == 1
    assert "3.9.6 arm64" in result.stderr
    assert "brew install" in result.stderr
    assert "uv" in result.stderr
    assert not (machine.project / ".venv").exists()


def test_uv_makes_the_environment_where_python_is_too_old(machine):
    machine.mac()
    machine.python("python3", suitable=False)
    machine.python("uvpython", suitable=True)
    log = machine.project / "log"
    machine.stub("uv", f'echo "uv $*" >> "{log}"; "{machine.bin}/uvpython" -m venv .venv')
    result = machine.run("dev")
    assert result.returncode == 0, result.stderr
    assert "uv venv" in log.read_text()
    assert "-e .[dev]" in log.read_text()


def test_the_newest_suitable_python_is_used_and_installing_happens_once(machine):
    machine.python("python3", suitable=False)
    machine.python("python3.12", suitable=True)
    for _ in range(2):
        result = machine.run()
        assert result.returncode == 0, result.stderr
    assert (machine.project / "log").read_text().count("install") == 1
    (machine.project / ".venv" / ".installed-plain").unlink()
    assert machine.run().returncode == 0
    assert (machine.project / "log").read_text().count("install") == 2


def test_a_virtual_environment_without_pip_is_removed_and_the_next_run_recovers(machine):
    log = machine.project / "log"
    machine.stub("python3.12", 'if [ "$2" = venv ]; then mkdir -p "$3/bin"; echo > "$3/bin/python"; exit 1; fi; exit 0')
    result = machine.run()
    assert result.returncode == 1
    assert "python3-venv" in result.stderr
    assert not (machine.project / ".venv").exists()
    machine.python("python3.12", suitable=True)
    assert machine.run().returncode == 0
    assert log.exists()


def test_a_checkout_that_was_moved_installs_again(machine):
    machine.python("python3.12", suitable=True)
    assert machine.run().returncode == 0
    moved = machine.project.rename(machine.project.with_name("moved"))
    machine.project.mkdir()
    machine.project, old = moved, machine.project
    assert machine.run().returncode == 0
    assert (old / "log").read_text().count("install") == 1
    assert machine.run().returncode == 0
    assert (old / "log").read_text().count("install") == 1


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_make_hands_a_question_on_as_it_was_written(machine, how):
    shutil.copy(SETUP.parents[1] / "Makefile", machine.project)
    machine.stub("echo-args", 'for a in "$@"; do printf "<%s>" "$a"; done')
    (machine.project / ".venv" / "bin").mkdir(parents=True)
    python = machine.project / ".venv" / "bin" / "python"
    shutil.copy(machine.bin / "echo-args", python)
    (machine.project / ".ci" / "setup").write_text("#!/bin/sh\n")
    question = f"it's $5 or $HOME, `id` or $(shell touch {machine.project}/ran)?"
    command = [shutil.which("make") or "make", "-s", "run"]
    env = {"PATH": f"{machine.bin}:/usr/bin:/bin", "HOME": "/"}
    if how == "argument":
        command.append(f"PROMPT={question}")
    else:
        env["PROMPT"] = question
    out = subprocess.run(
        command, cwd=machine.project, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert out.stdout == f"<-m><mlxinfer><run><-m><smollm2-135m><--><{question}>", out.stderr
    assert not (machine.project / "ran").exists()


def test_an_environment_left_by_an_unsuitable_python_is_made_again(machine):
    machine.python("python3.12", suitable=True)
    (machine.project / ".venv" / "bin").mkdir(parents=True)
    old = machine.project / ".venv" / "bin" / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert machine.run().returncode == 0
    assert os.access(old, os.X_OK)
    assert "exit 1" not in old.read_text().splitlines()[1]
