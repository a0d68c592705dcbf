"""The panel of a conversation's settings: system prompt and presets, sampling, JSON schema, thinking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.app.prompts import params_of
from mlxinfer.errors import InvalidRequestError
from mlxinfer.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradio.components.base import FormComponent

    from mlxinfer.app.page.context import PageContext
    from mlxinfer.app.page.texts import Texts
    from mlxinfer.app.store import Conversation

NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")
WHOLE = frozenset({"top_k", "max_tokens", "seed"})
FIELDS = ("system", *NUMBERS, "stop", "schema", "thinking")
"""The panel's fields, in its order."""
PLAIN = SamplingParams(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
"""What holds where the model says nothing."""


def fields(texts: Texts) -> dict[str, FormComponent]:
    """Build the controls, in the order in which they stand; the system prompt, which is apart, isn't among them.

    They are shut until `ChatPage.fields` fills them in.
    """
    import gradio as gr

    made: dict[str, FormComponent] = {}
    # Gradio's own number field takes an empty one for 0.
    number = gr.InputHTMLAttributes(autocomplete="off", spellcheck=False)
    for name in NUMBERS:
        hint = texts("model_default")
        made[name] = gr.Textbox(
            label=texts(name), placeholder=hint, max_lines=1, min_width=110, html_attributes=number,
            elem_id=f"set-{name}", interactive=False,
        )  # fmt: skip
    made["stop"] = gr.Textbox(label=texts("stop"), lines=1, max_lines=4, interactive=False)
    made["thinking"] = gr.Dropdown(
        _thinking(texts), value="", label=texts("thinking_mode"), filterable=False, interactive=False
    )
    made["schema"] = gr.Textbox(
        label=texts("schema"), lines=3, max_lines=12, placeholder='{"type": "object", …}', elem_classes=["code"],
        interactive=False,
    )  # fmt: skip
    return made


def _thinking(texts: Texts) -> list[tuple[str, str]]:
    return [(texts("as_model"), ""), (texts("on"), "on"), (texts("off"), "off")]


def read(values: Sequence[Any], before: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """System prompt and settings of what the fields hold. Raises InvalidRequestError that names the field.

    `before`: the conversation's settings; what the panel doesn't show is kept.
    """
    held = dict(zip(FIELDS, values, strict=True))
    found = {name: value for name, value in (before or {}).items() if name not in FIELDS}
    for name in NUMBERS:
        if text := (held[name] or "").strip():
            found[name] = _number(name, text)
    if stops := [line for line in (held["stop"] or "").splitlines() if line]:
        found["stop"] = stops
    if (held["schema"] or "").strip():
        found["schema"] = held["schema"]
    if held["thinking"]:
        found["thinking"] = held["thinking"] == "on"
    params_of(found)
    return held["system"] or "", found


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if name in WHOLE else float(text.replace(",", "."))
    except ValueError:
        kind = "a whole number" if name in WHOLE else "a number"
        raise InvalidRequestError(f"{name} is {text!r:.40}; {kind} is expected", param=name) from None


def shown(chat: Conversation | None) -> dict[str, Any]:
    """Field → what it shows for a conversation; without one, everything is as the model has it."""
    settings = chat.settings if chat else {}
    values: dict[str, Any] = {name: "" if settings.get(name) is None else f"{settings[name]}" for name in NUMBERS}
    stop = settings.get("stop")
    values["stop"] = "\n".join(stop) if isinstance(stop, list) else stop or ""
    values["schema"] = settings.get("schema", "")
    thinking = settings.get("thinking")
    values["thinking"] = "" if thinking is None else "on" if thinking else "off"
    values["system"] = chat.system if chat else ""
    return {name: values[name] for name in FIELDS}


def hints(context: PageContext, model: str) -> dict[str, str]:
    """Field → the value that holds when it is left empty; of a model that isn't loaded it isn't known."""
    texts = context.texts
    loaded = context.pool.model(model) if model in context.pool else None
    defaults = getattr(loaded, "defaults", None)
    if not isinstance(defaults, SamplingParams):
        found = dict.fromkeys(NUMBERS, texts("model_default"))
    else:
        held = defaults.with_defaults(PLAIN)
        found = {name: f"{getattr(held, name)}" for name in NUMBERS}
    return found | {"max_tokens": texts("no_limit"), "seed": texts("random")}
