"""`mlxinfer completion` in the shells themselves."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from mlxinfer.app.store import open_store

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LINES = {
    "mlxinfer show smollm2-13": ["smollm2-135m"],
    "mlxinfer lora tra": ["train"],
    "mlxinfer chats show ": ["ID"],
    "mlxinfer run --resume ": ["ID"],
    "mlxinfer chats rm --undo ": ["DELETED"],
    "mlxinfer config get data_": ["data_dir"],
    "mlxinfer completion f": ["fish"],
    "mlxinfer ls --js": ["--json"],
}
"""What is typed → what Tab makes of it or offers."""
SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(not shutil.which(shell), reason=f"{shell} is not installed"))
    for shell in ("bash", "zsh", "fish")
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """An environment with `mlxinfer` on its PATH and two conversations, and the first eight letters of their ids."""
    home = tmp_path_factory.mktemp("home")
    store = open_store(home / "data" / "chats.db").store
    ids = {"ID": store.create("m", title="東京, the\ncapital: [x]").id[:8]}
    gone = store.create("m", title="gone").id
    store.delete(gone)
    store.close()
    program = home / "bin" / "mlxinfer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mlxinfer "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "ZDOTDIR": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "MLXINFER_DATA_DIR": str(home / "data"),
        "PYTHONPATH": ROOT,
        "LC_ALL": "C.UTF-8",
        "TERM": "dumb",
    }
    for shell in ("bash", "zsh", "fish"):
        with (home / f"script.{shell}").open("wb") as file:
            subprocess.run([program, "completion", shell], env=environment, stdout=file, check=True)
    return environment, ids | {"DELETED": gone[:8]}


def offered_by_bash(line, environment):
    *words, last = line.split(" ")
    code = f""". "$HOME/script.bash"
    COMP_WORDS=({shlex.join(words)} {shlex.quote(last)}); COMP_CWORD={len(words)}
    _mlxinfer_completion mlxinfer; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return _said(["bash", "--norc", "-c", code], environment)


def offered_by_fish(line, environment):
    code = f'source "$HOME/script.fish"; complete -C {shlex.quote(line)}'
    return [found.split("\t")[0] for found in _said(["fish", "--no-config", "-c", code], environment)]


def _said(command, environment):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.split("\n") if line]


def offered_by_zsh(line, environment):
    """Types into a shell on a terminal: zsh completes nowhere else. What was completed is printed between marks."""
    setup = (
        "PS1=; autoload -Uz compinit; compinit -u -D; zstyle ':completion:*' menu no; setopt no_auto_menu; "
        '. "$HOME/script.zsh"; '
        "show() { print -r -- \"<<$BUFFER>>\"; zle -I; }; zle -N show; bindkey '^G' show; echo REA''DY\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
    try:
        os.write(terminal, setup.encode())
        _until(terminal, "READY")
        os.write(terminal, f"{line}\t\x07".encode())
        buffer = _until(terminal, ">>").rpartition("<<")[2].partition(">>")[0]
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return [word for word in buffer.removeprefix(line.rpartition(" ")[0]).split() if word != line.rpartition(" ")[2]]


def _until(terminal, mark):
    text, end = "", time.monotonic() + 60
    while mark not in text:
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text


OFFERED = {"bash": offered_by_bash, "zsh": offered_by_zsh, "fish": offered_by_fish}


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_verbs_models_conversations_settings_and_options(shell, kept):
    environment, ids = kept
    found = {line: OFFERED[shell](line, environment) for line in LINES}
    expected = {line: [ids.get(word, word) for word in words] for line, words in LINES.items()}
    assert found == expected


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", ["mlxinfer nothing ", "mlxinfer lora nothing "])
def test_tab_after_a_word_that_is_no_verb_prints_no_error_between_what_is_typed(shell, line, kept):
    found = OFFERED[shell](line, kept[0])
    assert not {"Usage:", "Error:"} & {word for text in found for word in text.split()}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_database_that_is_damaged_is_left_alone_by_tab(shell, kept, tmp_path):
    environment = kept[0] | {"MLXINFER_DATA_DIR": str(tmp_path)}
    (tmp_path / "chats.db").write_bytes(b"not a database")
    assert not any("not" in word for word in OFFERED[shell]("mlxinfer chats show ", environment))
    assert [file.name for file in tmp_path.iterdir()] == ["chats.db"]
