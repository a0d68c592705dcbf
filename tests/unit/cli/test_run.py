"""`mlxinfer run` with a prompt: which argument is what, what goes where, and what it is refused for."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from mlxinfer import runtime, zoo
from mlxinfer.cli import converted
from mlxinfer.cli.loading import could_be_model
from mlxinfer.cli.run import Words, tell_apart
from mlxinfer.errors import ModelNotFoundError
from mlxinfer.types import SamplingParams
from tests.unit.cli.conftest import INFO, FakeLLM, Invoke, error_of, too_long

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "word",
    [
        *("smollm2-135m", "qwen3.5", "org/name", "org/name@main", "org/name@v1.0:Q4_K_M", "ollama:llama3.2:1b"),
        *("./folder", "../a b/c", "/abs/x", "~/m", "m.gguf", "a b.gguf", ".", ".."),
    ],
)
def test_a_word_of_the_form_of_a_name_is_a_model(word: str) -> None:
    assert could_be_model(word)


@pytest.mark.parametrize(
    "word", ["What is…", "Hello there", "Really?", "-", "", "a/b/c", "x\ny.gguf", "¿Qué?", "50%", "a/" * 3000]
)
def test_anything_else_is_a_prompt(word: str) -> None:
    assert not could_be_model(word)


def test_a_folder_that_exists_is_a_model_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my models" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert could_be_model("my models/a")
    assert not could_be_model("my models/b")


@pytest.mark.parametrize(
    ("words", "model", "told"),
    [
        ((), None, Words(None, None, False)),
        (("m",), None, Words("m", None, False)),
        (("What is it?",), None, Words(None, "What is it?", False)),
        (("m", "What is it?"), None, Words("m", "What is it?", False)),
        (("m", "What", "is", "it?"), None, Words("m", "What is it?", False)),
        (("m", "-"), None, Words("m", None, True)),
        (("-",), None, Words(None, None, True)),
        (("Sum this:", "-"), None, Words(None, "Sum this:", True)),
        (("hello",), "m", Words("m", "hello", False)),
        (("5", "-", "3"), "m", Words("m", "5 - 3", False)),
    ],
)
def test_model_prompt_and_stdin_are_told_apart(words: tuple[str, ...], model: str | None, told: Words) -> None:
    assert tell_apart(words, model) == told


def test_the_answer_is_on_stdout_and_the_figures_on_stderr(invoke: Invoke, llm: FakeLLM) -> None:
    result = invoke("run", "m", "What?")
    assert (result.exit_code, result.stdout) == (0, "Paris.\n")
    assert "12.5 tok/s" in result.stderr
    assert "TTFT 0.25 s" in result.stderr
    assert llm.unloaded.is_set()


def test_the_figures_can_be_left_out(invoke: Invoke, llm: FakeLLM) -> None:
    assert invoke("run", "m", "What?", "--no-stats").stderr == ""


def test_an_answer_that_ends_its_line_gets_no_second_newline(invoke: Invoke, llm: FakeLLM) -> None:
    llm.pieces = ("Paris", "\n")
    assert invoke("run", "m", "What?").stdout == "Paris\n"


def test_json_is_one_object_with_text_usage_timings_and_reason(invoke: Invoke, llm: FakeLLM) -> None:
    reply = json.loads(invoke("run", "m", "What?", "--json").stdout)
    assert reply["text"] == "Paris."
    assert reply["model"] == "fake"
    assert reply["finish_reason"] == "stop"
    counts = {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0, "reasoning_tokens": 0, "total_tokens": 6}
    assert reply["usage"] == counts
    assert reply["timings"]["ttft_s"] == 0.25


def test_sampling_options_become_sampling_params(invoke: Invoke, llm: FakeLLM) -> None:
    options = "--max-tokens 5 --temperature 0.1 --top-p 0.9 --top-k 4 --min-p 0.2 --repetition-penalty 1.1 --seed 7"
    invoke("run", "m", "What?", *options.split(), "--stop", "a", "--stop", "b", "--system", "Be brief.")
    wanted = SamplingParams(5, 0.1, 0.9, 4, 0.2, 1.1, seed=7, stop=("a", "b"))
    assert llm.asked == [{"messages": "What?", "raw": False, "system": "Be brief.", "params": wanted}]


def test_without_options_the_models_own_defaults_are_left_to_decide(invoke: Invoke, llm: FakeLLM) -> None:
    invoke("run", "m", "What?")
    assert llm.asked[0]["params"] == SamplingParams()


def test_an_option_out_of_range_ends_with_2_before_anything_is_loaded(invoke: Invoke, llm: FakeLLM) -> None:
    result = invoke("run", "m", "What?", "--temperature", "-1")
    assert result.exit_code == 2
    assert "temperature is -1.0; it must be between 0 and 100" in result.stderr
    assert not llm.loaded_with


def test_kv_bits_reach_the_load_and_others_than_8_and_4_are_a_usage_error(invoke: Invoke, llm: FakeLLM) -> None:
    invoke("run", "What is it?", "--kv-bits", "4")
    assert [s.kv_bits for _, s in llm.loaded_with] == [4]
    assert invoke("run", "What is it?", "--kv-bits", "3").exit_code == 2


def test_context_and_dtype_flags_win_over_variable_and_file(
    invoke: Invoke, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("context_length = 10\ndtype = 'float16'\nmodel = 'from-file'")
    monkeypatch.setenv("MLXINFER_CONTEXT_LENGTH", "20")
    invoke("run", "What is it?", "--dtype", "float32")
    invoke("run", "What is it?", "--ctx", "30")
    monkeypatch.setenv("MLXINFER_MODEL", "from-variable")
    invoke("run", "What is it?")
    invoke("run", "-m", "from-flag", "What is it?")
    seen = [(name, s.context_length, s.dtype) for name, s in llm.loaded_with]
    assert seen == [
        ("from-file", 20, "float32"),
        ("from-file", 30, "float16"),
        ("from-variable", 20, "float16"),
        ("from-flag", 20, "float16"),
    ]


def test_with_no_model_and_no_terminal_the_demo_is_taken_and_said(invoke: Invoke, llm: FakeLLM) -> None:
    result = invoke("run", "What is it?")
    assert llm.loaded_with[0][0] == "smollm2-135m"
    assert "No model named; using the demo model smollm2-135m." in result.stderr
    assert result.stdout == "Paris.\n"


def test_stdin_is_the_prompt_when_it_is_no_terminal(invoke: Invoke, llm: FakeLLM) -> None:
    invoke("run", "m", stdin="What is it?\n")
    invoke("run", "m", "-", stdin="¿Qué?\r\n")
    assert [asked["messages"] for asked in llm.asked] == ["What is it?", "¿Qué?"]


def test_stdin_follows_the_words_before_the_dash(invoke: Invoke, llm: FakeLLM) -> None:
    invoke("run", "m", "Sum up:", "-", stdin="a\nb\n")
    assert llm.asked[0]["messages"] == "Sum up:\n\na\nb"


def test_stdin_is_not_read_when_there_is_a_prompt(invoke: Invoke, llm: FakeLLM) -> None:
    invoke("run", "m", "What?", stdin=b"\xff")
    assert llm.asked[0]["messages"] == "What?"


def test_raw_keeps_every_byte_and_uses_no_template(invoke: Invoke, llm: FakeLLM) -> None:
    invoke("run", "m", "--raw", stdin="Once\n")
    assert llm.asked[0] == {"messages": "Once\n", "raw": True, "system": None, "params": SamplingParams()}


def test_a_model_without_template_continues_the_text_and_says_so(invoke: Invoke, llm: FakeLLM) -> None:
    llm.info = dataclasses.replace(INFO, has_chat_template=False)
    result = invoke("run", "m", "Once")
    assert llm.asked[0]["raw"] is True
    assert "no chat template" in result.stderr
    assert invoke("run", "m", "Once", "--system", "x").exit_code == 2


def test_invalid_utf8_on_stdin_ends_with_2_and_names_byte_and_offset(invoke: Invoke, llm: FakeLLM) -> None:
    result = invoke("run", "m", stdin=b"abc\xffdef")
    assert result.exit_code == 2
    assert "byte 0xff at offset 3" in result.stderr
    assert not llm.loaded_with


def test_stdin_beyond_the_limit_is_refused(invoke: Invoke, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.cli.run.MAX_STDIN_BYTES", 4)
    assert invoke("run", "m", stdin="12345").exit_code == 2
    assert invoke("run", "m", stdin="1234").exit_code == 0


@pytest.mark.parametrize("args", [("run", "m", ""), ("run", "m", " \n"), ("run", "m")])
def test_an_empty_prompt_ends_with_2(invoke: Invoke, llm: FakeLLM, args: tuple[str, ...]) -> None:
    result = invoke(*args, stdin="")
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_an_argument_that_is_no_utf8_ends_with_2(invoke: Invoke, llm: FakeLLM) -> None:
    assert "not valid UTF-8" in invoke("run", "m", "a\udcff").stderr
    assert invoke("run", "m", "a\udcff").exit_code == 2
    assert invoke("run", "m", "a", "--system", "\udcff").exit_code == 2


def test_ctrl_c_ends_with_130_and_frees_the_model(invoke: Invoke, llm: FakeLLM) -> None:
    llm.interrupt = 2
    result = invoke("run", "m", "What?")
    assert (result.exit_code, result.stdout) == (130, "Paris")
    assert llm.streams[0].closed
    assert llm.unloaded.is_set()


def test_ctrl_c_with_json_is_an_error_object(invoke: Invoke, llm: FakeLLM) -> None:
    llm.interrupt = 1
    result = invoke("run", "m", "What?", "--json")
    assert result.exit_code == 130
    assert error_of(result)["code"] == "interrupted"


def test_a_prompt_beyond_the_context_ends_with_1(invoke: Invoke, llm: FakeLLM) -> None:
    llm.error = too_long()
    result = invoke("run", "m", "What?")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the prompt has 99 tokens" in result.stderr


def test_one_word_that_is_no_model_is_told_how_to_be_a_prompt(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, settings: object) -> None:
        raise ModelNotFoundError(f"no model {name!r}")

    monkeypatch.setattr("mlxinfer.cli.loading.load_model", missing)
    for stdin in ("x", ""):
        result = invoke("run", "Hello", stdin=stdin)
        assert result.exit_code == 3
        assert "no model is called 'Hello'" in result.stderr
        assert "If it is the prompt: mlxinfer run -m MODEL Hello\n" in result.stderr
    assert "run -m MODEL hello world 'a b'\n" in invoke("run", "hello", "world", "a b").stderr
    assert len(invoke("run", "hello", "a" * 1000).stderr) < 400
    assert "-m MODEL" not in invoke("run", "org/name", stdin="x").stderr
    assert "-m MODEL" not in invoke("run", "-m", "hello", "world").stderr


@pytest.mark.parametrize("command", [("run", "What is it?"), ("serve",)])
def test_an_unknown_model_of_the_settings_is_named_with_where_it_is_set(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MLXINFER_PORT", "0")
    (tmp_path / "config.toml").write_text("model = 'no-such'")
    result = invoke(*command)
    assert result.exit_code == 3
    assert f"`model` is set to 'no-such' by {tmp_path / 'config.toml'}" in result.stderr
    monkeypatch.setenv("MLXINFER_MODEL", "nor-this")
    assert "`model` is set to 'nor-this' by $MLXINFER_MODEL" in invoke(*command).stderr
    monkeypatch.setenv("MLXINFER_MODEL", "no-such")
    assert "is set to" not in invoke(command[0], "no-such", *command[1:]).stderr


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """What `mlxinfer.load` gives; everything before and after it is real."""
    fake = FakeLLM()
    monkeypatch.setattr(zoo, "resolve", lambda *_, **__: None)
    monkeypatch.setattr(converted, "loadable", lambda files, *_: files)
    monkeypatch.setattr("mlxinfer.llm.load", lambda *_, **__: fake)
    return fake


def test_a_context_beyond_the_models_own_is_said(invoke: Invoke, loads: FakeLLM) -> None:
    result = invoke("run", "smollm2-135m", "What?", "--ctx", "65")
    assert result.exit_code == 0
    assert "65 is beyond what smollm2-135m has; its own 64 tokens hold" in result.stderr
    assert "beyond" not in invoke("run", "smollm2-135m", "What?", "--ctx", "64").stderr


@pytest.mark.parametrize("why", ["turned off by MLXINFER_BLAS", "nope cannot be loaded", "none found"])
def test_a_linux_cpu_without_a_fast_blas_is_said(
    invoke: Invoke, loads: FakeLLM, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(runtime, "on_cpu", lambda: True)
    monkeypatch.setattr("mlxinfer.cli.loading.sys.platform", "linux")
    monkeypatch.setattr(runtime, "blas", lambda: (None, why))
    stderr = invoke("run", "smollm2-135m", "What?", "--no-stats").stderr
    assert stderr.count("\n") == 1
    assert f"no fast BLAS ({why}); `mlxinfer doctor`" in stderr
    monkeypatch.setattr(runtime, "blas", lambda: ("libopenblas.so.0", "loaded"))
    assert invoke("run", "smollm2-135m", "What?", "--no-stats").stderr == ""


# -- no model named --------------------------------------------------------------------------------------------------


@pytest.fixture
def suggested(monkeypatch: pytest.MonkeyPatch) -> str:
    """The zoo suggests a model that is not the demo."""
    entry = next(e for e in zoo.catalog() if e.alias != zoo.DEMO and e.can("chat"))
    monkeypatch.setattr(zoo, "choose_default", lambda settings: entry)
    return entry.alias


@pytest.mark.parametrize(("answer", "takes_it"), [("y\n", True), ("\n", True), ("n\n", False)])
def test_on_a_terminal_the_suggested_model_is_asked_about_else_the_demo(
    invoke: Invoke, llm: FakeLLM, suggested: str, monkeypatch: pytest.MonkeyPatch, answer: str, takes_it: bool
) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    result = invoke("run", "What is it?", stdin=answer)
    assert [name for name, _ in llm.loaded_with] == [suggested if takes_it else zoo.DEMO]
    assert suggested in result.stderr
    assert result.stdout == "Paris.\n"


def test_yes_takes_the_suggested_model_unasked(invoke: Invoke, llm: FakeLLM, suggested: str) -> None:
    invoke("run", "-y", "What is it?")
    assert [name for name, _ in llm.loaded_with] == [suggested]


def test_ctrl_d_at_the_question_ends_with_130_and_loads_nothing(
    invoke: Invoke, llm: FakeLLM, suggested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    assert invoke("run", "What is it?", stdin="").exit_code == 130
    assert not llm.loaded_with


def test_a_chat_needs_a_terminal_on_both_sides_and_no_json(
    invoke: Invoke, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tty = {"<stdin>"}
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: self.name in tty, raising=False)
    result = invoke("run", "m")
    assert result.exit_code == 2
    assert "stdout is not a terminal" in result.stderr
    tty.add("<stdout>")
    assert "--json needs a prompt" in invoke("run", "m", "--json").stdout
    assert not llm.loaded_with


def test_a_terminal_gets_no_control_characters_and_a_pipe_every_byte(
    invoke: Invoke, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.pieces = ("a\x1b[2J", "b")
    assert invoke("run", "m", "x", "--no-stats").stdout == "a\x1b[2Jb\n"
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    assert "\x1b" not in invoke("run", "m", "x", "--no-stats").stdout
