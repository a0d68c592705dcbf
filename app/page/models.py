"""The panel "Models": what is here and what can be, whether it fits, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from mlxinfer.app.page import models_view as view
from mlxinfer.app.page.panels import ON_BUTTON, QUICK, WHILE_SEEN, pressed, style
from mlxinfer.errors import MlxinferError
from mlxinfer.zoo import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.app.library import Library, Offer
    from mlxinfer.app.page.panels import PanelContext
    from mlxinfer.app.page.texts import Texts


def panel(context: PanelContext) -> None:
    """Build the panel inside the tab that is being built."""
    _Panel(context.library, context.texts).build()


@dataclass
class _Seen:
    """What one browser tab shows."""

    chosen: str = ""
    asking: bool = False
    """Whether the chosen model is to be deleted."""
    text: str = ""
    only_here: bool = False
    notice: str = ""
    drawn: dict[str, Any] = field(default_factory=dict[str, Any])
    """By part, what was sent last."""


class _Panel:
    def __init__(self, library: Library, words: Texts) -> None:
        self.library, self.words = library, words

    # Components

    def build(self) -> None:
        words, css = self.words, style("models.css")

        def html(name: str, script: str, **more: Any) -> gr.HTML:
            return gr.HTML(
                "", elem_id=f"models-{name}", css_template=css, js_on_load=script, apply_default_css=False, **more
            )

        def pulse(_: object) -> dict[str, str]:
            return self.pulse()

        seen = gr.State(_Seen())
        memory = html("memory", WHILE_SEEN, server_functions=[pulse])
        parts: dict[str, Any] = {"notice": html("notice", "", visible=False)}
        with gr.Row(equal_height=False):
            with gr.Column(scale=7, min_width=320):
                text = gr.Textbox(
                    label=words("models_filter"), placeholder=words("models_filter_hint"), max_lines=1,
                    elem_id="models-filter",
                )  # fmt: skip
                only = gr.Checkbox(label=words("models_only_here"), elem_id="models-only-here")
                parts["table"] = html("table", ON_BUTTON)
            with gr.Column(scale=3, min_width=280):
                parts["detail"] = html("detail", ON_BUTTON)
                parts |= self._build_actions()
                yes, no = parts.pop("yes"), parts.pop("no")
                add, fields = self._build_adapters(parts)
                self._build_pull(parts, html)
        outputs = list(parts.values())
        self._names = list(parts)

        def on(trigger: Any, act: Callable[..., str], *inputs: Any) -> None:
            trigger(self._after(act), [seen, *inputs], outputs, trigger_mode="once", **QUICK)

        memory.tick(self.draw, [seen], outputs, trigger_mode="always_last", **QUICK)
        for changed in (text.change, only.change):
            changed(self.filter, [seen, text, only], outputs, trigger_mode="always_last", **QUICK)
        parts["table"].select(self.choose, [seen], outputs, trigger_mode="multiple", **QUICK)
        parts["detail"].select(self.drop, [seen], outputs, trigger_mode="once", **QUICK)
        parts["pulls"].select(self.press, [seen], outputs, trigger_mode="multiple", **QUICK)
        on(parts["load"].click, self.load)
        on(parts["unload"].click, self.unload)
        on(parts["pin"].click, self.pin)
        on(parts["fetch"].click, self.fetch)
        on(parts["delete"].click, self.ask)
        on(yes.click, self.delete)
        on(no.click, self.keep)
        on(add.click, self.add, *fields)
        for trigger in (self._pull_button.click, self._pull_name.submit):
            on(trigger, self.fetch_named, self._pull_name)

    def _build_actions(self) -> dict[str, Any]:
        words, made = self.words, {}
        with gr.Row(elem_id="models-actions"):
            for name, label in (("load", "load"), ("unload", "unload"), ("fetch", "pull"), ("pin", "pin"),
                                ("delete", "delete")):  # fmt: skip
                variant = "primary" if name in ("load", "fetch") else "secondary"
                made[name] = gr.Button(
                    words(f"models_{label}"), variant=variant, size="sm", visible=False, min_width=90,
                    elem_id=f"models-{name}",
                )  # fmt: skip
        with gr.Column(visible=False, elem_id="models-confirm") as made["confirm"]:
            made["question"] = gr.Markdown("", elem_id="models-question", padding=True)
            with gr.Row():
                made["yes"] = gr.Button(words("models_delete_yes"), size="sm", elem_id="models-yes")
                made["no"] = gr.Button(words("models_delete_no"), size="sm", elem_id="models-no")
        return made

    def _build_adapters(self, parts: dict[str, Any]) -> tuple[gr.Button, tuple[gr.Textbox, gr.Textbox]]:
        words = self.words
        with gr.Accordion(words("adapters"), open=False, visible=False, elem_id="models-adapters") as adapters:
            gr.Markdown(words("adapters_hint"))
            name = gr.Textbox(label=words("adapter_name"), max_lines=1, elem_id="models-adapter-name")
            folder = gr.Textbox(label=words("adapter_folder"), max_lines=1, elem_id="models-adapter-folder")
            add = gr.Button(words("adapter_add"), size="sm", elem_id="models-adapter-add")
        parts["adapters"] = adapters
        return add, (name, folder)

    def _build_pull(self, parts: dict[str, Any], html: Callable[[str, str], gr.HTML]) -> None:
        words = self.words
        with gr.Row(equal_height=True):
            self._pull_name = gr.Textbox(
                label=words("pull_name"),
                placeholder=words("pull_hint"),
                max_lines=1,
                scale=4,
                elem_id="models-pull-name",
            )
            self._pull_button = gr.Button(words("pull_button"), scale=1, min_width=80, elem_id="models-pull")
        parts["pulls"] = html("pulls", ON_BUTTON)

    # What is shown

    def pulse(self) -> dict[str, str]:
        """The memory bar, and a word that is another one when anything else has changed."""
        pulls = [(pull.name, pull.state, pull.cancelling, pull.phase, pull.done) for pull in self.library.pulls()]
        fits = [(name, report.verdict) for name, report in self.library.fits().items()]
        version = hash((*self.library.offers(), *pulls, *fits))
        return {"value": view.memory(self.library.memory(), self.words), "version": str(version)}

    def draw(self, seen: _Seen) -> list[Any]:
        """Every part that has changed since it was drawn last."""
        wanted = self._wanted(seen)
        updates = [
            gr.skip() if seen.drawn.get(name) == wanted[name] else gr.update(**wanted[name]) for name in self._names
        ]
        seen.drawn = wanted
        return updates

    def _wanted(self, seen: _Seen) -> dict[str, dict[str, Any]]:
        words, library = self.words, self.library
        offers, fits = library.offers(), library.fits()
        listed = view.matching(offers, seen.text, seen.only_here)
        offer = next((one for one in offers if one.name == seen.chosen), None)
        here, state = (offer.here, offer.state) if offer else (False, "")
        size = human_bytes(offer.size_bytes) if offer else ""
        free = here and not (offer and offer.error and state == "registered")
        pin = "models_unpin" if offer and offer.pinned else "models_pin"
        return {
            "notice": {"value": seen.notice, "visible": bool(seen.notice)},
            "table": {"value": view.table(listed, len(offers), fits, seen.chosen, words)},
            "detail": {"value": view.detail(offer, fits.get(seen.chosen), words)},
            "load": {"visible": free and state in ("registered", "failed")},
            "unload": {"visible": here and state in ("loaded", "unloading"), "interactive": state == "loaded"},
            "fetch": {"visible": offer is not None and not here},
            "pin": {"visible": here, "value": words(pin)},
            "delete": {"visible": here, "interactive": not seen.asking},
            "confirm": {"visible": seen.asking and here},
            "question": {"value": words("models_delete_sure", name=_plain(seen.chosen), size=size)},
            "adapters": {"visible": here and offer is not None and offer.writes},
            "pulls": {"value": view.pulls(library.pulls(), words)},
        }

    def filter(self, seen: _Seen, text: str | None, only_here: bool) -> list[Any]:
        seen.text, seen.only_here = text or "", bool(only_here)
        return self.draw(seen)

    def choose(self, seen: _Seen, event: gr.EventData) -> list[Any]:
        act, name = pressed(event)
        if act == "choose":
            seen.chosen, seen.asking, seen.notice = name, False, ""
        return self.draw(seen)

    # What is done

    def _after(self, act: Callable[..., str]) -> Callable[..., list[Any]]:
        """`act`, then everything that has changed; what it says or what went wrong stands above the list."""

        def done(seen: _Seen, *values: Any) -> list[Any]:
            self._tried(seen, act, *values)
            return self.draw(seen)

        return done

    def _tried(self, seen: _Seen, act: Callable[..., str], *values: Any) -> None:
        try:
            seen.notice = view.notice(act(seen, *values))
        except MlxinferError as error:
            seen.notice = view.notice(str(error), bad=True)

    def load(self, seen: _Seen) -> str:
        self.library.load(seen.chosen)
        return self.words("models_loads", name=seen.chosen)

    def unload(self, seen: _Seen) -> str:
        self.library.unload(seen.chosen)
        return self.words("models_unloaded", name=seen.chosen)

    def pin(self, seen: _Seen) -> str:
        pinned = not any(one.pinned for one in self._chosen(seen))
        self.library.pin(seen.chosen, pinned)
        return self.words("models_pinned" if pinned else "models_unpinned", name=seen.chosen)

    def _chosen(self, seen: _Seen) -> list[Offer]:
        return [one for one in self.library.offers() if one.name == seen.chosen]

    def fetch(self, seen: _Seen) -> str:
        return self.fetch_named(seen, seen.chosen)

    def fetch_named(self, seen: _Seen, name: str | None) -> str:
        pull = self.library.pull(name or "")
        return self.words("models_pulls", name=pull.name)

    def ask(self, seen: _Seen) -> str:
        seen.asking = True
        return ""

    def keep(self, seen: _Seen) -> str:
        seen.asking = False
        return ""

    def delete(self, seen: _Seen) -> str:
        seen.asking = False
        freed = self.library.remove(seen.chosen)
        return self.words("models_deleted", name=seen.chosen, freed=human_bytes(freed))

    def add(self, seen: _Seen, name: str | None, folder: str | None) -> str:
        both = self.library.add_adapter(seen.chosen, (name or "").strip(), folder or "")
        return self.words("adapter_added", name=both)

    def drop(self, seen: _Seen, event: gr.EventData) -> list[Any]:
        act, adapter = pressed(event)

        def dropped(seen: _Seen) -> str:
            self.library.drop_adapter(seen.chosen, adapter)
            return self.words("adapter_dropped", name=f"{seen.chosen}:{adapter}")

        if act == "drop":
            self._tried(seen, dropped)
        return self.draw(seen)

    def press(self, seen: _Seen, event: gr.EventData) -> list[Any]:
        """A button of a pull."""
        act, name = pressed(event)

        def done(_: _Seen) -> str:
            if act == "cancel":
                self.library.cancel(name)
            elif act == "resume":
                self.library.pull(name)
            elif act in ("discard", "clear"):
                self.library.discard(name)
            return ""

        self._tried(seen, done)
        return self.draw(seen)


def _plain(name: str) -> str:
    """A name inside of Markdown."""
    return f"`{name}`" if "`" not in name else name
