"""What was dropped on the composer: read, counted, and refused where it can't be read or doesn't fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.app import attachments
from mlxinfer.app.prompts import task_of
from mlxinfer.app.store import Message
from mlxinfer.errors import ContextLengthError, InvalidRequestError
from mlxinfer.server.prompting import prepare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlxinfer.app.page.context import PageContext
    from mlxinfer.app.store import Conversation
    from mlxinfer.llm import LLM

_IMAGE = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*|....ftyp(?:hei[cfms]|mif1|avif)",
    re.DOTALL,
)


def is_image(path: Path) -> bool:
    """Whether it begins as a picture does."""
    try:
        with path.open("rb") as file:
            return _IMAGE.match(file.read(16)) is not None
    except OSError:
        return False


def uploaded(context: PageContext, named: Iterable[str]) -> list[Path]:
    """The files of a message. Raises InvalidRequestError for one that isn't an upload, or a picture."""
    found: list[Path] = []
    for name in named:
        path = Path(name).resolve()
        if not path.is_relative_to(context.uploads.resolve()):
            raise InvalidRequestError(f"{path.name} is no upload of this page", param="attachment")
        if is_image(path):
            raise InvalidRequestError(context.texts("no_images", name=path.name), param="attachment")
        found.append(path)
    return found


def read_all(llm: LLM, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Text and tokens of each. Raises InvalidRequestError for what holds no text."""

    def count(text: str) -> int:
        return len(llm.tokenizer.encode(text, add_special_tokens=False))

    return [attachments.read(path, count) for path in paths]


def check_fits(
    context: PageContext,
    llm: LLM,
    chat: Conversation,
    before: Sequence[Message],
    text: str,
    files: list[dict[str, Any]],
) -> None:
    """Raises ContextLengthError, with both numbers, for a message that is too long with what it brings and goes after.

    Nothing is stored by then: the message stays in the composer.
    """
    limit = llm.info.context_length
    brought = sum(one["tokens"] for one in files)
    if brought >= limit:
        raise _too_long(context, chat.model, limit, brought)
    asked = Message("", chat.id, None, "user", text, 0.0, 0.0, extra={"attachments": files})
    try:
        prepared = prepare(llm, task_of(chat, [*before, asked]))
    except ContextLengthError as error:
        raise _too_long(context, chat.model, limit, brought + _spoken(llm, chat, before, text)) from error
    if len(prepared.ids) >= limit:
        raise _too_long(context, chat.model, limit, len(prepared.ids))


def _spoken(llm: LLM, chat: Conversation, before: Sequence[Message], text: str) -> int:
    said = [chat.system, *(one.content for one in before), text]
    return sum(len(llm.tokenizer.encode(part, add_special_tokens=False)) for part in said if part)


def _too_long(context: PageContext, model: str, limit: int, needed: int) -> ContextLengthError:
    said = context.texts("too_long", model=model, needed=f"{needed:,}", context=f"{limit:,}")
    return ContextLengthError(said, param="attachment")


def forget(paths: Iterable[Path]) -> None:
    """Their text is in the conversation now."""
    for path in paths:
        path.unlink(missing_ok=True)
