"""The state of a chat in the terminal and its /commands; no terminal in here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxinfer.cli import output
from mlxinfer.errors import InvalidRequestError
from mlxinfer.types import ModelInfo, SamplingParams

FORMAT = "mlxinfer-chat"
VERSION = 1
MAX_FILE_BYTES = 64 * 1024 * 1024
ROLES = ("user", "assistant")
HIDDEN = ("logit_bias", "ignore_eos", "logprobs", "grammar")
SETTABLE = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in HIDDEN)

COMMANDS = {
    "/help": "this list",
    "/set": "KEY VALUE: change a sampling parameter; KEY default: the model's own; alone: list them; "
    "stop takes several texts, quoted where they hold spaces",
    "/system": "TEXT: set the system message; alone: show it; -: none",
    "/clear": "forget the conversation, keep system message and parameters",
    "/save": "FILE: write the conversation as JSON",
    "/load": "FILE: go on with a saved conversation",
    "/model": "say what model this is",
    "/exit": "leave (also /quit, /bye and Ctrl-D)",
}


@dataclass
class Chat:
    """What the next turn is answered from."""

    info: ModelInfo
    defaults: SamplingParams
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def is_command(self, text: str) -> bool:
        """A line that begins with /word; a path such as /etc/hosts is text."""
        word = text.split(maxsplit=1)[0] if text.strip() else ""
        return word.startswith("/") and "/" not in word[1:] and "\n" not in text

    def command(self, text: str) -> str | None:
        """Run one; returns what to tell the user, None for /exit. Raises InvalidRequestError, the state unchanged."""
        word, _, rest = text.strip().partition(" ")
        word, rest = word.lower(), rest.strip()
        if word in ("/exit", "/quit", "/bye"):
            return None
        if word not in COMMANDS:
            raise InvalidRequestError(f"no such command {word}{output.did_you_mean(word, COMMANDS)}; /help lists them")
        return getattr(self, f"_{word[1:]}")(rest)

    def _help(self, rest: str) -> str:
        keys = (
            'Enter sends; Esc Enter begins a new line; """ opens and closes a text of several lines.\n'
            "Ctrl-C stops the reply; Ctrl-D leaves."
        )
        return f"{output.pairs(COMMANDS.items())}\n\n{keys}"

    def _set(self, rest: str) -> str:
        if not rest:
            return self._parameters()
        key, _, text = rest.partition(" ")
        if key not in SETTABLE:
            raise InvalidRequestError(f"no such parameter {key!r}; known: {', '.join(SETTABLE)}", param=key)
        if not text.strip():
            raise InvalidRequestError(f"/set {key} needs a value, or `default`", param=key)
        self.params = dataclasses.replace(self.params, **{key: _value(key, text.strip())})
        return f"{key} = {_shown(getattr(self.params, key))}"

    def _parameters(self) -> str:
        rows: list[tuple[str, object]] = []
        for key in SETTABLE:
            own, models = getattr(self.params, key), getattr(self.defaults, key)
            rows.append((key, f"{_shown(models)}  (default)" if own in (None, ()) else _shown(own)))
        return output.pairs(rows)

    def _system(self, rest: str) -> str:
        if rest:
            self.system = None if rest == "-" else rest
        return f"system message: {self.system}" if self.system else "no system message"

    def _clear(self, rest: str) -> str:
        self.messages.clear()
        return "conversation cleared"

    def _model(self, rest: str) -> str:
        return output.pairs(dataclasses.asdict(self.info).items())

    def _save(self, rest: str) -> str:
        path = _path("/save", rest)
        if path.exists():
            try:
                read(path)
            except InvalidRequestError:
                raise InvalidRequestError(
                    f"{path} exists and is not a saved conversation; choose another name"
                ) from None
        write(path, self)
        return f"saved {len(self.messages)} messages to {path}"

    def _load(self, rest: str) -> str:
        path = _path("/load", rest)
        saved = read(path)
        self.system, self.messages, self.params = saved.system, saved.messages, saved.params
        other = f" (it was held with {saved.model})" if saved.model != self.info.name else ""
        return f"loaded {len(self.messages)} messages from {path}{other}"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a conversation file holds."""

    model: str
    system: str | None
    messages: list[dict[str, str]]
    params: SamplingParams


def write(path: Path, chat: Chat) -> None:
    """Write atomically, for the owner's eyes only. Raises InvalidRequestError when the disk says no."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "model": chat.info.name,
        "system": chat.system,
        "params": {k: v for k in SETTABLE if (v := getattr(chat.params, k)) not in (None, ())},
        "messages": chat.messages,
    }
    temp = None
    try:
        descriptor, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            json.dump(record, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except OSError as error:
        if temp is not None:
            with contextlib.suppress(OSError):
                os.unlink(temp)
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> Saved:
    """Read and check a conversation file. Raises InvalidRequestError that names the field."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        record = json.loads(data.decode("utf-8")) if len(data) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{path} is not JSON") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
        raise InvalidRequestError(f'{path} is not a saved conversation ("format": "{FORMAT}", "version": {VERSION})')
    system, model = record.get("system"), record.get("model")
    if not isinstance(system, str | None) or not isinstance(model, str):
        raise InvalidRequestError(f"{path}: system and model must be text")
    messages = record.get("messages")
    if not isinstance(messages, list):
        raise InvalidRequestError(f"{path}: messages must be a list")
    return Saved(
        model,
        system,
        [_message(m, f"{path}: messages[{i}]") for i, m in enumerate(messages)],
        _params(record.get("params"), str(path)),
    )


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or value.keys() != {"role", "content"}:
        raise InvalidRequestError(f"{where} must have role and content")
    if value["role"] not in ROLES or not isinstance(value["content"], str):
        raise InvalidRequestError(f"{where}: role must be one of {', '.join(ROLES)}, and content text")
    return {"role": value["role"], "content": value["content"]}


def _params(value: Any, where: str) -> SamplingParams:
    if not isinstance(value, dict) or not value.keys() <= set(SETTABLE):
        raise InvalidRequestError(f"{where}: params may hold {', '.join(SETTABLE)}")
    values: dict[str, Any] = dict(value)
    if isinstance(stop := values.get("stop"), list):
        values["stop"] = tuple(stop)
    return SamplingParams(**values)


def _value(key: str, text: str) -> Any:
    """`/set` values: numbers as JSON has them; stop takes a JSON list, or words as a shell has them."""
    if text in ("default", "none"):
        return () if key == "stop" else None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if key != "stop":
        return value
    return tuple(value) if isinstance(value, list) else tuple(_words(text))


def _words(text: str) -> list[str]:
    """The words of `a "b c"`. Double quotes are JSON's, so that "\\n" is a newline; an unpaired one is a character."""
    lexer = shlex.shlex(text, posix=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:
        return [text]
    return [_unquoted(word) for word in words]


def _unquoted(word: str) -> str:
    if len(word) < 2 or word[0] not in "\"'" or word[0] != word[-1]:
        return word
    try:
        return str(json.loads(word)) if word[0] == '"' else word[1:-1]
    except ValueError:
        return word[1:-1]


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if value not in (None, ()) else "-"


def _path(command: str, rest: str) -> Path:
    if not rest or "\0" in rest:
        raise InvalidRequestError(f"{command} needs a file name")
    return Path(rest).expanduser()
