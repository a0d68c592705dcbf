"""The edges of the process: streams that are full or missing, and Ctrl-C before and during a load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FULL = Path("/dev/full")
MLXINFER = f"{sys.executable} -m mlxinfer"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", f"{MLXINFER} {command}"], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which is Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    ["completion fish", "--help", "--version", "ls --help", "ls --json", "no-such-verb --json", "ls --json --all"],
)
def test_a_full_stdout_is_one_line_and_1(command: str, unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = shell(f"{command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "Error: cannot write the output: No space left on device\n")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which is Linux's")
def test_a_full_stderr_keeps_the_exit_code_and_the_answer() -> None:
    assert shell("no-such-verb 2> /dev/full").returncode == 2
    done = shell("show smollm2-360m 2> /dev/full")
    assert (done.returncode, "SmolLM2" in done.stdout) == (0, True)


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    done = shell(f"show smollm2-360m {closed}")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (">&-" in closed.replace("2>&-", "")) != ("SmolLM2" in done.stdout)
    refused = shell(f"run smollm2-135m {closed.replace('<&-', '')} < /dev/null")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


def test_help_whose_reader_has_left_ends_with_0() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "mlxinfer", "--help"], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_files_oserror_keeps_its_traceback() -> None:
    script = (
        "from mlxinfer.cli import ls\nfrom mlxinfer.cli.group import cli\ndef fail(**_): raise OSError(28, 'disk')\n"
        "ls.ls.callback = fail\ncli(['ls'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "OSError: [Errno 28] disk" in done.stderr


def test_ctrl_c_while_the_command_line_is_imported_ends_with_130_without_a_word() -> None:
    # The signal comes in the middle of an import, whatever the machine's speed.
    script = (
        "import builtins, os, signal, sys\nfrom mlxinfer.cli import main\nreal = builtins.__import__\n"
        "def slow(name, *rest):\n"
        "    if name == 'mlxinfer.cli.group': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = slow\nsys.argv = ['mlxinfer', 'ls']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


LOAD = """
import atexit, pathlib, types, signal, sys, threading, time
import mlxinfer.llm
from mlxinfer import zoo
from mlxinfer.cli.group import cli

loads = []

class Model:
    info = type("Info", (), {"context_length": 64})
    def unload(self): busy.join()

def load(*_, **__):
    global busy
    loads.append(1)
    if len(loads) < LOADS: return Model()
    busy = threading.Thread(target=time.sleep, args=(20,), daemon=True)
    busy.start()
    atexit.register(busy.join)
    print("loading", file=sys.stderr, flush=True)
    busy.join()

zoo.resolve = lambda *_, **__: types.SimpleNamespace(
    path=pathlib.Path('nowhere'), name='a model', kind='gguf', size_bytes=0
)
mlxinfer.llm.load = load
"""
"""A load that takes 20 s in another thread, which a regular exit and an unload wait for."""


@pytest.mark.parametrize(
    ("arguments", "loads", "sent", "code"),
    [
        (["run", "smollm2-135m", "Hi"], 1, signal.SIGINT, 130),
        (["serve", "a=smollm2-135m", "b=smollm2-135m", "--port", "0"], 2, signal.SIGINT, 130),
        (["serve", "a=smollm2-135m", "b=smollm2-135m", "--port", "0"], 2, signal.SIGTERM, 0),
    ],
)
def test_a_signal_while_a_model_loads_does_not_wait_for_the_load(
    arguments: list[str], loads: int, sent: signal.Signals, code: int
) -> None:
    script = f"{LOAD.replace('LOADS', str(loads))}\ncli({arguments!r})"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"loading" not in (line := process.stderr.readline()):
            assert line, "the program ended before it loaded"
        time.sleep(0.1)
        begun = time.monotonic()
        process.send_signal(sent)
        assert process.wait(30) == code
        assert time.monotonic() - begun < 5
        assert b"Traceback" not in process.stderr.read()
