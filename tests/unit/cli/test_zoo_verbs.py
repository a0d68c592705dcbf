"""pull, ls, show and rm over a zoo in a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxinfer import runtime, zoo
from mlxinfer.errors import OfflineError
from mlxinfer.types import ProgressEvent
from mlxinfer.zoo.files import ModelFiles
from tests.unit.cli.conftest import Invoke, error_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder; its weights are none, only headers are read here."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "quantization": {"bits": 4, "group_size": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    """The one model on this machine, in the hub's cache."""
    files = ModelFiles("org/m", "folder", folder, "hub cache", 1_500_000)

    def resolve(name: str, settings: object, **_: Any) -> ModelFiles:
        if name != files.name:
            raise OfflineError(f"{name} is not on this machine")
        return files

    monkeypatch.setattr(zoo, "resolve", resolve)
    monkeypatch.setattr(zoo, "installed", lambda settings: [files])
    return files


def test_ls_prints_name_size_origin_and_path(invoke: Invoke, here: ModelFiles) -> None:
    header, row = invoke("ls").stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "FROM", "PATH"]
    assert row.split("  ") == ["org/m", "1.5 MB", "hub cache", str(here.path)]


def test_ls_json_is_the_same_as_data(invoke: Invoke, here: ModelFiles) -> None:
    models = json.loads(invoke("ls", "--json").stdout)["models"]
    assert models == [
        {"name": "org/m", "kind": "folder", "path": str(here.path), "origin": "hub cache", "size_bytes": 1_500_000}
    ]


def test_ls_all_adds_the_catalogue(invoke: Invoke, here: ModelFiles) -> None:
    assert "smollm2-135m" in invoke("ls", "--all").stdout
    catalog = json.loads(invoke("ls", "--all", "--json").stdout)["catalog"]
    assert [e["alias"] for e in catalog] == [e.alias for e in zoo.catalog()]


