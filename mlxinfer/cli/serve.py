"""`mlxinfer serve`: load models, then answer HTTP until told to stop."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mlxinfer.cli import checks, loading, options, output, process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from mlxinfer.config import Settings
    from mlxinfer.llm import LLM

_SERVED_NAME = re.compile(r"[A-Za-z0-9][\w./:@+-]{0,199}", re.ASCII)
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@click.command(
    "serve",
    epilog=options.example(
        "mlxinfer serve smollm2-135m",
        "mlxinfer serve smollm2-135m tuned=./my-model --port 8000",
        "MLXINFER_API_KEY=secret mlxinfer serve smollm2-135m --host 0.0.0.0",
    ),
)
@click.argument("models", nargs=-1, type=options.ModelName(), metavar="[MODEL]...")
@click.option("--host", metavar="ADDRESS", help="Where to listen [127.0.0.1]; others need MLXINFER_API_KEY set.")
@click.option("--port", type=int, metavar="N", help="Port [8080]; 0 takes a free one.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="Another name in the Host header to answer to.")
@click.option("--allow-origin", multiple=True, metavar="URL", help="A web page's origin that may call.")
@options.engine_options
@options.json_option
def serve(models: tuple[str, ...], as_json: bool, **opts: Any) -> None:
    """Serve MODELs over HTTP: an alias, a hub id, a folder, a .gguf file, or NAME=SOURCE to choose the name.

    SIGTERM lets running requests end and exits with 0.
    """
    settings = options.settings_of(ctx=opts["ctx"], dtype=opts["dtype"], host=opts["host"], port=opts["port"])
    given = bool(models)
    if not models and settings.model:
        models = (settings.model,)
    if not models:
        raise click.UsageError("name a model: mlxinfer serve MODEL, or set `model` in config.toml")
    named = name_models(models)
    for source in named.values():  # all of them, before the first is loaded for minutes
        with loading.naming_the_setting(source, given=given):
            checks.check_generates(source)
    access = {"allowed_hosts": frozenset(opts["allow_host"]), "allowed_origins": frozenset(opts["allow_origin"])}
    _check_address(settings, access)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with ExitStack() as stack:
            loaded: dict[str, LLM] = {}
            for name, source in named.items():
                with loading.naming_the_setting(source, given=given), _kept_if_cut_off(stack):
                    loaded[name] = loading.load_model(source, settings)
                stack.callback(loaded[name].unload)
            _run(loaded, settings, access, as_json=as_json)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _kept_if_cut_off(stack: ExitStack) -> Iterator[None]:
    """Unloading would wait for the load that was cut off, and the process ends anyway (`process.end`)."""
    try:
        yield
    finally:
        if process.a_load_was_cut_off():
            stack.pop_all()


def _check_address(settings: Settings, access: dict[str, Any]) -> None:
    """A port that is taken or a host that needs a key is known now, not after minutes of loading."""
    from mlxinfer.server.options import ServerOptions
    from mlxinfer.server.run import bind

    ServerOptions(host=settings.host, api_key=os.environ.get("MLXINFER_API_KEY") or None, **access)
    bind(settings.host, settings.port).close()


def _run(loaded: dict[str, LLM], settings: Settings, access: dict[str, Any], *, as_json: bool) -> None:
    from mlxinfer.server.run import serve as run_server

    def started(host: str, port: int) -> None:
        address = url(host, port)
        if as_json:
            output.emit_json({"url": address, "models": list(loaded)})
        output.say(f"Serving {', '.join(loaded)} at {address}/v1   (Ctrl-C stops)")

    ended_by = run_server(loaded, host=settings.host, port=settings.port, on_started=started, **access)
    if ended_by == signal.SIGINT:
        raise click.Abort


def url(host: str, port: int) -> str:
    """The address to type into a client on this machine."""
    host = _WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def name_models(models: tuple[str, ...]) -> dict[str, str]:
    """Name → source. `NAME=SOURCE` names it; a path gets the name of its folder or file; else the model's own name."""
    named: dict[str, str] = {}
    for text in models:
        if not text.strip():
            raise click.UsageError("a model's name is empty; name one: mlxinfer serve MODEL")
        name, equals, source = text.partition("=")
        if not equals or text.startswith((".", "/", "~")):
            name, source = served_name(text), text
        if not source or not _SERVED_NAME.fullmatch(name):
            raise click.UsageError(f"{text!r} is not NAME=SOURCE; a name has letters, digits and . _ - / : @ +")
        if name in named:
            raise click.UsageError(f"two models would be called {name!r}; name one of them: other={source}")
        named[name] = source
    return named


def served_name(source: str) -> str:
    """A path's last part, without .gguf, so that clients do not learn where files are; other names as they are."""
    if not source.startswith((".", "/", "~")) and not source.endswith(".gguf"):
        return source
    path = Path(source).expanduser().resolve()
    name = path.stem if path.suffix == ".gguf" else path.name
    return re.sub(r"[^\w.+-]", "-", name, flags=re.ASCII).lstrip(".-_") or "model"


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM while the models load; afterwards the server has a handler of its own that drains."""
    raise SystemExit(0)
