"""A small page with panels of the app, served on 127.0.0.1, and a browser to look at it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.app.comparisons import Comparisons
from mlxinfer.app.library import Library
from mlxinfer.app.page.texts import Texts
from mlxinfer.app.replies import Replies
from mlxinfer.app.store import Store, open_store
from mlxinfer.config import Settings
from mlxinfer.pool import Machine, ModelPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

GRADIO_LEAKS = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
"""Its launch() leaves sockets and an event loop to the garbage collector."""


@dataclass(frozen=True)
class Context:
    """What the panels are given."""

    pool: ModelPool
    store: Store
    replies: Replies
    library: Library
    comparisons: Comparisons
    settings: Settings
    texts: Texts


@dataclass(frozen=True)
class Host:
    context: Context
    url: str
    close: Callable[[], None]
    page: Any


def serve(folder: Path, models: Mapping[str, str], lang: str = "en") -> Host:
    """A page with the tabs Other, Models and Compare."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio as gr
    from gradio.themes import Default

    from mlxinfer.app.page import compare
    from mlxinfer.app.page import models as models_panel

    settings = Settings(cache_dir=folder / "cache", data_dir=folder / "data")
    pool, store = ModelPool(models, Machine(settings)), open_store(folder / "chats.db").store
    replies, library = Replies(pool, store), Library(pool, settings)
    comparisons = Comparisons(pool, store, replies, library)
    context = Context(pool, store, replies, library, comparisons, settings, Texts(lang))
    with gr.Blocks(title="panels", analytics_enabled=False) as page:
        opened = gr.Textbox(label="opened", elem_id="opened")
        with gr.Tabs():
            with gr.Tab("Other"):
                gr.Markdown("another tab")
            with gr.Tab("Models"):
                models_panel.panel(context)
            with gr.Tab("Compare"):
                compare.panel(context, opened)
    _, url, _ = page.launch(
        server_name="127.0.0.1",
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        footer_links=[],
        ssr_mode=False,
        theme=Default(primary_hue="indigo", neutral_hue="slate").set(
            button_primary_background_fill="*primary_600", button_primary_background_fill_dark="*primary_600"
        ),
    )

    def close() -> None:
        page.close(verbose=False)
        context.library.close()
        context.comparisons.close()
        context.replies.close()
        pool.close()
        store.close()

    return Host(context, url, close, page)
