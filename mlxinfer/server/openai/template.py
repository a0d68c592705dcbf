"""What a client may hand to the chat template."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "system",
        "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
MAX_KWARGS = 16
MAX_TEXT = 256
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for the chat template. Raises InvalidRequestError for a name or value that is not allowed."""
    if len(kwargs) > MAX_KWARGS:
        raise _bad(f"has {len(kwargs)} names; at most {MAX_KWARGS}")
    for name, value in kwargs.items():
        if not _IDENTIFIER.fullmatch(name) or name in RESERVED or name.endswith("_token"):
            raise _bad(f"cannot set {name!r:.80}")
        if not isinstance(value, bool | int | float | str | None):
            raise _bad(f"{name} must be a string, a number, true, false or null")
        if isinstance(value, str) and (len(value) > MAX_TEXT or "{{" in value or "{%" in value):
            raise _bad(f"{name} must be plain text of at most {MAX_TEXT} characters")
    return dict(kwargs)


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """A reasoning effort as templates know it: by its name, and "none" as switched-off thinking."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"chat_template_kwargs {message}", param="chat_template_kwargs")