def test_ls_of_nothing_says_on_stderr_what_to_do(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "installed", lambda settings: [])
    result = invoke("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "mlxinfer pull smollm2-135m" in result.stderr
    assert json.loads(invoke("ls", "--json").stdout) == {"models": []}


def test_a_file_name_cannot_steer_the_terminal(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = ModelFiles("a\x1b[2Jb", "gguf", Path("/x\x1b[2J"), "file", 1)
    monkeypatch.setattr(zoo, "installed", lambda settings: [evil])
    assert "\x1b" not in invoke("ls").stdout


def test_pull_prints_the_path_on_stdout_and_progress_on_stderr(
    invoke: Invoke, here: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull(name: str, settings: object, *, progress: Any) -> ModelFiles:
        progress(ProgressEvent("download", 1, 10, "m.gguf"))
        return here

    monkeypatch.setattr(zoo, "pull", pull)
    result = invoke("pull", "org/m")
    assert result.stdout == f"{here.path}\n"
    assert "Downloading m.gguf" in result.stderr
    as_json = invoke("pull", "org/m", "--json")
    assert json.loads(as_json.stdout)["path"] == str(here.path)
    assert "Downloading" in as_json.stderr


def test_show_reads_the_configuration_of_a_folder(invoke: Invoke, here: ModelFiles) -> None:
    record = json.loads(invoke("show", "org/m", "--json").stdout)
    assert record["installed"] is True
    facts = {"architecture": "llama", "context_length": 2048, "quantization": "affine 4-bit, group 64"}
    assert record["model"] | facts == record["model"]
    text = invoke("show", "org/m").stdout
    assert "affine 4-bit, group 64" in text
    assert "2048 tokens" in text


def test_show_knows_the_catalogue_when_the_files_are_not_here(invoke: Invoke, here: ModelFiles) -> None:
    result = invoke("show", "smollm2-135m")
    assert result.exit_code == 0
    assert "Apache-2.0" in result.stdout
    assert "mlxinfer pull smollm2-135m" in result.stderr
    assert json.loads(invoke("show", "smollm2-135m", "--json").stdout)["installed"] is False


def test_show_of_what_is_nowhere_ends_with_3(invoke: Invoke, here: ModelFiles) -> None:
    assert invoke("show", "org/other").exit_code == 3


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_show_of_a_broken_configuration_ends_with_1_and_names_the_file(
    invoke: Invoke, here: ModelFiles, data: bytes
) -> None:
    (here.path / "config.json").write_bytes(data)
    result = invoke("show", "org/m", "--json")
    assert result.exit_code == 1
    assert "config.json" in error_of(result)["message"]


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were deleted."""
    names: list[str] = []

    def remove(name: str, settings: object) -> int:
        names.append(name)
        return 1_500_000

    monkeypatch.setattr(zoo, "remove", remove)
    return names


def test_rm_with_y_deletes_and_says_how_much(invoke: Invoke, here: ModelFiles, removed: list[str]) -> None:
    assert invoke("rm", "-y", "org/m").stdout == "org/m: freed 1.5 MB\n"
    assert json.loads(invoke("rm", "-y", "org/m", "--json").stdout) == {"name": "org/m", "freed_bytes": 1_500_000}
    assert removed == ["org/m", "org/m"]


def test_rm_without_a_terminal_and_without_y_deletes_nothing(
    invoke: Invoke, here: ModelFiles, removed: list[str]
) -> None:
    result = invoke("rm", "org/m", stdin="y\n")
    assert result.exit_code == 2
    assert "say -y" in result.stderr
    assert removed == []


@pytest.mark.parametrize(
    ("answer", "code", "names"), [("y\n", 0, ["org/m"]), ("n\n", 1, []), ("\n", 1, []), ("", 130, [])]
)
def test_rm_asks_on_a_terminal(
    invoke: Invoke,
    here: ModelFiles,
    removed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    names: list[str],
) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    result = invoke("rm", "org/m", stdin=answer)
    assert (result.exit_code, removed) == (code, names)
    assert str(here.path) in result.stderr


def test_rm_of_a_download_that_is_not_whole_does_not_ask(invoke: Invoke, here: ModelFiles, removed: list[str]) -> None:
    assert invoke("rm", "org/partial").exit_code == 0
    assert removed == ["org/partial"]


def test_rm_of_a_users_own_folder_is_refused(invoke: Invoke, folder: Path) -> None:
    result = invoke("rm", "-y", str(folder))
    assert result.exit_code == 2
    assert folder.is_dir()


def test_completion_prints_the_script_of_the_shell(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "_MLXINFER_COMPLETE=zsh_complete" in invoke("completion", "zsh").stdout
    assert "fish_complete" in json.loads(invoke("completion", "fish", "--json").stdout)["script"]
    monkeypatch.setenv("SHELL", "/bin/zsh")
    assert "zsh_complete" in invoke("completion").stdout
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    result = invoke("completion")
    assert result.exit_code == 2
    assert "$SHELL is tcsh" in result.stderr


def test_completion_of_a_model_offers_the_catalogue() -> None:
    from mlxinfer.cli.options import ModelName

    names = [item.value for item in ModelName().shell_complete(None, None, "smol")]  # pyright: ignore[reportArgumentType]
    assert "smollm2-135m" in names


@pytest.mark.parametrize(("memory", "verdict", "code"), [(64, "yes", 0), (0.66, "no", 4)])
def test_fit_says_yes_or_no_with_figures_and_ends_with_4_for_no(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, memory: float, verdict: str, code: int
) -> None:
    amount = int(memory * 10**9)
    monkeypatch.setattr("mlxinfer.runtime.memory", lambda: runtime.Memory(amount, amount, amount))
    monkeypatch.setattr("mlxinfer.zoo.fitting.measured_bandwidth", lambda: (100.0, "Apple M9, published"))
    as_json = invoke("fit", "smollm2-135m", "--ctx", "4096", "--json")
    report = json.loads(as_json.stdout)
    assert (report["verdict"], report["context"], as_json.exit_code) == (verdict, 4096, code)
    plain = invoke("fit", "smollm2-135m", "--ctx", "4096")
    assert plain.exit_code == code
    assert f"smollm2-135m: {verdict}, it" in plain.stdout
    assert "for 4096 tokens" in plain.stdout
    assert ("tokens/s: 100 GB/s (Apple M9, published)" in plain.stdout) == (verdict == "yes")


@pytest.mark.parametrize("ctx", ["0", "-1", "x", "100000000"])
def test_fit_refuses_a_context_out_of_range(invoke: Invoke, ctx: str) -> None:
    assert invoke("fit", "smollm2-135m", "--ctx", ctx).exit_code == 2


def test_completion_of_rm_offers_what_is_here_only(
    here: ModelFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlxinfer.cli.rm import rm

    kind = rm.params[0].type
    assert [item.value for item in kind.shell_complete(None, None, "")] == ["org/m"]  # pyright: ignore[reportArgumentType]
    assert kind.shell_complete(None, None, "smol") == []  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("MLXINFER_CONFIG", str(tmp_path / "missing"))
    assert kind.shell_complete(None, None, "") == []  # pyright: ignore[reportArgumentType]
