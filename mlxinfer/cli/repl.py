"""The chat in a terminal: prompt_toolkit reads, the reply streams as plain text, Ctrl-C stops the reply only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from mlxinfer.cli import output
from mlxinfer.cli.chat import COMMANDS, SETTABLE, Chat
from mlxinfer.cli.keeping import Keeper
from mlxinfer.cli.run import write_piece
from mlxinfer.cli.terminal import no_echo
from mlxinfer.errors import ContextLengthError, EngineClosedError, MlxinferError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from prompt_toolkit.document import Document

    from mlxinfer.app.store import Store
    from mlxinfer.llm import LLM
    from mlxinfer.types import SamplingParams

FENCE = '"""'


def chat(
    llm: LLM,
    *,
    system: str | None,
    params: SamplingParams,
    raw: bool,
    stats: bool,
    store: Store | None,
    resume: str | None,
) -> None:
    """Read, answer, repeat, until /exit or Ctrl-D. With a store the conversation is kept; `resume` is an id in it."""
    state = Chat(llm.info, llm.defaults, params, system)
    raw = raw or not llm.info.has_chat_template
    keeper = Keeper(None if raw else store)
    if resume is not None:
        keeper.resume(state, resume)
        output.say(f"{len(state.messages)} messages so far.", dim=True)
    _greet(llm, raw=raw)
    session: PromptSession[str] = PromptSession(
        history=_history(), key_bindings=bindings(), multiline=True, completer=CommandCompleter(),
        complete_while_typing=False, prompt_continuation="... ",
    )  # fmt: skip
    while True:
        try:
            text = unfence(session.prompt(">>> "))
            if state.is_command(text):
                if not _command(state, text.strip()):
                    return
            elif text.strip():
                answer(llm, state, text, keeper, raw=raw, stats=stats)
        except KeyboardInterrupt:
            output.say("(Ctrl-D or /exit leaves)", dim=True)
        except EOFError:
            return


def _greet(llm: LLM, *, raw: bool) -> None:
    output.say(f"{llm.info.name} · context {llm.info.context_length} tokens · /help lists commands", dim=True)
    if raw:
        output.say("No chat template: each text is continued as it stands, nothing is remembered.", dim=True)


def _command(state: Chat, text: str) -> bool:
    try:
        said = state.command(text)
    except MlxinferError as error:
        output.say(f"Error: {error}")
        return True
    if said is not None:
        output.say(said)
    return said is not None


def answer(llm: LLM, state: Chat, text: str, keeper: Keeper, *, raw: bool, stats: bool) -> None:
    """Stream one reply into the terminal and the conversation.

    Ctrl-C keeps what was said so far; an error takes the question back, so that the next one starts clean.
    """
    turn = {"role": "user", "content": text}
    prompt = text if raw else [*state.messages, turn]
    said: list[str] = []
    stopped = False
    keeper.begin(state, text)
    try:
        with (
            no_echo(),
            llm.stream(prompt, raw=raw, system=None if raw else state.system, params=state.params) as stream,
        ):
            try:
                for piece in stream:
                    said.append(piece)
                    write_piece(piece)
                    keeper.grow(said)
            except KeyboardInterrupt:
                stopped = True
            line = "(stopped)" if stopped else stream.reply.stats
    except EngineClosedError:
        keeper.end(state, said, "failed")
        raise
    except MlxinferError as error:
        keeper.end(state, said, "failed")
        _end_line(said)
        output.say(f"Error: {error}")
        if isinstance(error, ContextLengthError) and state.messages:
            output.say("/clear begins anew.", dim=True)
        return
    except KeyboardInterrupt:  # before the first token, or while the stream was closing
        stopped, line = True, "(stopped)"
    _end_line(said)
    if stopped or stats:
        output.say(line, dim=True)
    kept = not raw and bool(said or not stopped)
    if kept:
        state.messages += [turn, {"role": "assistant", "content": "".join(said)}]
    keeper.end(state, said, ("stopped" if stopped else "done") if kept else "failed")


def _end_line(said: list[str]) -> None:
    if said and not said[-1].endswith("\n"):
        click.echo()


def unfence(text: str) -> str:
    """The text between two \"\"\", or the text."""
    inner = text.strip()
    if inner.startswith(FENCE) and inner.endswith(FENCE) and len(inner) >= 2 * len(FENCE):
        return inner[len(FENCE) : -len(FENCE)].strip("\n")
    return text


def open_fence(text: str) -> bool:
    """Whether a \"\"\" was opened and not closed: Enter then begins a new line."""
    text = text.strip()
    return text.startswith(FENCE) and not (text.endswith(FENCE) and len(text) >= 2 * len(FENCE))


def bindings() -> KeyBindings:
    """Enter sends, unless a \"\"\" is open; Esc Enter begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if open_fence(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class CommandCompleter(Completer):
    """Tab completes /commands and the parameters of /set."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if text.startswith("/set "):
            words, start = SETTABLE, text.removeprefix("/set ")
        else:
            words, start = tuple(COMMANDS), text
        if start and " " not in start and text.startswith("/"):
            yield from (Completion(word, -len(start)) for word in words if word.startswith(start))


def history_path() -> Path:
    """Where the lines typed are kept; MLXINFER has no setting for it, XDG_STATE_HOME does on Linux."""
    return platformdirs.user_state_path("mlxinfer") / "history"


def _history() -> History:
    """A file only the user can read; none where it cannot be written."""
    path = history_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        path.chmod(0o600)
    except OSError as error:
        output.say(f"No history: {path}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))
