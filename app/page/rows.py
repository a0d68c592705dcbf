"""From messages of the store to rows of a Chatbot and to the feet below them."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.app.page.icons import icon
from mlxinfer.app.page.markup import legible
from mlxinfer.app.replies import Shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.app.page.context import PageContext
    from mlxinfer.app.page.texts import Texts
    from mlxinfer.app.store import Conversation, Message

Row = dict[str, Any]
EMPTY = "…"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is shown of a conversation. The last exchange stands apart: an update of it costs what it is long."""

    history: list[Row] = field(default_factory=list[Row])
    tail: list[Row] = field(default_factory=list[Row])
    feet: str = ""
    """HTML: a foot for each row, which page.js puts below it."""
    writing: bool = False
    used: int = 0
    """Tokens of the last reply with its prompt; 0: not known."""


def transcript(context: PageContext, chat: Conversation) -> Transcript:
    """The shown branch of `chat`."""
    branch = context.store.branch(chat.id)
    last = max((i for i, one in enumerate(branch) if one.role == "user"), default=0)
    beside: dict[str | None, list[str]] = {}
    for one in context.store.messages(chat.id):
        beside.setdefault(one.parent, []).append(one.id)
    live = context.replies.writing(chat.id)
    rows: tuple[list[Row], list[Row]] = ([], [])
    feet: tuple[list[str], list[str]] = ([], [])
    for number, message in enumerate(branch):
        part = number >= last
        if live is not None and live.message == message.id:
            made, foot = rows_of_shown(context.texts, live.shown, str(message.extra.get("model", chat.model))), ""
        else:
            made = rows_of(context.texts, message)
            is_last = number == len(branch) - 1
            foot = foot_of(context.texts, message, beside[message.parent], goes_on=is_last, idle=live is None)
        rows[part].extend(made)
        feet[part].extend([*[""] * (len(made) - 1), foot])
    used = next((_used(one) for one in reversed(branch) if _used(one)), 0)
    return Transcript(rows[0], rows[1], _feet(feet), live is not None, used)


def rows_of(texts: Texts, message: Message) -> list[Row]:
    """At least one."""
    if message.role == "user":
        named = ", ".join(str(one["name"]) for one in message.extra.get("attachments", ()))
        return [{"role": "user", "content": legible(message.content) or legible(named) or EMPTY}]
    extra = message.extra
    failed = message.status == "failed"
    shown = Shown(
        stage="failed" if failed else "done",
        text=message.content,
        reasoning=message.reasoning,
        reasoning_s=extra.get("reasoning_s", 0.0),
        calls=tuple((str(name), str(arguments)) for name, arguments in extra.get("tool_calls", ())),
        error=extra.get("error", "") if failed else "",
    )
    return rows_of_shown(texts, shown, "")


def rows_of_shown(texts: Texts, shown: Shown, model: str) -> list[Row]:
    """A reply at one moment."""
    rows: list[Row] = []
    if shown.reasoning:
        thinks = not shown.over and not shown.text
        about: Row = {"title": texts("thinking"), "status": "pending" if thinks else "done"}
        about["duration"] = round(shown.reasoning_s, 1)
        rows.append({"role": "assistant", "content": legible(shown.reasoning), "metadata": about})
    for name, arguments in shown.calls:
        title = texts("tool_call", name=legible(name))
        content = f"~~~json\n{arguments.replace('~~~', '')}\n~~~"
        rows.append({"role": "assistant", "content": content, "metadata": {"title": title, "status": "done"}})
    if shown.text:
        rows.append({"role": "assistant", "content": legible(shown.text)})
    if shown.error:
        rows.append({"role": "assistant", "content": f"⚠️ {texts('failed', error=legible(shown.error))}"})
    if not rows:
        waits = {
            "loading": texts("loading", model=model),
            "reading": texts("reading", tokens=f"{shown.prompt_tokens:,}"),
        }
        rows.append({"role": "assistant", "content": waits.get(shown.stage, EMPTY)})
    return rows


def foot_of(texts: Texts, message: Message, siblings: Sequence[str], *, goes_on: bool, idle: bool) -> str:
    """HTML of what stands below a message: figures, versions, buttons. `idle`: no reply is being written."""
    parts: list[str] = []
    if message.role == "user":
        for one in message.extra.get("attachments", ()):
            about = texts("attached", name=one.get("name", ""), tokens=f"{one.get('tokens', 0):,}")
            parts.append(f'<span class="file">{icon("file")} {html.escape(about)}</span>')
    else:
        parts.append(f'<span class="figures">{html.escape(" · ".join(figures(texts, message)))}</span>')
    if idle and len(siblings) > 1:
        parts.append(_versions(texts, message.id, siblings))
    if idle and message.role == "user":
        parts.append(_button("edit", message.id, "edit", texts("edit")))
    elif idle and message.role == "assistant":
        parts.append(_button("retry", message.id, "retry", texts("retry")))
        if goes_on and (message.content or message.reasoning):
            parts.append(_button("continue", message.id, "continue", texts("continue")))
    return "".join(parts)


def figures(texts: Texts, message: Message) -> list[str]:
    """What is known of a reply, for its foot."""
    extra: Mapping[str, Any] = message.extra
    found: list[str] = []
    if message.status == "stopped":
        found.append(texts("stopped"))
    if message.cut_off:
        found.append(texts("cut_off"))
    if extra.get("finish_reason") == "length":
        found.append(texts("at_limit"))
    if model := extra.get("model"):
        found.append(str(model))
    if "decode_tok_s" in extra:
        found.append(texts("speed", speed=f"{extra['decode_tok_s']:.1f}"))
    if "ttft_s" in extra:
        found.append(texts("ttft", seconds=f"{extra['ttft_s']:.2f}"))
    if "completion_tokens" in extra:
        found.append(texts("counts", new=f"{extra['completion_tokens']:,}"))
        cached, prompt = extra.get("cached_tokens", 0), extra.get("prompt_tokens", 0)
        found.append(texts("cached", cached=f"{cached:,}", prompt=f"{prompt:,}"))
    return found


def _used(message: Message) -> int:
    return message.extra.get("prompt_tokens", 0) + message.extra.get("completion_tokens", 0)


def _versions(texts: Texts, message: str, siblings: Sequence[str]) -> str:
    at = siblings.index(message)
    earlier = _button("show", siblings[at - 1] if at else "", "earlier", texts("earlier"))
    later = _button("show", siblings[at + 1] if at + 1 < len(siblings) else "", "later", texts("later"))
    return f'<span class="versions">{earlier}<span>{at + 1} / {len(siblings)}</span>{later}</span>'


def _button(do: str, key: str, sign: str, label: str) -> str:
    """Without a key it is there and can't be pressed."""
    label = html.escape(label)
    off = "" if key else " disabled"
    data = f'data-do="{do}" data-id="{html.escape(key)}"'
    return f'<button type="button" {data} title="{label}" aria-label="{label}"{off}>{icon(sign)}</button>'


def _feet(feet: tuple[list[str], list[str]]) -> str:
    boxes = (
        f'<div data-for="{name}">{"".join(f"<div>{one}</div>" for one in part)}</div>'
        for name, part in zip(("history", "tail"), feet, strict=True)
    )
    return f"<div hidden>{''.join(boxes)}</div>"
