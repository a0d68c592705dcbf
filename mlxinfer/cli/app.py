"""`mlxinfer app`: the chat in a window of its own, or in the browser."""

from __future__ import annotations

import signal
import webbrowser
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import INTERRUPTED, options, output, process
from mlxinfer.cli.serve import name_adapters
from mlxinfer.config import override
from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from mlxinfer.app.page.context import House
    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool

TITLE = "mlxinfer"
PREFIX_DISK_MB = 4096
"""Conversations go on after a restart."""


@click.command(
    "app",
    epilog=options.example(
        "mlxinfer app",
        "mlxinfer app qwen3-8b --browser",
        "mlxinfer app smollm2-135m --adapter tuned=./my-adapter",
    ),
)
@click.argument("model", required=False, type=options.ModelName(), metavar="[MODEL]")
@click.option("--browser", is_flag=True, help="Open the browser in place of a window.")
@click.option("--port", type=int, default=0, metavar="N", help="Port [a free one].")
@click.option("--lang", type=click.Choice(["en", "ja"]), help="The page's language [the browser's].")
@click.option(
    "--adapter", multiple=True, metavar="NAME=FOLDER", help="Offer MODEL:NAME, the model with an adapter; repeatable."
)
@click.option("--no-open", is_flag=True, help="Only print the link.")
@options.engine_options
@options.json_option
def app(model: str | None, port: int, lang: str | None, as_json: bool, **opts: Any) -> None:
    """Chat in a window, or in the browser. Conversations stay on this machine.

    Starts without a model, too: the page says how to get one. Ctrl-C ends it with everything on disk.
    """
    from mlxinfer.app import serving
    from mlxinfer.engine.governor import governor
    from mlxinfer.pool import Machine, ModelPool

    flags = {name: opts[name] for name in ("ctx", "dtype", "kv_bits")}
    settings = options.settings_of(model=model, adapters=opts["adapter"] or None, **flags)
    if settings.prefix_disk_mb is None:
        settings = override(settings, {"prefix_disk_mb": PREFIX_DISK_MB})
    with ExitStack() as stack:
        pool = ModelPool({}, Machine(settings), keep_alive=settings.keep_alive)
        stack.callback(pool.close)
        governor().on_pressure = pool.relieve
        house = stack.enter_context(serving.opened(pool, settings))
        _begin(house, pool, settings, must=model is not None)
        process.quit_on_signals(terminated=0, interrupted=INTERRUPTED)
        shows = "nothing" if opts["no_open"] else "browser" if opts["browser"] else "window"
        ended_by = _serve(house, port, lang, shows=shows, as_json=as_json)
        # What is left is to write what was said; a second Ctrl-C still ends that at once.
        process.quit_on_signals(terminated=0, interrupted=INTERRUPTED)
    if ended_by == signal.SIGINT:
        raise click.Abort


def _begin(house: House, pool: ModelPool, settings: Settings, *, must: bool) -> None:
    """Register the model that was named, configured or used last, with its adapters, and have it loaded meanwhile.

    `must`: it was named, so that what is wrong with it ends the start. Raises what Library.use raises.
    """
    from mlxinfer.app.page import choices

    if settings.model:
        try:
            house.library.use(settings.model)
        except MlxinferError as error:
            if must:
                raise
            output.say(f"{settings.model} can't be used: {error}")
    name = choices.first(house)
    if settings.adapters:
        if not name:
            raise click.UsageError("--adapter needs a model: mlxinfer app MODEL --adapter NAME=FOLDER")
        house.library.use(name)
        for base, folders in name_adapters(settings.adapters, (name,)).items():
            for adapter, folder in folders.items():
                pool.offer(base, adapter, folder)
    if name:
        choices.load(house, name)


def _serve(house: House, port: int, lang: str | None, *, shows: str, as_json: bool) -> int | None:
    """Serve until a signal, whose number is returned, or until the window is closed."""
    from mlxinfer.app import serving, window

    missing = window.available() if shows == "window" else ""
    if missing:
        output.say(f"No window: {missing}. Opening the browser.", dim=True)
        shows = "browser"
    access: dict[str, Any] = {"max_body_bytes": house.settings.max_body_mb << 20}

    def started(link: str) -> None:
        if as_json:
            output.emit_json({"url": link})
        output.say(f"The chat is at {link}   (Ctrl-C stops)")
        if shows == "browser":
            webbrowser.open(link)

    if shows != "window":
        return serving.serve_house(house, port=port, lang=lang, on_started=started, access=access)

    def serves(until: threading.Event, told: Callable[[str], None]) -> int | None:
        def both(link: str) -> None:
            started(link)
            told(link)

        return serving.serve_house(house, port=port, lang=lang, on_started=both, until=until, access=access)

    return window.run_beside(serves, TITLE)
