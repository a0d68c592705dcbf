"""The list of conversations as HTML; everything that came from outside is escaped. page.js hears what is pressed."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from mlxinfer.app.page.icons import icon

if TYPE_CHECKING:
    from mlxinfer.app.page.context import PageContext
    from mlxinfer.app.page.texts import Texts
    from mlxinfer.app.store import Conversation, Hit

TITLE = 60
"""Characters that a title takes of the first message."""


def title_of(text: str) -> str:
    """A conversation's title, from its first message."""
    words = " ".join(text.split())
    return words if len(words) <= TITLE else f"{words[: TITLE - 1]}…"


def listed(context: PageContext, shown: str, search: str, deleted: str) -> str:
    """The list: all, or what `search` finds; above it, how to take the last deletion back."""
    texts = context.texts
    parts = [_undo(context, deleted)] if deleted else []
    if search.strip():
        hits = context.store.search(search)
        items = [_hit(texts, hit, shown) for hit in hits]
        nothing = texts("no_hits")
    else:
        items = [_item(texts, chat, shown) for chat in context.store.conversations()]
        nothing = texts("no_chats")
    listing = f"<ul>{''.join(items)}</ul>" if items else f'<p class="nothing">{html.escape(nothing)}</p>'
    return "".join((*parts, listing))


def _undo(context: PageContext, deleted: str) -> str:
    title = context.store.conversation(deleted).title or context.texts("untitled")
    words = html.escape(context.texts("deleted", title=title))
    undo = html.escape(context.texts("undo"))
    button = f'<button type="button" data-do="restore" data-id="{html.escape(deleted)}">{undo}</button>'
    return f'<div class="undo" role="status"><span>{words}</span>{button}</div>'


def _hit(texts: Texts, hit: Hit, shown: str) -> str:
    chat = hit.conversation
    title = html.escape(chat.title or texts("untitled"))
    snippet = f"<small>{html.escape(hit.snippet)}</small>" if hit.message else ""
    data = f'data-id="{chat.id}" data-message="{hit.message or ""}"'
    current = ' aria-current="true"' if chat.id == shown else ""
    return f"<li>{_opener(f'{data}{current}', f'<bdi>{title}</bdi>{snippet}')}</li>"


def _opener(data: str, inner: str) -> str:
    return f'<button type="button" class="open" data-do="open" {data}>{inner}</button>'


def _item(texts: Texts, chat: Conversation, shown: str) -> str:
    plain = chat.title or texts("untitled")
    title = html.escape(plain)
    current = ' aria-current="true"' if chat.id == shown else ""
    label = html.escape(texts("pinned"))
    pin = f'<span class="pin" role="img" aria-label="{label}">{icon("pin")}</span>' if chat.pinned else ""
    opens = _opener(f'data-id="{chat.id}"{current}', f"{pin}<bdi>{title}</bdi>")
    buttons = [
        _action(texts, "rename", chat.id, title=chat.title, label=texts("new_title")),
        _action(texts, "unpin" if chat.pinned else "pin", chat.id),
        *(_link(texts, chat.id, kind) for kind in ("md", "json")),
        _action(texts, "delete", chat.id),
    ]
    label = html.escape(texts("actions_for", title=plain))
    summary = f'<summary aria-label="{label}" title="{label}">{icon("more")}</summary>'
    menu = f'<details>{summary}<div class="menu">{"".join(buttons)}</div></details>'
    return f"<li>{opens}{menu}</li>"


def _action(texts: Texts, do: str, key: str, **data: str) -> str:
    more = "".join(f' data-{name}="{html.escape(value)}"' for name, value in data.items())
    return f'<button type="button" data-do="{do}" data-id="{key}"{more}>{html.escape(texts(do))}</button>'


def _link(texts: Texts, key: str, kind: str) -> str:
    return f'<a href="/app/export/{key}.{kind}" download>{html.escape(texts(f"export_{kind}"))}</a>'
