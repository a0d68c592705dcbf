"""What happens in the chat: sending, watching a reply grow, stopping, branching.

A callback never runs a model. It starts a reply, or looks at one that runs (app/replies.py); it may be dropped or be
there twice, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import html
import time
from collections.abc import Iterator  # noqa: TC003 - Gradio reads the annotations of callbacks
from typing import TYPE_CHECKING, Any

import gradio as gr

from mlxinfer import zoo
from mlxinfer.app.page import attach, choices, settings, sidebar
from mlxinfer.app.page.markup import legible
from mlxinfer.app.page.rows import Row, Transcript, rows_of, rows_of_shown, transcript
from mlxinfer.app.page.viewers import Viewers
from mlxinfer.errors import InvalidRequestError, MlxinferError
from mlxinfer.zoo.files import human_bytes

if TYPE_CHECKING:
    from mlxinfer.app.page.context import PageContext
    from mlxinfer.app.page.parts import Parts, Side
    from mlxinfer.app.pulls import Pull
    from mlxinfer.app.store import Conversation, Message

PACE_S = 0.05
"""Seconds between two updates of a growing reply, at least."""
LOOK_S = 0.5
"""Seconds after which a callback sees that nobody waits for it any more."""
Updates = dict[Any, Any]


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What the user did wrong is said in a toast, and nothing of the page changes."""
    try:
        yield
    except MlxinferError as error:
        # A toast takes HTML.
        raise gr.Error(html.escape(str(error)), duration=12, print_exception=False) from error


