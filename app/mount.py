"""The server with the page on it: its own routes, the page of each language below /app, and the door before it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psutil
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response

from mlxinfer.app import theme as themes
from mlxinfer.app.door import MAX_UPLOAD_BYTES, PATH, Door
from mlxinfer.app.page.context import House, PageContext
from mlxinfer.app.page.icons import FAVICON
from mlxinfer.app.page.texts import LANGUAGES, Texts
from mlxinfer.app.store.exchange import to_json, to_markdown
from mlxinfer.errors import InvalidRequestError, UnsupportedModelError
from mlxinfer.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import gradio as gr
    from fastapi import FastAPI
    from starlette.requests import Request

    from mlxinfer.app.replies import Replies
    from mlxinfer.app.store import Store
    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool
    from mlxinfer.server.options import ServerOptions

PAGE = Path(__file__).with_name("page")
UPLOADS = "app-uploads"
MISSING = "the chat needs what isn't installed: pip install 'mlxinfer[app]'"
FONTS = ["system-ui", "-apple-system", "Hiragino Sans", "Noto Sans CJK JP", "Yu Gothic", "sans-serif"]
CODE_FONTS = ["ui-monospace", "Menlo", "Consolas", "monospace"]
CONTRAST = {
    "button_primary_background_fill": "*primary_600",
    "button_primary_background_fill_dark": "*primary_600",
    "body_text_color_subdued": "*neutral_500",
    "block_info_text_color": "*neutral_500",
    "input_placeholder_color": "*neutral_500",
}
"""Gradio's own colours for these are below 4.5 : 1 (WCAG 2.1, 1.4.3)."""
LOOKS_S = 0.04
"""Between two looks at the queue of events: half of it, in the mean, is added to what a click takes."""
PROGRESS_S = 1.0
QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_MCP_SERVER": "False",
    "GRADIO_SSR_MODE": "False",
    "GRADIO_SHARE": "False",
    "GRADIO_VIBE_MODE": "",
    "GRADIO_RUN_HISTORY": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Of Gradio, before it is imported: it asks nobody and offers nothing but the page."""


def prepare_gradio(uploads: Path) -> None:
    """Import Gradio as it is to be. Raises UnsupportedModelError where the extra isn't installed."""
    os.environ.update(QUIET, GRADIO_TEMP_DIR=str(uploads))
    try:
        with _a_loop():
            import gradio  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise UnsupportedModelError(MISSING) from error


@contextlib.contextmanager
def _a_loop() -> Iterator[None]:
    """Gradio makes an event loop where a thread has none, to build its locks, and leaves it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def uploads_folder(settings: Settings) -> Path:
    """A folder of this process's own, for this user's eyes only; what processes that are gone left is removed.

    Raises OSError.
    """
    above = settings.cache_dir / UPLOADS
    above.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in above.iterdir():
        if not (old.name.isdecimal() and psutil.pid_exists(int(old.name))) or old.name == str(os.getpid()):
            shutil.rmtree(old, ignore_errors=True)
    mine = above / str(os.getpid())
    mine.mkdir(mode=0o700, exist_ok=True)
    return mine


def with_page(house: House, key: str, languages: Sequence[str], pool: ModelPool, options: ServerOptions) -> FastAPI:
    """The application: `create_app` of the same arguments, and below /app the page in each language."""
    import gradio as gr
    from gradio.themes import Default

    from mlxinfer.app.page.build import build

    app = create_app(pool, options)
    app.add_route(f"{PATH}/export/{{name}}", _exporter(house.store), methods=["GET"])
    app.add_route(f"{PATH}/stop/{{key}}", _stopper(house.replies), methods=["POST"])
    app.add_route(f"{PATH}/theme/{{theme}}", _dresser(house.settings.data_dir), methods=["POST"])
    app.add_route("/favicon.ico", lambda _: Response(FAVICON, media_type="image/svg+xml"), methods=["GET"])
    head = f"<script>{(PAGE / 'page.js').read_text('utf-8')}</script>"
    theme = Default(primary_hue="indigo", neutral_hue="slate", font=FONTS, font_mono=CODE_FONTS).set(**CONTRAST)
    for lang in languages:
        context = PageContext.of(house, Texts(lang), tuple(languages))
        with _a_loop():
            blocks = build(context).queue(api_open=False, default_concurrency_limit=None)
        _calm(blocks)
        gr.mount_gradio_app(
            app, blocks, f"{PATH}/{lang}", server_name=options.host, footer_links=[], run_history=False,
            allowed_paths=[], max_file_size=MAX_UPLOAD_BYTES, ssr_mode=False, enable_monitoring=False, pwa=False,
            mcp_server=False, show_error=False, theme=theme, head=head, css_paths=[PAGE / "style.css"],
        )  # fmt: skip
    chosen = functools.partial(themes.read, house.settings.data_dir)
    # The innermost: the Guard looks at Host and Origin first, the access log at everything.
    app.user_middleware.append(Middleware(Door, key=key, languages=tuple(languages), chosen=chosen))
    return app


def _calm(blocks: gr.Blocks) -> None:
    """Have Gradio look less often for events, by itself 1000 times a second, and for progress, of which there is none.

    It does so in each language, whether a page is open or not, and has no public option for it.
    """
    blocks._queue.sleep_when_free = LOOKS_S
    blocks._queue.progress_update_sleep_when_free = PROGRESS_S


def languages_of(wanted: str | None) -> tuple[str, ...]:
    """The one that is set, or all: the browser chooses then."""
    return LANGUAGES if wanted is None else (wanted,)


def _exporter(store: Store) -> Any:
    def export(request: Request) -> Response:
        key, _, kind = request.path_params["name"].rpartition(".")
        try:
            chat = store.conversation(key)
            text = to_json(store, chat.id) if kind == "json" else to_markdown(store, chat.id)
        except InvalidRequestError as error:
            return PlainTextResponse(f"{error}\n", 404)
        media = "application/json" if kind == "json" else "text/markdown"
        # JSON may hold halves of surrogate pairs, which UTF-8 has no bytes for.
        data = text.encode("utf-8", "backslashreplace" if kind == "json" else "replace")
        return Response(data, media_type=f"{media}; charset=utf-8", headers=_named(chat.title, kind))

    return export


def _stopper(replies: Replies) -> Any:
    """Beside Gradio's queue of events: what stops a reply waits for nothing."""

    async def stop(request: Request) -> Response:
        live = replies.writing(request.path_params["key"])
        if live is not None:
            live.stop()
        return Response(status_code=204 if live else 404)

    return stop


def _dresser(folder: Path) -> Any:
    """Keeps the theme that was chosen; the door lets no other word through."""

    def dress(request: Request) -> Response:
        themes.write(folder, request.path_params["theme"])
        answer = Response(status_code=204)
        answer.set_cookie(themes.COOKIE, request.path_params["theme"], path=PATH, samesite="strict")
        return answer

    return dress


def _named(title: str, kind: str) -> dict[str, str]:
    """The file's name as browsers take it (RFC 6266), without what no file system has."""
    plain = re.sub(r"[^\w .,()-]", "_", title).strip(" .")[:80] or "conversation"
    name = quote(f"{plain}.{kind}")
    return {"content-disposition": f"attachment; filename=\"conversation.{kind}\"; filename*=UTF-8''{name}"}
