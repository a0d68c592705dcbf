"""The chat's state: /commands, conversation files, and a turn that was stopped or failed."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from mlxinfer.app.store import open_store
from mlxinfer.cli import repl
from mlxinfer.cli.chat import COMMANDS, SETTABLE, Chat, read
from mlxinfer.cli.keeping import LAST, Keeper
from mlxinfer.errors import ContextLengthError, InvalidRequestError
from mlxinfer.types import SamplingParams
from tests.unit.cli.conftest import INFO, FakeLLM, too_long

if TYPE_CHECKING:
    from pathlib import Path

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "¡Hola! 🙂"}]


@pytest.fixture
def chat() -> Chat:
    return Chat(INFO, SamplingParams(temperature=0.5, top_k=40))


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("temperature 0", "temperature", 0),
        ("temperature 0.7", "temperature", 0.7),
        ("max_tokens 12", "max_tokens", 12),
        ("seed -3", "seed", -3),
        ("stop ###", "stop", ("###",)),
        ("stop 5", "stop", ("5",)),
        (r'stop "\n"', "stop", ("\n",)),
        ('stop ["a", "b"]', "stop", ("a", "b")),
        ("stop a b", "stop", ("a", "b")),
        (r"""stop "a b" 'c d' "\n" don't""", "stop", ("a b", "c d", "\n", "don't")),
        ('stop "', "stop", ('"',)),
    ],
)
def test_set_changes_one_parameter_and_default_takes_it_back(chat: Chat, line: str, key: str, value: object) -> None:
    chat.command(f"/set {line}")
    assert getattr(chat.params, key) == value
    chat.command(f"/set {key} default")
    assert chat.params == SamplingParams()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("temperature -1", "temperature is -1; it must be between"),
        ("temperature hot", "must be a number"),
        ("temperature NaN", "temperature is nan"),
        ("top_k 1.5", "must be an integer"),
        ("max_tokens 0", "at least 1"),
        ("max_tokens " + "9" * 5000, "must be an integer"),
        ("stop [1]", "stop must be"),
        ("stop " + "[" * 100_000, "a stop string has"),
        ("temprature 1", "no such parameter 'temprature'; known: .*temperature"),
        ("temperature", "needs a value"),
    ],
)
def test_a_wrong_parameter_is_refused_and_nothing_changes(chat: Chat, line: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        chat.command(f"/set {line}")
    assert chat.params == SamplingParams()


def test_set_alone_lists_every_parameter_and_marks_the_models_own(chat: Chat) -> None:
    chat.command("/set top_k 7")
    lines = dict(line.split(maxsplit=1) for line in (chat.command("/set") or "").splitlines())
    assert set(lines) == set(SETTABLE)
    assert lines["temperature"] == "0.5  (default)"
    assert lines["top_k"] == "7"


def test_system_sets_shows_and_removes_the_message(chat: Chat) -> None:
    chat.command("/system Be brief.")
    assert chat.command("/system") == "system message: Be brief."
    chat.command("/system -")
    assert chat.system is None
    assert chat.command("/system") == "no system message"


def test_clear_forgets_the_messages_only(chat: Chat) -> None:
    chat.messages, chat.system, chat.params = list(HELLO), "s", SamplingParams(seed=1)
    chat.command("/clear")
    assert (chat.messages, chat.system, chat.params) == ([], "s", SamplingParams(seed=1))


def test_a_saved_conversation_is_loaded_as_it_was(chat: Chat, tmp_path: Path) -> None:
    chat.messages, chat.system, chat.params = (
        list(HELLO),
        "Be brief.",
        SamplingParams(temperature=0, stop=("x",), seed=3),
    )
    path = tmp_path / "a b.json"
    assert chat.command(f"/save {path}") == f"saved 2 messages to {path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Chat(INFO, SamplingParams())
    assert other.command(f"/load {path}") == f"loaded 2 messages from {path}"
    assert (other.messages, other.system, other.params) == (chat.messages, chat.system, chat.params)
    other.command(f"/save {path}")
    assert [p.name for p in tmp_path.glob("*a b.json*")] == ["a b.json"]


def test_a_file_that_is_no_conversation_is_never_overwritten(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(InvalidRequestError, match="exists and is not a saved conversation"):
        chat.command(f"/save {path}")
    assert path.read_text() == "years of work"


def test_a_save_that_fails_leaves_the_old_file_and_no_litter(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    chat.command(f"/save {path}")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    chat.messages = list(HELLO)
    with pytest.raises(InvalidRequestError, match=r"c\.json cannot be written: No space left on device"):
        chat.command(f"/save {path}")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.glob("*c.json*")] == ["c.json"]


@pytest.mark.parametrize(
    "command", ["/save", "/load", "/save a\0b", "/load /nonexistent/x", "/save /nonexistent/x", "/load /"]
)
def test_a_path_that_cannot_be_used_is_refused(chat: Chat, command: str) -> None:
    with pytest.raises(InvalidRequestError):
        chat.command(command)


GOOD = {"format": "mlxinfer-chat", "version": 1, "model": "m", "system": None, "params": {}, "messages": HELLO}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a saved conversation"),
        ({"version": 2}, "not a saved conversation"),
        ({"model": None}, "system and model"),
        ({"system": 5}, "system and model"),
        ({"messages": {}}, "messages must be a list"),
        ({"messages": [*HELLO, {"role": "user"}]}, r"messages\[2\] must have role and content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\]: role"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]: role"),
        ({"messages": [7]}, r"messages\[0\]"),
        ({"params": {"temperature": "hot"}}, "temperature must be a number"),
        ({"params": {"logit_bias": {}}}, "params may hold"),
        ({"params": {"stop": [1]}}, "stop must be"),
        ({"params": None}, "params may hold"),
    ],
)
def test_a_conversation_file_is_checked_field_by_field(
    chat: Chat, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(GOOD))
    read(path)
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(InvalidRequestError, match=message):
        chat.command(f"/load {path}")
    assert (chat.messages, chat.params) == ([], SamplingParams())


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"5", b'{"version": ' + b"9" * 5000 + b"}"])
def test_a_file_that_is_no_json_object_is_refused(chat: Chat, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(data)
    with pytest.raises(InvalidRequestError, match=r"c\.json is not"):
        chat.command(f"/load {path}")


def test_help_lists_every_command_and_every_command_works_bare_or_says_what_it_needs(chat: Chat) -> None:
    text = chat.command("/help") or ""
    for command in COMMANDS:
        assert command in text
        if command in ("/save", "/load"):
            continue
        assert (chat.command(command) is None) == (command == "/exit")


def test_an_unknown_command_is_refused_with_a_guess(chat: Chat) -> None:
    with pytest.raises(InvalidRequestError, match="no such command /sytem; did you mean '/system'"):
        chat.command("/sytem x")


def test_paths_and_texts_of_several_lines_are_no_commands(chat: Chat) -> None:
    assert chat.is_command("/exit")
    assert chat.is_command("/nonsense")
    for text in ("/etc/hosts is what?", "a /exit", "", "  ", "/set x\nmore"):
        assert not chat.is_command(text)


# -- one turn --------------------------------------------------------------------------------------------------------


def turn(llm: FakeLLM, chat: Chat, text: str, *, raw: bool = False, keeper: Keeper | None = None) -> None:
    repl.answer(llm, chat, text, keeper or Keeper(None), raw=raw, stats=True)  # pyright: ignore[reportArgumentType]


def test_a_turn_sends_the_conversation_and_adds_to_it(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    chat.messages, chat.system, chat.params = list(HELLO), "Be brief.", SamplingParams(seed=1)
    turn(llm, chat, "Capital?")
    question = {"role": "user", "content": "Capital?"}
    assert llm.asked == [
        {"messages": [*HELLO, question], "raw": False, "system": "Be brief.", "params": SamplingParams(seed=1)}
    ]
    assert chat.messages == [*HELLO, question, {"role": "assistant", "content": "Paris."}]
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert "12.5 tok/s" in err


def test_turns_are_kept_and_a_kept_chat_goes_on_where_it_was(chat: Chat, tmp_path: Path) -> None:
    store = open_store(tmp_path / "chats.db").store
    keeper, llm = Keeper(store), FakeLLM()
    chat.system = "Be brief."
    turn(llm, chat, "Capital  of\nFrance?", keeper=keeper)
    turn(llm, chat, "Again?", keeper=keeper)
    (kept,) = store.conversations()
    assert (kept.title, kept.model, kept.system) == ("Capital of France?", "fake", "Be brief.")
    said = [{"role": m.role, "content": m.content} for m in store.branch(kept.id)]
    assert said == chat.messages
    assert {m.status for m in store.branch(kept.id)} == {"done"}
    other = Chat(chat.info, chat.defaults)
    later = Keeper(store)
    later.resume(other, LAST)
    assert (other.messages, other.system) == (chat.messages, "Be brief.")
    llm.interrupt = 2
    turn(llm, other, "Third?", keeper=later)
    assert [(m.content, m.status) for m in store.branch(kept.id)][-1] == ("Paris", "stopped")
    assert len(store.branch(kept.id)) == 6
    other.command("/clear")
    llm.interrupt = None
    turn(llm, other, "Anew?", keeper=later)
    assert [one.title for one in store.conversations()] == ["Anew?", "Capital of France?"]
    with pytest.raises(InvalidRequestError, match="no conversation 'zz'"):
        later.resume(other, "zz")
    store.close()


def test_a_question_that_failed_is_not_in_the_branch_and_a_store_that_fails_ends_the_keeping(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path / "chats.db").store
    keeper, llm = Keeper(store), FakeLLM()
    llm.error = ContextLengthError("too long")
    turn(llm, chat, "Long?", keeper=keeper)
    assert store.conversations() == []
    llm.error = None
    turn(llm, chat, "Short?", keeper=keeper)
    llm.error = ContextLengthError("too long")
    turn(llm, chat, "Long?", keeper=keeper)
    (kept,) = store.conversations()
    assert [m.content for m in store.branch(kept.id)] == ["Short?", "Paris."]
    store.close()
    llm.error = None
    turn(llm, chat, "Lost?", keeper=keeper)
    turn(llm, chat, "Lost?", keeper=keeper)
    assert capsys.readouterr().err.count("no longer kept") == 1
    assert chat.messages[-1]["content"] == "Paris."


def test_ctrl_c_keeps_what_was_said_and_closes_the_stream(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    llm.interrupt = 2
    turn(llm, chat, "Capital?")
    assert chat.messages[-1] == {"role": "assistant", "content": "Paris"}
    assert llm.streams[0].closed
    assert "(stopped)" in capsys.readouterr().err


def test_ctrl_c_before_the_first_word_takes_the_question_back(chat: Chat) -> None:
    llm = FakeLLM()
    llm.interrupt = 0
    turn(llm, chat, "Capital?")
    assert chat.messages == []


def test_an_error_takes_the_question_back_and_the_chat_goes_on(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    llm.error = too_long()
    chat.messages = list(HELLO)
    turn(llm, chat, "Capital?")
    assert chat.messages == HELLO
    err = capsys.readouterr().err
    assert "the prompt has 99 tokens" in err
    assert "/clear" in err
    llm.error = None
    turn(llm, chat, "Capital?")
    assert len(chat.messages) == 4


def test_without_a_template_each_text_stands_alone(chat: Chat) -> None:
    llm = FakeLLM()
    chat.system = "ignored"
    turn(llm, chat, "Once", raw=True)
    assert llm.asked[0]["messages"] == "Once"
    assert llm.asked[0]["system"] is None
    assert chat.messages == []


# -- what is typed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "is_open", "text"),
    [
        ("hi", False, "hi"),
        ('"""', True, '"""'),
        ('"""a', True, '"""a'),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\na\n"""\n', False, "a"),
        ('say """x"""', False, 'say """x"""'),
        ('""""""', False, ""),
    ],
)
def test_three_quotes_open_and_close_a_text_of_several_lines(typed: str, is_open: bool, text: str) -> None:
    assert repl.open_fence(typed) is is_open
    assert repl.unfence(typed) == text


def test_tab_completes_commands_and_parameters() -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    def completions(text: str) -> list[str]:
        return [c.text for c in repl.CommandCompleter().get_completions(Document(text), CompleteEvent())]

    assert completions("/s") == ["/set", "/system", "/save"]
    assert completions("/set temp") == ["temperature"]
    assert completions("/set temperature 1") == []
    assert completions("hello") == completions("") == []


def test_the_history_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state" / "history"
    monkeypatch.setattr(repl, "history_path", lambda: path)
    repl._history().append_string("a secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    assert list(repl._history().load_history_strings()) == ["a secret"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_written_does_not_stop_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(repl, "history_path", lambda: tmp_path / "file" / "history")
    repl._history().append_string("x")
    assert "No history" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/EXIT", "/Quit", "/bye"])
def test_commands_are_known_in_any_case(chat: Chat, line: str) -> None:
    assert chat.command(line) is None
    assert "/quit" in (chat.command("/HELP") or "")
    assert chat.command("/System Be Brief.") == "system message: Be Brief."
