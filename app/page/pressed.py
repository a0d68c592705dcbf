"""What happens in the sidebar, and to the choice of a model and the presets."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import gradio as gr

from mlxinfer import zoo
from mlxinfer.app.page import attach, choices, settings, sidebar
from mlxinfer.app.page.chat import Updates, told
from mlxinfer.app.page.presets import Presets
from mlxinfer.app.store.exchange import MAX_BYTES, from_json, from_markdown
from mlxinfer.errors import InvalidRequestError, MlxinferError

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.app.page.chat import ChatPage


class SidePage:
    """The callbacks beside the chat."""

    def __init__(self, chat: ChatPage) -> None:
        self.chat, self.context = chat, chat.context
        self.side, self.parts = chat.side, chat.parts
        self.presets = Presets(self.context.settings.data_dir)

    def loaded(self, key: str, request: gr.Request) -> Updates:
        """The page was opened, or opened again."""
        notices, named = [self.context.notice], list[str]()
        try:
            named = list(self.presets.all())
        except MlxinferError as error:  # a file that is damaged: the chat goes without
            notices.append(str(error))
        for notice in filter(None, notices):
            gr.Warning(html.escape(notice), duration=20)
        preset = gr.update(choices=named, interactive=True)
        shown: Updates = {self.parts.preset: preset, self.side.search: gr.update(interactive=True)}
        return self.chat.open(key, request) | shown

    def new(self, request: gr.Request) -> Updates:
        return self.chat.open("", request) | {self.side.search: ""}

    def search(self, text: str, key: str, deleted: str) -> str:
        return sidebar.listed(self.context, key, text, deleted)

    def pressed(self, event: gr.EventData, key: str, search: str, deleted: str, request: gr.Request) -> Updates:
        """A button of the list."""
        data: Any = event._data
        do, chosen = str(data.get("do")), str(data.get("id"))
        store = self.context.store
        with told():
            store.conversation(chosen)
            if do == "open":
                if message := data.get("message"):
                    store.show(str(message))
                return self.chat.open(chosen, request, search, deleted)
            if do == "delete":
                return self._delete(chosen, key, search, request)
            if do == "restore":
                store.restore(chosen)
                return self.chat.open(chosen, request, search) | {self.parts.deleted: ""}
            if do == "rename":
                store.change(chosen, title=" ".join(str(data.get("title", "")).split()))
            elif do in ("pin", "unpin"):
                store.change(chosen, pinned=do == "pin")
        return {self.side.listing: sidebar.listed(self.context, key, search, deleted)}

    def _delete(self, chosen: str, key: str, search: str, request: gr.Request) -> Updates:
        if (live := self.context.replies.writing(chosen)) is not None:
            live.stop()
        self.context.store.delete(chosen)
        shown: Updates = {self.parts.deleted: chosen}
        if chosen == key:
            return shown | self.chat.open("", request, search, chosen)
        return shown | {self.side.listing: sidebar.listed(self.context, key, search, chosen)}

    def imported(self, file: str, request: gr.Request) -> Updates:
        """An uploaded conversation."""
        with told():
            paths = attach.uploaded(self.context, [file])
            try:
                read = from_json if paths[0].suffix == ".json" else from_markdown
                made = read(self.context.store, _text(paths[0]))
            finally:
                attach.forget(paths)
        gr.Info(html.escape(self.context.texts("imported", title=made.title or self.context.texts("untitled"))))
        return self.chat.open(made.id, request)

    # The model

    def choose(self, model: str | None, key: str) -> Updates:
        """For the next reply; it is loaded meanwhile."""
        if not model:
            return {self.parts.status: gr.skip()}
        with told():
            chat = self.chat.find(key)
            if chat is not None and chat.model != model:
                self.context.library.use(model)
                self.context.store.change(chat.id, model=model)
            choices.load(self.context, model)
        return self._hints(model) | self.chat.status(model, 0)

    def _hints(self, model: str) -> Updates:
        hints = settings.hints(self.context, model)
        return {self.parts.fields[name]: gr.update(placeholder=hint) for name, hint in hints.items()}

    def offered(self) -> Any:
        """The names, when somebody looks: they come and go with the tab of models."""
        return gr.update(choices=self.context.library.models())

    def demo(self) -> Updates:
        """Fetch the demo model."""
        with told():
            self.context.library.pull(zoo.DEMO)
        return self.chat.greeting(self.context.library.models()) | self.chat.status("", 0)

    def tick(self, model: str | None, key: str) -> Updates:
        """While a model is fetched or loaded."""
        here = self.context.library.models()
        updates: Updates = {}
        if not model and here:
            model = choices.first(self.context)
            choices.load(self.context, model)
            updates = self.chat.greeting(here, shown=not key)
            updates[self.parts.model] = gr.update(choices=here, value=model)
        elif not here and self.chat.pull() is None:  # it came to nothing
            updates = self.chat.greeting(here, shown=not key)
        shown = self.chat.status(model or "", 0)
        if model and choices.status(self.context, model) == "loaded":
            chat = self.chat.find(key)
            shown = self._hints(model) | (self.chat.settled_status(chat) if chat else shown)
        return updates | shown

    # Settings and presets

    def changed(self, key: str, model: str | None, *held: Any) -> None:
        """A field was changed by hand."""
        chat = self.chat.find(key)
        with told():
            system, sampling = settings.read(held, chat.settings if chat else None)
            if chat is not None:
                self.chat.keep(chat, model or chat.model, system, sampling)

    def preset_chosen(self, name: str | None) -> Any:
        with told():
            text = self.presets.all().get(name or "")
        return gr.skip() if text is None else text

    def preset_saved(self, name: str | None, text: str) -> Any:
        with told():
            if not (name or "").strip():
                raise InvalidRequestError(self.context.texts("preset_needs_name"), param="preset")
            self.presets.save(name or "", text)
        gr.Info(html.escape(self.context.texts("preset_saved", name=name)))
        return gr.update(choices=list(self.presets.all()))

    def preset_deleted(self, name: str | None) -> Any:
        with told():
            self.presets.delete(name or "")
        return gr.update(choices=list(self.presets.all()), value=None)


def _text(path: Path) -> str:
    """Raises InvalidRequestError for a file that isn't UTF-8, or is larger than a conversation may be."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequestError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB", param="import")
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path.name} cannot be read: {error}", param="import") from error
