"""The root command: lazy verbs, one map from errors to exit codes, and what is printed where."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

import mlxinfer
from mlxinfer import errors
from mlxinfer.cli.group import VERBS, cli
from tests.unit.cli.conftest import Invoke, error_of

EVERY_ERROR = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.MlxinferError) and value.__module__ == errors.__name__
]


def loads(verb: str) -> click.Command:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return command


def test_help_names_every_verb_and_imports_none() -> None:
    script = (
        "import sys, click.testing; from mlxinfer.cli.group import cli, VERBS\n"
        "out = click.testing.CliRunner().invoke(cli, ['--help']).stdout\n"
        "assert all(f'  {verb} ' in out for verb in VERBS), out\n"
        "names = {target.partition(':')[0] for target, _ in VERBS.values()}\n"
        "print(sorted(names & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_name_it_is_listed_under_an_example_and_json(verb: str, invoke: Invoke) -> None:
    assert loads(verb).name == verb
    text = invoke(verb, "--help").stdout
    assert f"  mlxinfer {verb}" in text or f"mlxinfer {verb} " in text
    assert "Examples:" in text
    command = loads(verb)
    if not isinstance(command, click.Group):
        assert "--json" in text
        return
    for name in command.list_commands(click.Context(command)):
        below = invoke(verb, name, "--help").stdout
        assert f"mlxinfer {verb} {name}" in below
        assert "Examples:" in below
        assert "--json" in below


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_imports_neither_mlx_nor_rich_nor_the_server_before_it_runs(verb: str) -> None:
    script = (
        "import sys; from mlxinfer.cli.group import cli; import click\n"
        f"cli.get_command(click.Context(cli), {verb!r})\n"
        "heavy = {'mlx', 'mlx_lm', 'rich', 'prompt_toolkit', 'fastapi', 'uvicorn', 'huggingface_hub', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_ends_with_0_and_an_unknown_verb_with_2_and_a_guess(invoke: Invoke) -> None:
    assert invoke("--help").exit_code == invoke("-h").exit_code == 0
    result = invoke("pul", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean 'pull'?" in result.stderr


def test_version_is_the_packages(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"mlxinfer, version {mlxinfer.__version__}\n"


@pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda kind: kind.__name__)
def test_every_error_ends_with_its_exit_code(
    kind: type[errors.MlxinferError], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind("what is wrong")

    monkeypatch.setattr("mlxinfer.zoo.pull", fail)
    plain, as_json = invoke("pull", "x"), invoke("pull", "x", "--json")
    assert plain.exit_code == as_json.exit_code == kind.exit_code
    assert (plain.stdout, plain.stderr) == ("", "Error: what is wrong\n")
    assert error_of(as_json) == {"code": kind.code, "message": "what is wrong"}


def test_the_exit_codes_are_the_documented_ones() -> None:
    codes = {kind.__name__: kind.exit_code for kind in EVERY_ERROR}
    assert {name for name, code in codes.items() if code == 2} == {"InvalidRequestError"}
    assert {name for name, code in codes.items() if code == 3} == {
        "ModelNotFoundError",
        "OfflineError",
        "GatedModelError",
    }
    assert {name for name, code in codes.items() if code == 4} == {"WontFitError", "ModelsBusyError"}
    assert set(codes.values()) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "args", [("pull",), ("pull", "a", "b"), ("nonsense",), ("run", "--top-k", "x"), ("ls", "--wrong")]
)
def test_a_usage_error_ends_with_2_in_words_or_json(args: tuple[str, ...], invoke: Invoke) -> None:
    plain, as_json = invoke(*args), invoke(*args, "--json")
    assert plain.exit_code == as_json.exit_code == 2
    assert plain.stdout == ""
    assert "Error: " in plain.stderr
    assert error_of(as_json)["code"] == "usage"


def test_a_wrong_setting_ends_with_2_and_names_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_PROT", "1")
    result = invoke("ls")
    assert result.exit_code == 2
    assert "$MLXINFER_PROT: unknown setting 'prot'" in result.stderr


def test_ctrl_c_ends_with_130_without_a_word(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxinfer.zoo.pull", interrupt)
    result = invoke("pull", "x")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "")


def test_our_own_bug_keeps_its_traceback(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("mlxinfer.zoo.pull", bug)
    assert isinstance(invoke("pull", "x").exception, ZeroDivisionError)


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    # Far more than a pipe holds, to a reader that takes one byte.
    script = (
        "import sys, click\nfrom mlxinfer.cli import ls\nfrom mlxinfer.cli.group import cli\n"
        "ls.ls.callback = lambda **_: click.echo('x' * 1_000_000)\ncli(['ls'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()


def test_json_before_the_verb_is_taken_and_alone_says_where_it_goes(invoke: Invoke) -> None:
    assert invoke("--json", "ls").stdout == invoke("ls", "--json").stdout != ""
    assert invoke("--json", "--version").exit_code == 0
    result = invoke("--json")
    assert result.exit_code == 2
    assert "mlxinfer VERB --json" in error_of(result)["message"]
