"""`mlxinfer serve`: load what fits, then answer HTTP until told to stop."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mlxinfer.cli import INTERRUPTED, checks, converted, loading, options, output, process, progress
from mlxinfer.config import expand_user, override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from mlxinfer.config import Settings
    from mlxinfer.pool import Machine, ModelPool

_SERVED_NAME = re.compile(r"[A-Za-z0-9][\w./:@+-]{0,199}", re.ASCII)
PREFIX_DISK_MB = 4096
"""A server is restarted and its clients go on; a notebook shouldn't write what was said to disk unasked."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@click.command(
    "serve",
    epilog=options.example(
        "mlxinfer serve smollm2-135m",
        "mlxinfer serve smollm2-135m tuned=./my-model --port 8000",
        "mlxinfer serve qwen3-8b gemma3-4b --pin qwen3-8b --keep-alive 600",
        "MLXINFER_API_KEY=secret mlxinfer serve smollm2-135m --host 0.0.0.0",
    ),
)
@click.argument("models", nargs=-1, type=options.ModelName(), metavar="[MODEL]...")
@click.option("--host", metavar="ADDRESS", help="Where to listen [127.0.0.1]; others need MLXINFER_API_KEY set.")
@click.option("--port", type=int, metavar="N", help="Port [8080]; 0 takes a free one.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="Another name in the Host header to answer to.")
@click.option("--allow-origin", multiple=True, metavar="URL", help="A web page's origin that may call.")
@click.option("--keys", metavar="FILE", help="API keys with names and limits (docs/server.md).")
@click.option("--access-log", metavar="WHERE", help="A line for each request: stderr, off or a file [stderr].")
@click.option("--metrics-open", is_flag=True, default=None, help="/metrics needs no API key.")
@click.option("--grace", type=int, metavar="SECONDS", help="How long requests may go on after SIGTERM [30].")
@click.option("--pin", multiple=True, metavar="NAME", help="Keep this model once it is loaded; may be repeated.")
@click.option("--keep-alive", type=int, metavar="SECONDS", help="Unload a model after this long without a request.")
@click.option(
    "--adapter",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Offer MODEL:NAME, the model with an adapter; of several models: MODEL:NAME=FOLDER. May be repeated.",
)
@click.option("--lazy", is_flag=True, help="Load nothing before the first request for it.")
@options.engine_options
@options.json_option
def serve(models: tuple[str, ...], as_json: bool, **opts: Any) -> None:
    """Serve MODELs over HTTP: an alias, a hub id, a folder, a .gguf file, or NAME=SOURCE to choose the name.

    Those that fit beside each other are loaded at once, the others when a request names them; the least recently used
    makes room.

    SIGTERM lets running requests end and exits with 0.
    """
    from mlxinfer.pool import Machine, ModelPool

    settings = options.settings_of(**_flags(opts))
    if settings.prefix_disk_mb is None:
        settings = override(settings, {"prefix_disk_mb": PREFIX_DISK_MB})
    given = bool(models)
    if not models and settings.model:
        models = (settings.model,)
    if not models:
        raise click.UsageError("name a model: mlxinfer serve MODEL, or set `model` in config.toml")
    named = name_models(models)
    if unknown := next((name for name in opts["pin"] if name not in named), None):
        raise click.UsageError(f"--pin {unknown}: no model is served under that name; served are {', '.join(named)}")
    adapters = name_adapters(settings.adapters, tuple(named))
    granted = access(settings, len(named))
    check_address(settings, granted)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with ExitStack() as stack:
            machine = Machine(settings)
            pool = ModelPool(named, machine, keep_alive=settings.keep_alive, pinned=opts["pin"], adapters=adapters)
            stack.callback(pool.close)
            for name, source in named.items():
                with loading.naming_the_setting(source, given=given), _kept_if_cut_off(stack):
                    _bring(pool, machine, name, source, lazy=opts["lazy"])
            run_pool(pool, settings, granted, as_json=as_json)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flags(opts: dict[str, Any]) -> dict[str, Any]:
    """Settings that the command line gives; None: it doesn't."""
    same = ("ctx", "dtype", "kv_bits", "host", "port", "keep_alive", "access_log", "metrics_open", "grace")
    return {name: opts[name] for name in same} | {
        "allow_hosts": opts["allow_host"] or None,
        "allow_origins": opts["allow_origin"] or None,
        "keys_file": opts["keys"],
        "adapters": opts["adapter"] or None,
    }


def access(settings: Settings, models: int) -> dict[str, Any]:
    """The fields of ServerOptions that settings say. Raises InvalidRequestError for a file of keys that is no such."""
    from mlxinfer.server.keys import load_keys

    return {
        "allowed_hosts": frozenset(settings.allow_hosts),
        "allowed_origins": frozenset(settings.allow_origins),
        "keys": () if settings.keys_file is None else load_keys(settings.keys_file),
        "access_log": None if settings.access_log == "off" else settings.access_log,
        "metrics_open": settings.metrics_open,
        "max_requests": models * (settings.max_num_seqs + settings.max_queue),
        "max_body_bytes": settings.max_body_mb << 20,
        "body_timeout_s": float(settings.body_timeout),
        "grace_s": float(settings.grace),
    }


def _bring(pool: ModelPool, machine: Machine, name: str, source: str, *, lazy: bool) -> None:
    """Load a model if it fits beside those before it, else see to it that its files are here."""
    _fetch(machine, source)
    first = all(pool.model(other) is None for other in pool)
    if lazy or not (first or pool.fits_now(name)):
        why = "" if lazy else ": it doesn't fit beside the others"
        output.say(f"{name} is not loaded yet{why}. The first request for it loads it.", dim=True)
        return
    pool.adopt(name, loading.load_served(source, machine.settings))


def _fetch(machine: Machine, source: str) -> None:
    """The files of a model, converted where it can't be loaded as it is: the pool, which loads it again, doesn't."""
    from mlxinfer import zoo
    from mlxinfer.encoders import encoder_kind

    settings = machine.settings
    checks.check_fits(source, settings)
    with progress.reporting() as report:
        files = zoo.resolve(source, settings, progress=report)
        if encoder_kind(files.path, source, files.name):
            return
        with process.cut_off_by_signals():
            usable = converted.loadable(files, settings, report)
    if usable is not files:
        machine.use(source, usable)


@contextlib.contextmanager
def _kept_if_cut_off(stack: ExitStack) -> Iterator[None]:
    """Unloading would wait for the load that was cut off, and the process ends anyway (`process.end`)."""
    try:
        yield
    finally:
        if process.a_load_was_cut_off():
            stack.pop_all()


def check_address(settings: Settings, access: dict[str, Any]) -> None:
    """A port that is taken or a host that needs a key is known now, not after minutes of loading."""
    from mlxinfer.server.options import ServerOptions
    from mlxinfer.server.run import bind

    ServerOptions(host=settings.host, api_key=os.environ.get("MLXINFER_API_KEY") or None, **access)
    bind(settings.host, settings.port).close()


def run_pool(pool: ModelPool, settings: Settings, access: dict[str, Any], *, as_json: bool) -> None:
    from mlxinfer.engine.governor import governor
    from mlxinfer.server.announce import RunningServer, announced
    from mlxinfer.server.run import serve as run_server

    governor().on_pressure = pool.relieve
    here = ExitStack()

    def started(host: str, port: int) -> None:
        address = url(host, port)
        server = RunningServer.this(host, port, tuple(pool), access["grace_s"])
        try:
            here.enter_context(announced(settings.cache_dir, server))
        except OSError as error:
            output.say(f"`mlxinfer ps` and `stop` won't know of this server: {error}")
        if as_json:
            output.emit_json({"url": address, "models": [*pool, *pool.adapted()]})
        output.say(f"Serving {', '.join([*pool, *pool.adapted()])} at {address}/v1   (Ctrl-C stops)")

    # The server has handlers of its own; these are for the moments before and after them.
    process.quit_on_signals(terminated=0, interrupted=INTERRUPTED)
    with here:
        ended_by = run_server(pool, host=settings.host, port=settings.port, on_started=started, **access)
    code = INTERRUPTED if ended_by == signal.SIGINT else 0
    process.quit_on_signals(terminated=code, interrupted=code)
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


def name_adapters(given: tuple[str, ...], models: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Model → adapter → folder, of NAME=FOLDER or MODEL:NAME=FOLDER. The files are looked at, the models not yet."""
    from mlxinfer.engine.adapter_files import read_adapter

    found: dict[str, dict[str, str]] = {}
    for text in given:
        whole, equals, folder = text.partition("=")
        model, colon, name = whole.rpartition(":")
        if not equals or not name or not folder:
            raise click.UsageError(f"--adapter {text!r} is not NAME=FOLDER")
        if not colon:
            if len(models) > 1:
                raise click.UsageError(f"--adapter {text}: of which model? {', '.join(f'{m}:{text}' for m in models)}")
            model = next(iter(models))
        if model not in models:
            raise click.UsageError(f"--adapter {text}: no model is served as {model!r}; served are {', '.join(models)}")
        if name in found.setdefault(model, {}):
            raise click.UsageError(f"--adapter {text}: {model} has an adapter {name} already")
        path = expand_user(folder, "--adapter")
        read_adapter(name, path)
        found[model][name] = str(path.absolute())
    return found


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
