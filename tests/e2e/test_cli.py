"""The real program in real processes, on the demo model, by pipe, signal and terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEMO = "smollm2-135m"
QUESTION = "What is the capital of France?"
LONG = "Write a very long story about a king and his castle."
MLXINFER = [sys.executable, "-m", "mlxinfer"]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings and no history of whoever runs the tests; the model cache stays theirs."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MLXINFER_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MLXINFER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("NO_COLOR", "1")


def mlxinfer(*args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*MLXINFER, *args], input=stdin, capture_output=True, env=os.environ | (env or {}), timeout=120
    )


def test_help_takes_less_than_0_3_s() -> None:
    # Of several runs the fastest: the others measure what else the machine does.
    def once() -> float:
        begun = time.perf_counter()
        subprocess.run([*MLXINFER, "--help"], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - begun

    assert min(once() for _ in range(7)) < 0.3


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, contextlib, io\nfrom mlxinfer.cli import main\nsys.argv = ['mlxinfer', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()\n"
        "heavy = {'mlx', 'mlx_lm', 'gradio', 'rich', 'prompt_toolkit', 'fastapi', 'uvicorn', 'pydantic', 'numpy',"
        " 'transformers', 'huggingface_hub', 'tokenizers', 'gguf', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_installed_script_is_the_same_program() -> None:
    script = Path(sys.executable).with_name("mlxinfer")
    done = subprocess.run([script, "--version"], capture_output=True, check=True)
    assert done.stdout == mlxinfer("--version").stdout


def test_an_unknown_model_offline_ends_with_3_and_opens_no_connection(tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    for name in ("no-such-model", "org/no-such-model"):
        done = mlxinfer("run", "-m", name, "hello", env=env)
        assert (done.returncode, done.stdout) == (3, b"")
        assert name in done.stderr.decode()
        assert b"Traceback" not in done.stderr
    as_json = mlxinfer("run", "-m", "org/no-such-model", "hello", "--json", env=env)
    assert json.loads(as_json.stdout)["error"]["code"] == "offline"


def test_invalid_utf8_on_stdin_ends_with_2() -> None:
    done = mlxinfer("run", DEMO, stdin=b"What \xff is")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"byte 0xff at offset 5" in done.stderr


def test_completion_scripts_complete_verbs_and_models() -> None:
    env = {"_MLXINFER_COMPLETE": "bash_complete", "COMP_WORDS": "mlxinfer pu", "COMP_CWORD": "1"}
    assert mlxinfer(env=env).stdout == b"plain,pull\n"
    env |= {"COMP_WORDS": "mlxinfer pull smol", "COMP_CWORD": "2"}
    assert f"plain,{DEMO}\n".encode() in mlxinfer(env=env).stdout


@pytest.mark.model
def test_one_question_is_answered_with_paris() -> None:
    done = mlxinfer("run", DEMO, QUESTION, "--temperature", "0")
    assert done.returncode == 0, done.stderr.decode()
    assert "Paris" in done.stdout.decode()
    assert done.stdout.endswith(b"\n")
    assert re.search(r"[\d.]+ tok/s · TTFT [\d.]+ s", done.stderr.decode())


@pytest.mark.model
def test_a_piped_question_gets_the_same_answer_as_json() -> None:
    args = ("run", DEMO, "--temperature", "0", "--max-tokens", "12")
    plain = mlxinfer(*args, stdin=QUESTION.encode() + b"\n")
    reply = json.loads(mlxinfer(*args, "--json", stdin=QUESTION.encode()).stdout)
    assert reply["text"].rstrip("\n") == plain.stdout.decode().rstrip("\n")
    assert reply["usage"]["completion_tokens"] <= 12
    assert reply["model"] == DEMO


@pytest.mark.model
def test_a_prompt_longer_than_the_context_ends_with_1_before_any_work() -> None:
    done = mlxinfer("run", DEMO, "word " * 500, "--ctx", "100")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"100" in done.stderr


@pytest.mark.model
def test_ctrl_c_in_mid_reply_ends_with_130_and_no_traceback() -> None:
    with subprocess.Popen([*MLXINFER, "run", DEMO, LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert time.monotonic() - begun < 10
        assert b"Traceback" not in err


@pytest.mark.model
def test_a_reader_that_leaves_ends_the_reply_quietly() -> None:
    with subprocess.Popen([*MLXINFER, "run", DEMO, LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(30) == 0
        assert b"Traceback" not in err
        assert b"Broken" not in err


# -- in a terminal ---------------------------------------------------------------------------------------------------

LOGIN = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, '-m', 'mlxinfer', *sys.argv[1:]])"


class Terminal:
    """The program on a pseudo-terminal that is its controlling one, so that typing Ctrl-C sends the signal."""

    def __init__(self, *args: str) -> None:
        self.master, slave = pty.openpty()
        # No cursor position requests: nobody answers them here.
        env = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        command = [sys.executable, "-c", LOGIN, *args]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        self.text = ""
        self.seen = 0

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Wait for the pattern after what was expected before; returns everything up to its end."""
        deadline = time.monotonic() + seconds
        while not (match := re.compile(pattern).search(self.text, self.seen)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} did not come; after it was: {self.text[self.seen :]!r}"
            if select.select([self.master], [], [], left)[0]:
                self._read()
        begun, self.seen = self.seen, match.end()
        return self.text[begun : self.seen]

    def _read(self) -> None:
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux: the other side is closed
            data = b""
        assert data, f"the program ended; after it was: {self.text[self.seen :]!r}"
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))

    def wait(self) -> int:
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Start the program in a terminal; ended after the test."""
    opened: list[Terminal] = []

    def start(*args: str) -> Terminal:
        opened.append(Terminal(*args))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.mark.model
def test_a_chat_that_is_killed_in_mid_reply_goes_on_later(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("run", DEMO, "--temperature", "0")
    chat.expect(r">>>")
    chat.type(f"{LONG}\r")
    chat.expect(r"\w+ \w+ \w+ \w+ \w+\W+\w+")
    chat.expect(r"\n.*?\w+ \w+ \w+")
    time.sleep(2)
    chat.process.kill()
    kept = json.loads(mlxinfer("chats", "ls", "--json").stdout)["conversations"]
    assert [one["title"] for one in kept] == [LONG[:60]]
    branch = json.loads(mlxinfer("chats", "show", kept[0]["id"], "--json").stdout)["messages"]
    assert [one["role"] for one in branch] == ["user", "assistant"]
    assert len(branch[1]["content"]) > 10
    later = terminal("run", DEMO, "--temperature", "0", "--max-tokens", "24", "--resume", "last")
    later.expect("2 messages so far")
    later.expect(r">>>")
    later.type(f"{QUESTION}\r")
    later.expect(r"tok/s")
    later.expect(r">>>")
    later.type("\x04")
    assert later.wait() == 0
    again = json.loads(mlxinfer("chats", "show", kept[0]["id"], "--json").stdout)["messages"]
    assert [one["content"] for one in again[:3]] == [branch[0]["content"], branch[1]["content"], QUESTION]
    assert len(again) == 4


@pytest.mark.model
def test_the_chat_survives_ctrl_c_and_ends_with_ctrl_d(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal("run", DEMO, "--temperature", "0")
    chat.expect(r"/help lists commands")
    chat.expect(r">>>")
    chat.type(f"{LONG}\r")
    chat.expect(r"\w+ \w+ \w+ \w+ \w+\W+\w+")  # the echo of the question
    chat.expect(r"\n.*?\w+ \w+ \w+")  # the reply has begun
    chat.type("\x03")
    chat.expect(r"\(stopped\)", 10)
    chat.expect(r">>>")
    chat.type("/clear\r")
    chat.expect("conversation cleared")
    chat.expect(r">>>")
    chat.type(f"{QUESTION}\r")
    assert "Paris" in chat.expect(r"tok/s")
    chat.expect(r">>>")
    chat.type("half a line\x03")
    chat.expect(r"leaves\)")
    chat.expect(r">>>")
    chat.type(f"/save {tmp_path / 'saved.json'}\r")
    chat.expect("saved 2 messages")
    chat.expect(r">>>")
    chat.type("\x04")
    assert chat.wait() == 0
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    assert "Paris" in saved["messages"][1]["content"]


@pytest.mark.model
def test_a_text_of_several_lines_is_one_message(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal("run", DEMO, "--temperature", "0", "--max-tokens", "4")
    chat.expect(r">>>")
    chat.type('"""first\rsecond"""\r')
    chat.expect(r"tok/s")
    chat.expect(r">>>")
    chat.type("third\x1b\rfourth\r")
    chat.expect(r"tok/s")
    chat.expect(r">>>")
    chat.type(f"/save {tmp_path / 'saved.json'}\r")
    chat.expect("saved 4 messages")
    chat.type("/exit\r")
    assert chat.wait() == 0
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["first\nsecond", "third\nfourth"]


@pytest.mark.model
def test_what_is_typed_during_a_reply_waits_for_the_next_prompt(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("run", DEMO, "--temperature", "0", "--max-tokens", "40")
    chat.expect(r">>>")
    chat.type(f"{LONG}\r")
    chat.expect(r"\n.*?\w+ \w+")
    chat.type("/model\r")
    assert "/model" not in chat.expect(r"tok/s")
    chat.expect(r"context_length")
    chat.expect(r">>>")
    chat.type("\x04")
    assert chat.wait() == 0


@pytest.mark.model
def test_what_is_typed_while_the_model_loads_waits_for_the_prompt(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("run", DEMO)
    chat.expect("Loading")
    chat.type("/model\r")
    assert "/model" not in chat.expect(r"/help lists commands")
    chat.expect(r"context_length")
    chat.expect(r">>>")
    chat.type("\x04")
    assert chat.wait() == 0


@pytest.mark.model
@pytest.mark.parametrize("command", [("run", DEMO, LONG), ("serve", DEMO, "--port", "0")])
def test_ctrl_c_while_the_model_loads_ends_at_once(command: tuple[str, ...]) -> None:
    with subprocess.Popen([*MLXINFER, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"Loading" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err.strip()) == (130, b"")
        assert time.monotonic() - begun < 1.5


@pytest.mark.model
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is Linux's")
def test_an_answer_that_cannot_be_written_ends_with_1() -> None:
    with open("/dev/full", "wb") as full:
        command = [*MLXINFER, "run", DEMO, QUESTION, "--max-tokens", "3"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith(b"Error: cannot write the output: No space left on device\n")
    assert b"Traceback" not in done.stderr


@pytest.mark.model
def test_serve_names_its_url_answers_and_ends_with_0_on_sigterm() -> None:
    command = [*MLXINFER, "serve", f"demo={DEMO}", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["models"] == ["demo"]
        with urllib.request.urlopen(f"{ready['url']}/v1/models", timeout=30) as response:
            assert [m["id"] for m in json.load(response)["data"]] == ["demo"]
        process.terminate()
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert f"Serving demo at {ready['url']}/v1" in err
        assert "Traceback" not in err