class ChatPage:
    """The callbacks of one language's page."""

    def __init__(self, context: PageContext, side: Side, parts: Parts) -> None:
        self.context, self.side, self.parts = context, side, parts
        self.viewers = Viewers()

    # What is shown

    def find(self, key: str) -> Conversation | None:
        if not key:
            return None
        try:
            chat = self.context.store.conversation(key)
        except InvalidRequestError:
            return None
        return None if chat.deleted else chat

    def view(self, key: str, search: str = "", deleted: str = "") -> Updates:
        """The page on a conversation; on a new one where there is none of that key."""
        chat = self.find(key)
        parts = self.parts
        shown = Transcript() if chat is None else transcript(self.context, chat)
        here = self.context.library.models()
        model = chat.model if chat else choices.first(self.context)
        offered = here if not model or model in here else [*here, model]
        updates: Updates = {
            parts.key: chat.id if chat else "",
            parts.history: shown.history,
            parts.tail: shown.tail,
            parts.feet: shown.feet,
            **self.greeting(here, shown=not shown.tail),
            parts.model: gr.update(choices=offered, value=model or None, interactive=True),
            parts.composer: self.composer(writing=shown.writing),
            self.side.listing: sidebar.listed(self.context, chat.id if chat else "", search, deleted),
        }
        return updates | self.status(model, shown.used)

    def greeting(self, here: list[str], *, shown: bool = True) -> Updates:
        """What stands in place of a conversation; without a model `here`, how to get one, that one is on its way, or
        why it isn't."""
        texts, entry = self.context.texts, zoo.find_entry(zoo.DEMO)
        last = next(iter(self.context.library.pulls()), None)
        comes = not here and self.pull() is not None
        said = texts("hello" if here else "on_its_way" if comes else "no_model")
        if not here and not comes and last is not None and last.state == "failed":
            said += f"\n\n⚠️ {legible(texts('fetch_failed', name=last.name, error=last.error))}"
        label = texts("get_demo", size=human_bytes(entry.size_bytes) if entry else "")
        return {
            self.parts.hello: gr.update(value=said, visible=shown),
            self.parts.demo: gr.update(value=label, visible=shown and not here and not comes),
        }

    def pull(self) -> Pull | None:
        """One that runs."""
        return next((one for one in self.context.library.pulls() if one.state == "running"), None)

    @staticmethod
    def composer(*, writing: bool, **changes: Any) -> Any:
        return gr.update(submit_btn=not writing, stop_btn=writing, interactive=True, **changes)

    def status(self, model: str, used: int) -> Updates:
        """The line above the chat: the context meter, or what is waited for; the timer runs meanwhile."""
        texts = self.context.texts
        pull = self.pull()
        waits, said = pull is not None, ""
        if pull is not None:
            percent = f"{100 * pull.done // pull.total} %" if pull.total else human_bytes(pull.done)
            said = texts("fetching", name=pull.name, percent=percent)
        elif model and choices.status(self.context, model) == "loading":
            waits, said = True, texts("loading", model=model)
        length = choices.context_length(self.context, model) if model else 0
        if not said and length and used:
            said = texts("meter", used=f"{used:,}", context=f"{length:,}")
        meter = (
            f'<meter min="0" max="{length}" value="{min(used, length)}" aria-label="{texts("meter_label")}"></meter>'
        )
        shown = f"{meter if length and not waits else ''}<span>{html.escape(said)}</span>"
        return {self.parts.status: shown, self.parts.timer: gr.Timer(active=waits)}

    def settled_status(self, chat: Conversation) -> Updates:
        return self.status(chat.model, transcript(self.context, chat).used)

    def fields(self, key: str, model: str) -> Updates:
        """The settings panel of a conversation."""
        values = settings.shown(self.find(key))
        hints = settings.hints(self.context, model)
        hint: dict[str, Any] = {name: {"placeholder": text} for name, text in hints.items()}
        return {
            self.parts.fields[name]: gr.update(value=value, interactive=True, **hint.get(name, {}))
            for name, value in values.items()
        }

    def open(self, key: str, request: gr.Request | None, search: str = "", deleted: str = "") -> Updates:
        """Show a conversation with its settings. Whatever else wrote to this session's page stops."""
        self._take(request, key)
        chat = self.find(key)
        model = chat.model if chat else choices.first(self.context)
        closed: Updates = {self.parts.edit_bar: gr.update(visible=False), self.parts.editing: ""}
        return self.view(key, search, deleted) | self.fields(key, model) | closed

    def _take(self, request: gr.Request | None, key: str) -> int:
        return self.viewers.take(str(request.session_hash) if request else "", key)

    # Sending and watching

    def send(self, said: dict[str, Any], key: str, editing: str, model: str | None, search: str, *held: Any) -> Updates:
        """Send what the composer holds; while it is edited, as another version of a message."""
        texts, store = self.context.texts, self.context.store
        text, named = said.get("text") or "", said.get("files") or []
        with told():
            if not model:
                raise InvalidRequestError(texts("choose_model"), param="model")
            chat = self.find(key)
            system, sampling = settings.read(held, chat.settings if chat else None)
            edited = store.message(editing) if editing and chat else None
            if not text.strip() and not named and not (edited and edited.extra.get("attachments")):
                return {self.parts.composer: gr.skip()}
            self.context.library.use(model)
            files = attach.uploaded(self.context, named)
            fresh = chat is None
            chat = chat or store.create(model, title=sidebar.title_of(text or files[0].name))
            with contextlib.ExitStack() as undo:
                if fresh:
                    undo.callback(store.remove, chat.id)
                self.keep(chat, model, system, sampling)
                self._ask(store.conversation(chat.id), text, files, edited)
                undo.pop_all()
            attach.forget(files)
        updates = self.view(chat.id, search)
        updates[self.parts.composer] = self.composer(writing=True, value={"text": "", "files": []})
        return updates | {self.parts.edit_bar: gr.update(visible=False), self.parts.editing: ""}

    def _ask(self, chat: Conversation, text: str, files: list[Any], edited: Message | None) -> None:
        parent, root = (edited.parent, edited.parent is None) if edited else (None, False)
        brought = list(edited.extra.get("attachments", ())) if edited else []
        if files:
            if choices.status(self.context, chat.model) != "loaded":
                gr.Info(html.escape(self.context.texts("loading", model=chat.model)))
            with self.context.pool.lease(chat.model) as llm:
                brought += attach.read_all(llm, files)
                above = edited.parent if edited else chat.leaf
                before = self.context.store.branch(chat.id, above) if above else []
                attach.check_fits(self.context, llm, chat, before, text, brought)
        more: dict[str, Any] = {"attachments": brought} if brought else {}
        self.context.replies.ask(chat.id, text, parent=parent, root=root, **more)

    def keep(self, chat: Conversation, model: str, system: str, sampling: dict[str, Any]) -> None:
        """Write what differs: each change counts as one of the conversation."""
        changes: dict[str, Any] = {"model": model, "system": system, "settings": sampling}
        differs = {name: value for name, value in changes.items() if getattr(chat, name) != value}
        if differs:
            self.context.store.change(chat.id, **differs)

    def watch(self, key: str, request: gr.Request) -> Iterator[Any]:
        """The reply that is being written in a conversation, until it is over or this session looks elsewhere."""
        ticket, session = self._take(request, key), str(request.session_hash)
        live = self.context.replies.writing(key) if key else None
        chat = self.find(key)
        if live is None or chat is None:
            # An update of what was watched before may have come in late.
            yield transcript(self.context, chat).tail if chat else []
            return
        before = self._asked(chat, live.message)
        seen, due = live.shown, 0.0
        while self.viewers.holds(session, ticket):
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + PACE_S
            yield [*before, *rows_of_shown(self.context.texts, seen, chat.model)]
            if seen.over:
                return
            shown = live.wait(seen, LOOK_S)
            while shown is seen and self.viewers.holds(session, ticket):
                shown = live.wait(seen, LOOK_S)
            seen = live.shown
        # Gradio sends the last value once more at the end, and by now the page shows something else.
        yield gr.skip()

    def _asked(self, chat: Conversation, reply: str) -> list[Row]:
        """The message that is being answered."""
        above = self.context.store.message(reply).parent
        return rows_of(self.context.texts, self.context.store.message(above)) if above else []

    def settled(self, key: str, search: str, deleted: str, request: gr.Request) -> Updates:
        """After a reply: feet, figures, the list in its order; unless another conversation was opened meanwhile."""
        if not self.viewers.shows(str(request.session_hash), key):
            return {self.parts.status: gr.skip()}
        chat = self.find(key)
        updates = self.view(key, search, deleted)
        if chat is not None:
            hints = settings.hints(self.context, chat.model)
            updates |= {self.parts.fields[name]: gr.update(placeholder=hint) for name, hint in hints.items()}
        return updates

    # What stands below a message

    def act(self, event: gr.EventData, key: str, search: str, *held: Any) -> Updates:
        """A foot's button."""
        data: Any = event._data
        do, message = str(data.get("do")), str(data.get("id"))
        store, replies = self.context.store, self.context.replies
        with told():
            if do == "picture":
                raise InvalidRequestError(self.context.texts("no_images", name=data.get("name")), param="attachment")
            one = store.message(message)
            if do == "edit":
                return self._edit(one)
            if do == "show":
                store.show(message)
            elif do in ("retry", "continue"):
                chat = store.conversation(one.conversation)
                model, *rest = held
                self.keep(chat, model or chat.model, *settings.read(rest, chat.settings))
                self.context.library.use(model or chat.model)
                (replies.retry if do == "retry" else replies.go_on)(message)
            return self.view(one.conversation, search)

    def _edit(self, message: Message) -> Updates:
        value = {"text": message.content, "files": []}
        shown: Updates = {self.parts.edit_bar: gr.update(visible=True), self.parts.editing: message.id}
        return shown | {self.parts.composer: self.composer(writing=False, value=value)}

    def cancel_edit(self) -> Updates:
        closed: Updates = {self.parts.edit_bar: gr.update(visible=False), self.parts.editing: ""}
        return closed | {self.parts.composer: gr.update(value={"text": "", "files": []})}
