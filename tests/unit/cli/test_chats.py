"""`mlxinfer chats` and `mlxinfer config`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from mlxinfer.app.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Invoke


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXINFER_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def key(data: Path) -> str:
    store = open_store(data / "data" / "chats.db").store
    chat = store.create("smollm2-135m", title="Capitals")
    store.add(chat.id, "user", "The capital of France?")
    store.add(chat.id, "assistant", "Paris.\x1b[31m")
    store.close()
    return chat.id


def test_conversations_are_listed_shown_and_found(key: str, invoke: Invoke) -> None:
    assert f"{key[:8]}" in invoke("chats", "ls").stdout
    assert json.loads(invoke("chats", "ls", "--json").stdout)["conversations"][0]["title"] == "Capitals"
    shown = invoke("chats", "show", key[:6]).stdout
    assert "Paris." in shown
    assert "\x1b" not in shown
    assert json.loads(invoke("chats", "show", key, "--json").stdout)["messages"][1]["content"] == "Paris.\x1b[31m"
    assert "of France" in invoke("chats", "search", "capital of").stdout
    assert json.loads(invoke("chats", "search", "nowhere", "--json").stdout) == {"hits": []}


def test_a_conversation_goes_out_and_comes_back(key: str, data: Path, invoke: Invoke) -> None:
    for name in ("chat.json", "chat.md"):
        assert invoke("chats", "export", key, str(data / name)).exit_code == 0
    again = invoke("chats", "export", key, str(data / "chat.md"))
    assert again.exit_code == 2
    assert "--overwrite replaces it" in again.stderr
    made = json.loads(invoke("chats", "import", str(data / "chat.json"), str(data / "chat.md"), "--json").stdout)
    assert [chat["title"] for chat in made["conversations"]] == ["Capitals"] * 2
    (data / "other.json").write_text("{}")
    wrong = invoke("chats", "import", str(data / "other.json"))
    assert wrong.exit_code == 2
    assert "other.json: the file is no conversation" in wrong.stderr


def test_a_deleted_conversation_comes_back_until_it_is_removed_for_good(key: str, invoke: Invoke) -> None:
    def ids(*flags: str) -> list[str]:
        return [chat["id"] for chat in json.loads(invoke("chats", "ls", *flags, "--json").stdout)["conversations"]]

    invoke("chats", "rm", key)
    assert (ids(), ids("--deleted")) == ([], [key])
    invoke("chats", "rm", "--undo", key)
    assert ids() == [key]
    invoke("chats", "rm", "--for-good", key)
    assert (ids(), ids("--deleted")) == ([], [])
    assert invoke("chats", "rm", key).exit_code == 2
    assert "did you mean 'search'" in invoke("chats", "searhc", key).stderr


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("# mine\nport = 9000 # not 8080\n")
    monkeypatch.setenv("MLXINFER_CONFIG", str(path))
    return path


def test_a_setting_is_written_beside_what_is_there(file: Path, invoke: Invoke) -> None:
    assert invoke("config", "path").stdout.strip() == str(file)
    assert invoke("config", "set", "model", "smollm2-135m").exit_code == 0
    assert invoke("config", "set", "port", "9001").exit_code == 0
    assert invoke("config", "set", "allow_hosts", "a.local, b.local").exit_code == 0
    assert invoke("config", "set", "metrics_open", "true").exit_code == 0
    assert file.read_text() == (
        '# mine\nport = 9001 # not 8080\nmodel = "smollm2-135m"\nallow_hosts = ["a.local", "b.local"]\n'
        "metrics_open = true\n"
    )
    assert invoke("config", "get", "port").stdout.strip() == "9001"
    told = json.loads(invoke("config", "get", "--json").stdout)
    assert told["model"]["value"] == "smollm2-135m"
    assert str(file) in told["model"]["from"]
    assert told["host"] == {"value": "127.0.0.1", "from": None}
    assert invoke("config", "set", "port", "--unset").exit_code == 0
    assert "port" not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "prot", "1"), "there is no setting 'prot'"),
        (("set", "port", "many"), "port must be an integer"),
        (("set", "port", "70000"), "port is 70000"),
        (("set", "port"), "a VALUE or --unset"),
        (("get", "prot"), "did you mean 'port'"),
    ],
)
def test_a_setting_that_is_wrong_changes_nothing(
    arguments: tuple[str, ...], message: str, file: Path, invoke: Invoke
) -> None:
    before = file.read_text()
    done = invoke("config", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert file.read_text() == before


def test_a_file_that_is_no_toml_is_left_alone(file: Path, invoke: Invoke) -> None:
    file.write_text("port = = 1\n")
    done = invoke("config", "set", "model", "m")
    assert done.exit_code == 2
    assert "is no TOML" in done.stderr
    assert file.read_text() == "port = = 1\n"
