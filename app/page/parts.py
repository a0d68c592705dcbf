"""The components of the chat and its sidebar, built in the place where they stand.

What can be typed or chosen is shut until the page has loaded: that fills it in, and would draw over what came before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.app.page import choices, settings, sidebar
from mlxinfer.app.page.icons import icon
from mlxinfer.app.page.markup import DELIMITERS

if TYPE_CHECKING:
    import gradio as gr
    from gradio.components.base import FormComponent

    from mlxinfer.app.page.context import PageContext

SAYS_WHAT_WAS_PRESSED = """
element.addEventListener("click", (event) => {
  const pressed = event.target.closest("[data-do]");
  if (pressed) mlxinfer.pressed(pressed, (what) => trigger("click", what));
});
"""
FEET = 'mlxinfer.feet(element, (what) => trigger("click", what));'


@dataclass(frozen=True, slots=True)
class Side:
    """The sidebar."""

    frame: gr.Sidebar
    new: gr.Button
    search: gr.Textbox
    listing: gr.HTML
    imports: gr.UploadButton


@dataclass(frozen=True, slots=True)
class Parts:
    """The chat."""

    key: gr.Textbox
    """The shown conversation's id, known to the browser so that reloading the page shows it again."""
    editing: gr.State
    deleted: gr.State
    model: gr.Dropdown
    status: gr.HTML
    hello: gr.Markdown
    demo: gr.Button
    history: gr.Chatbot
    tail: gr.Chatbot
    feet: gr.HTML
    edit_bar: gr.Row
    edit_cancel: gr.Button
    composer: gr.MultimodalTextbox
    timer: gr.Timer
    fields: dict[str, FormComponent]
    preset: gr.Dropdown
    preset_save: gr.Button
    preset_delete: gr.Button


def build_side(context: PageContext) -> Side:
    import gradio as gr

    texts = context.texts
    with gr.Sidebar(elem_id="side", open=True, width=290) as frame:
        new = gr.Button(f"+ {texts('new_chat')}", elem_id="new-chat", variant="primary")
        search = gr.Textbox(
            label=texts("search"), placeholder=texts("search_hint"), elem_id="search", show_label=False, max_lines=1,
            interactive=False,
        )  # fmt: skip
        everything = sidebar.listed(context, "", "", "")
        listing = gr.HTML(everything, elem_id="listing", js_on_load=SAYS_WHAT_WAS_PRESSED, container=False)
        imports = gr.UploadButton(
            texts("import"), file_types=[".json", ".md"], elem_id="import", size="sm", variant="secondary"
        )
        gr.HTML(_foot(context), elem_id="side-foot")
    return Side(frame, new, search, listing, imports)


def _foot(context: PageContext) -> str:
    """The switches of theme and language."""
    texts = context.texts
    label = texts("theme")
    theme = f'<button type="button" id="theme" aria-label="{label}" title="{label}">{icon("theme")}</button>'
    others = (lang for lang in context.languages if lang != texts.lang)
    links = (f'<a class="language" lang="{lang}" href="/app/{lang}/">{texts("other_language")}</a>' for lang in others)
    return theme + "".join(links)


def _opener(context: PageContext) -> str:
    label = context.texts("settings")
    about = f'aria-label="{label}" title="{label}" aria-expanded="false" aria-controls="settings"'
    return f'<button type="button" id="open-settings" {about}>{icon("settings")}</button>'


def build_chat(context: PageContext) -> Parts:
    import gradio as gr

    texts = context.texts
    key = gr.Textbox(visible="hidden", elem_id="chat-key", label="key")
    editing, deleted = gr.State(""), gr.State("")
    timer = gr.Timer(1.0, active=False)
    with gr.Row(elem_id="head", equal_height=True):
        model = gr.Dropdown(
            context.library.models(), value=choices.first(context) or None, label=texts("model"), show_label=False,
            elem_id="model", container=False, scale=1, interactive=False,
        )  # fmt: skip
        status = gr.HTML(elem_id="status", container=False)
        gr.HTML(_opener(context), elem_id="settings-switch", container=False)
    with gr.Row(elem_id="middle"):
        with gr.Column(elem_id="talk", scale=1):
            with gr.Column(elem_id="scroll"):
                hello = gr.Markdown(texts("hello"), elem_id="hello")
                demo = gr.Button("", visible=False, elem_id="demo", variant="primary")
                history, tail = _chatbot("history", texts("conversation")), _chatbot("tail", texts("last_exchange"))
                feet = gr.HTML("", elem_id="feet", js_on_load=FEET, container=False)
            with gr.Row(visible=False, elem_id="edit-bar", equal_height=True) as edit_bar:
                gr.Markdown(texts("editing"))
                edit_cancel = gr.Button(texts("cancel"), size="sm", scale=0, min_width=100)
            composer = gr.MultimodalTextbox(
                label=texts("message"), show_label=False, placeholder=texts("message_hint"), elem_id="composer",
                file_count="multiple", max_lines=12, max_plain_text_length=2_000_000, autofocus=True, interactive=False,
            )  # fmt: skip
        with gr.Column(elem_id="settings", scale=0, min_width=280):
            gr.Markdown(f"#### {texts('settings')}")
            system = gr.Textbox(
                label=texts("system"), placeholder=texts("system_hint"), lines=3, max_lines=12, elem_id="system",
                interactive=False,
            )  # fmt: skip
            preset = gr.Dropdown(
                [], value=None, label=texts("preset"),
                info=texts("preset_hint"), allow_custom_value=True, elem_id="preset", interactive=False,
            )  # fmt: skip
            with gr.Row():
                save = gr.Button(texts("save_preset"), size="sm", min_width=80)
                delete = gr.Button(texts("delete_preset"), size="sm", min_width=80)
            with gr.Row(elem_id="sampling"):
                made = {"system": system, **settings.fields(texts)}
    fields = {name: made[name] for name in settings.FIELDS}
    return Parts(
        key, editing, deleted, model, status, hello, demo, history, tail, feet, edit_bar, edit_cancel, composer, timer,
        fields, preset, save, delete,
    )  # fmt: skip


def _chatbot(name: str, label: str) -> gr.Chatbot:
    import gradio as gr

    return gr.Chatbot(
        [], label=label, show_label=False, elem_id=name, height=None, container=False, autoscroll=False,
        latex_delimiters=DELIMITERS, group_consecutive_messages=False, buttons=["copy"], sanitize_html=True,
        allow_file_downloads=False, feedback_options=None, layout="bubble", allow_tags=False,
    )  # fmt: skip
