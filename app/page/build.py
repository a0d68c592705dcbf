"""The page of one language: its parts, and which callback hears what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.app.page import compare, models
from mlxinfer.app.page.chat import ChatPage
from mlxinfer.app.page.parts import Parts, Side, build_chat, build_side
from mlxinfer.app.page.pressed import SidePage

if TYPE_CHECKING:
    import gradio as gr

    from mlxinfer.app.page.context import PageContext

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
"""No veil over what changes, no API, no callback waits for another."""
FROM_ADDRESS = "() => [mlxinfer.key()]"


def build(context: PageContext) -> gr.Blocks:
    """Everything but the theme, style and script, which `mount_gradio_app` takes (app/mount.py)."""
    import gradio as gr

    texts = context.texts
    with gr.Blocks(title=texts("title"), analytics_enabled=False, fill_width=True) as blocks:
        side = build_side(context)
        opened = gr.Textbox(visible="hidden", elem_id="opened-chat", label="opened")
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab(texts("chat"), id="chat"):
                parts = build_chat(context)
            with gr.Tab(texts("models"), id="models"):
                models.panel(context)
            with gr.Tab(texts("compare"), id="compare"):
                compare.panel(context, opened)
        chat = ChatPage(context, side, parts)
        _hear_chat(blocks, chat, side, parts)
        _hear_side(chat, SidePage(chat), side, parts)
        every = _everything(side, parts)
        shown = opened.change(SidePage(chat).loaded, [opened], every, **QUIET)
        shown.then(lambda: gr.Tabs(selected="chat"), None, tabs, **QUIET)
        _then_watch(shown, chat, side, parts)
    return blocks


def _everything(side: Side, parts: Parts) -> list[Any]:
    shown = [
        parts.key, parts.editing, parts.deleted, parts.model, parts.status, parts.hello, parts.demo, parts.history,
        parts.tail, parts.feet, parts.edit_bar, parts.composer, parts.timer, side.listing, side.search, parts.preset,
    ]  # fmt: skip
    return [*shown, *parts.fields.values()]


def _then_watch(event: Any, chat: ChatPage, side: Side, parts: Parts) -> None:
    """After anything that may have begun a reply, or come upon one."""
    watched = event.then(chat.watch, [parts.key], [parts.tail], **QUIET)
    watched.then(chat.settled, [parts.key, side.search, parts.deleted], _everything(side, parts), **QUIET)


def _hear_chat(blocks: gr.Blocks, chat: ChatPage, side: Side, parts: Parts) -> None:
    every, fields = _everything(side, parts), list(parts.fields.values())
    page = SidePage(chat)
    _then_watch(blocks.load(page.loaded, [parts.key], every, js=FROM_ADDRESS, **QUIET), chat, side, parts)
    asked = [parts.composer, parts.key, parts.editing, parts.model, side.search, *fields]
    _then_watch(parts.composer.submit(chat.send, asked, every, **QUIET), chat, side, parts)
    acted = [parts.key, side.search, parts.model, *fields]
    _then_watch(parts.feet.click(chat.act, acted, every, **QUIET), chat, side, parts)
    parts.edit_cancel.click(chat.cancel_edit, None, [parts.edit_bar, parts.editing, parts.composer], **QUIET)
    parts.key.change(None, [parts.key], None, js="(key) => mlxinfer.shown(key)")


def _hear_side(chat: ChatPage, page: SidePage, side: Side, parts: Parts) -> None:
    every, fields = _everything(side, parts), list(parts.fields.values())
    _then_watch(side.new.click(page.new, None, every, **QUIET), chat, side, parts)
    pressed = side.listing.click(page.pressed, [parts.key, side.search, parts.deleted], every, **QUIET)
    _then_watch(pressed, chat, side, parts)
    side.search.change(
        page.search, [side.search, parts.key, parts.deleted], side.listing, trigger_mode="always_last", **QUIET
    )
    side.imports.upload(page.imported, [side.imports], every, **QUIET)
    hinted = [*fields, parts.status, parts.timer]
    parts.model.input(page.choose, [parts.model, parts.key], hinted, **QUIET)
    parts.model.focus(page.offered, None, parts.model, **QUIET)
    parts.demo.click(page.demo, None, [parts.hello, parts.demo, parts.status, parts.timer], **QUIET)
    parts.timer.tick(page.tick, [parts.model, parts.key], every, **QUIET)
    for field in fields:
        heard: Any = field
        # Gradio's "input" is a key that makes a character: pasting and deleting are seen when the field is left.
        for event in (heard.input, heard.blur):
            event(page.changed, [parts.key, parts.model, *fields], None, trigger_mode="always_last", **QUIET)
    parts.preset.input(page.preset_chosen, [parts.preset], parts.fields["system"], **QUIET)
    parts.preset_save.click(page.preset_saved, [parts.preset, parts.fields["system"]], parts.preset, **QUIET)
    parts.preset_delete.click(page.preset_deleted, [parts.preset], parts.preset, **QUIET)
