"""The panel "Compare": one prompt, two replies side by side, and where they begin to differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from mlxinfer.app.comparisons import Question
from mlxinfer.app.page import compare_view
from mlxinfer.app.page.models_view import notice
from mlxinfer.app.page.panels import ON_BUTTON, QUICK, WHILE_SEEN, pressed, style
from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.app.page.panels import PanelContext

SAMPLING: dict[str, tuple[float, float | None]] = {
    # Value, and step of what is no whole number. All are sent: a default that is the model's own would differ between
    # two models.
    "temperature": (0.7, 0.1),
    "top_p": (0.95, 0.05),
    "top_k": (0, None),
    "min_p": (0, 0.05),
    "repetition_penalty": (1, 0.05),
    "max_tokens": (256, None),
    "seed": (1, None),
}


def panel(context: PanelContext, opened: gr.Textbox | None = None) -> None:
    """Build the panel inside the tab that is being built.

    `opened` is given the id of the conversation that a reply was made one by "continue this one as a chat".
    """
    _Panel(context).build(opened)


@dataclass
class _Seen:
    """What one browser tab shows."""

    key: str = ""
    notice: str = ""
    drawn: dict[str, Any] = field(default_factory=dict[str, Any])


class _Panel:
    def __init__(self, context: PanelContext) -> None:
        self.comparisons, self.library, self.words = context.comparisons, context.library, context.texts

    # Components

    def build(self, opened: gr.Textbox | None) -> None:
        words, css = self.words, style("compare.css")

        def pulse(key: object) -> dict[str, str]:
            return self.pulse(key)

        seen = gr.State(_Seen())
        with gr.Row():
            left, right = (
                gr.Dropdown([], label=words(f"compare_{side}"), elem_id=f"compare-{side}") for side in ("left", "right")
            )
        prompt = gr.Textbox(
            label=words("compare_prompt"), placeholder=words("compare_prompt_hint"), max_lines=8,
            elem_id="compare-prompt",
        )  # fmt: skip
        with gr.Row():
            run = gr.Button(words("compare_run"), variant="primary", elem_id="compare-run")
            stop = gr.Button(words("compare_stop"), visible=False, elem_id="compare-stop")
            keep = gr.Checkbox(label=words("compare_keep"), elem_id="compare-keep")
        settings = self._build_settings()
        said = gr.HTML("", visible=False, css_template=css, apply_default_css=False, elem_id="compare-notice")
        shown = gr.HTML(
            "", css_template=css, apply_default_css=False, js_on_load=WHILE_SEEN + ON_BUTTON,
            server_functions=[pulse], elem_id="compare-replies",
        )  # fmt: skip
        parts = {"left": left, "right": right, "run": run, "stop": stop, "notice": said, "replies": shown}
        self._names, outputs = list(parts), [*parts.values(), *([opened] if opened else [])]
        self._opens = opened is not None
        for trigger in (run.click, prompt.submit):
            trigger(self.run, [seen, prompt, left, right, keep, *settings], outputs, trigger_mode="once", **QUICK)
        stop.click(self.stop, [seen, left, right], outputs, trigger_mode="once", **QUICK)
        shown.tick(self.draw, [seen, left, right], outputs, trigger_mode="always_last", **QUICK)
        shown.select(self.press, [seen, left, right], outputs, trigger_mode="once", **QUICK)

    def _build_settings(self) -> list[Any]:
        words = self.words
        with gr.Accordion(words("compare_sampling"), open=False, elem_id="compare-sampling"):
            system = gr.Textbox(label=words("compare_system"), max_lines=6, elem_id="compare-system")
            fields: list[Any] = [system]
            with gr.Row():
                for name, (value, step) in SAMPLING.items():
                    fields.append(
                        gr.Number(
                            value,
                            label=words(f"compare_{name}"),
                            step=step or 1,
                            precision=None if step else 0,
                            min_width=120,
                            elem_id=f"compare-{name}",
                        )
                    )
        return fields

    # What is shown

    def pulse(self, key: object) -> dict[str, str]:
        """The comparison as it stands, or the last one where the page has none yet: after a reload it grows on."""
        key = key if isinstance(key, str) and key else self.comparisons.last() or ""
        made = self.comparisons.get(key)
        version = hash((tuple(self.library.models()), key, made is None or made.over))
        return {"value": self._html(key), "version": str(version)}

    def _html(self, key: str) -> str:
        made = self.comparisons.get(key)
        if made is None:
            return ""
        return compare_view.comparison(key, made, self.comparisons.votes(made.question.models), self.words)

    def draw(self, seen: _Seen, left: str | None, right: str | None, open_id: str = "") -> list[Any]:
        """Every part that has changed since it was drawn last; the replies draw themselves."""
        if not seen.key:
            seen.key = self.comparisons.last() or ""
        made = self.comparisons.get(seen.key)
        names = self.library.models()
        running = made is not None and not made.over
        wanted: dict[str, dict[str, Any]] = {
            "left": {"choices": names, "value": left if left in names else next(iter(names), None)},
            # At first the second name: with one model and an adapter, it with that.
            "right": {"choices": names, "value": right if right in names else next(iter(names[1:] or names), None)},
            "run": {"interactive": bool(names) and not running},
            "stop": {"visible": running},
            "notice": {"value": seen.notice, "visible": bool(seen.notice)},
            "replies": {"value": self._html(seen.key)},
        }
        if not names:
            wanted["notice"] = {"value": notice(self.words("compare_no_model")), "visible": True}
        updates: list[Any] = []
        for name in self._names:
            fresh = seen.drawn.get(name) != wanted[name]
            updates.append(gr.update(**wanted[name]) if fresh else gr.skip())
        seen.drawn = wanted
        return [*updates, *([open_id or gr.skip()] if self._opens else [])]

    # What is done

    def _tried(self, seen: _Seen, act: Callable[[], str]) -> None:
        try:
            seen.notice = notice(act())
        except MlxinferError as error:
            seen.notice = notice(str(error), bad=True)

    def run(
        self, seen: _Seen, prompt: str | None, left: str | None, right: str | None, keep: bool, system: str | None,
        *values: float | None,
    ) -> list[Any]:  # fmt: skip
        def begun() -> str:
            if not left or not right:
                return self.words("compare_choose")
            settings = {name: value for name, value in zip(SAMPLING, values, strict=True) if value is not None}
            question = Question((prompt or "").strip(), (left, right), (system or "").strip(), settings)
            seen.key = self.comparisons.begin(question, keep=bool(keep))
            return ""

        self._tried(seen, begun)
        return self.draw(seen, left, right)

    def stop(self, seen: _Seen, left: str | None, right: str | None) -> list[Any]:
        if made := self.comparisons.get(seen.key):
            made.stop()
        return self.draw(seen, left, right)

    def press(self, seen: _Seen, left: str | None, right: str | None, event: gr.EventData) -> list[Any]:
        """A button of a reply."""
        act, name = pressed(event)
        side = 1 if name == "1" else 0
        opened: list[str] = []

        def done() -> str:
            if act == "better":
                self.comparisons.vote(seen.key, side)
            elif act == "continue":
                chat = self.comparisons.go_on(seen.key, side)
                opened.append(chat.id)
                return self.words("compare_continued", title=chat.title)
            return ""

        self._tried(seen, done)
        return self.draw(seen, left, right, *opened)
