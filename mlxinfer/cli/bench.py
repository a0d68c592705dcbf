"""`mlxinfer bench`: measure our server, or any other that speaks OpenAI's API, and compare them."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import secrets
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mlxinfer.cli import checks, options, output, progress
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from mlxinfer.bench.runner import Plan
    from mlxinfer.bench.targets import Address, Target
    from mlxinfer.config import Settings

STDOUT = "-"
PIPE_WIDTH = 160
"""Columns of a table that goes to no terminal."""
MAX_CLIENTS = 1024


class BenchCommand(click.Command):
    """`--json` alone prints, `--json FILE.json` writes; a word without that ending is the MODEL."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        made: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            if word == "--":
                made += [word, *rest]
                break
            if word == "--json":
                word = f"--json={rest.pop(0) if rest and rest[0].endswith('.json') else STDOUT}"
            made.append(word)
        return super().parse_args(ctx, made)


class Counts(click.ParamType):
    """`1,2,4,8`."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(w.isascii() and w.isdigit() and len(w) <= 4 and 1 <= int(w) <= MAX_CLIENTS for w in words):
            self.fail(f"{value!r:.80} is not a list of numbers from 1 to {MAX_CLIENTS}, such as 1,2,4,8", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


@click.command(
    "bench",
    cls=BenchCommand,
    epilog=options.example(
        "mlxinfer bench smollm2-135m",
        "mlxinfer bench smollm2-135m -w mixed -w overtake --against other=http://127.0.0.1:8081",
        "mlxinfer bench smollm2-135m -w chat --concurrency 1,2,4,8 --json chat.json --plot chat.svg",
        "mlxinfer bench --url http://127.0.0.1:8080 -w all --rounds 9",
    ),
)
@click.argument("model", type=options.ModelName(), required=False)
@click.option("--url", metavar="URL", help="Measure this server instead of starting one: [NAME=]URL[#MODEL].")
@click.option("--against", multiple=True, metavar="URL", help="Compare with it: [NAME=]URL[#MODEL]; repeatable.")
@click.option("-w", "--workload", multiple=True, metavar="NAME", help="What to run [single, chat]; repeatable; or all.")
@click.option("--concurrency", type=Counts(), default=(), metavar="N,N,…", help="Clients of chat and mixed.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="R", help="Open loop: requests a second.")
@click.option("--requests", type=click.IntRange(1, 100_000), metavar="N", help="Requests a round, of chat and mixed.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, metavar="N", help="Rounds that count [3].")
@click.option("--warmup", type=click.IntRange(0, 100), default=1, metavar="N", help="Rounds before them [1].")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="A limit for every answer.")
@click.option("--seed", type=int, metavar="N", help="Same seed, same requests [random, printed].")
@click.option("--ignore-eos", is_flag=True, help="Go on to the full length; ours and llama.cpp.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=600.0, metavar="S", help="Per request [600].")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it, .svg or .png.")
@options.engine_options
@click.option(
    "--json", "json_to", is_flag=False, flag_value=STDOUT, metavar="[FILE.json]", help="Print JSON, or write it."
)
def bench(model: str | None, json_to: str | None, **opts: Any) -> None:
    """Measure speed under load: MODEL on our own server, which is started and stopped, or the server at --url.

    With --url, MODEL names the files here that its tokens are counted with.
    """
    settings = options.settings_of(ctx=opts["ctx"], dtype=opts["dtype"], kv_bits=opts["kv_bits"])
    if model is None and opts["url"] is None and (model := settings.model) is None:
        raise click.UsageError("name a model, or a running server: mlxinfer bench MODEL, mlxinfer bench --url URL")
    plan = _plan(opts)
    own, others = _addresses(opts)
    _check_files(json_to, opts["plot"])
    report = _run(model, settings, plan, own, others, opts["ignore_eos"])
    if json_to == STDOUT:
        output.emit_json(report)
    else:
        _print(report)
    _save(report, json_to, opts["plot"])
    if not any(one["summary"]["ttft"] for result in report["results"] for one in result["targets"].values()):
        output.say("Error: not one request was answered.")
        click.get_current_context().exit(1)


def _plan(opts: dict[str, Any]) -> Plan:
    from mlxinfer.bench.runner import Plan
    from mlxinfer.bench.workloads import WORKLOADS, workload

    named = [name.strip() for text in opts["workload"] or ("single", "chat") for name in text.split(",")]
    named = list(WORKLOADS) if "all" in named else list(dict.fromkeys(workload(name).name for name in named))
    if opts["concurrency"] and opts["rate"] is not None:
        raise click.UsageError("--concurrency is a closed loop and --rate an open one; choose one")
    fields = {key: opts[key] for key in ("rounds", "warmup", "concurrency", "rate", "requests", "max_tokens")}
    seed = secrets.randbelow(10**6) if opts["seed"] is None else opts["seed"]
    return Plan(tuple(named), seed, timeout_s=opts["timeout"], **fields)


def _addresses(opts: dict[str, Any]) -> tuple[Address | None, list[Address]]:
    from mlxinfer.bench.targets import OURS, check_names, parse_address

    own = parse_address(opts["url"], option="--url") if opts["url"] is not None else None
    others = [parse_address(text, option="--against") for text in opts["against"]]
    check_names([own.name if own else OURS, *(address.name for address in others)])
    return own, others


def _check_files(json_to: str | None, plot: Path | None) -> None:
    """What can't be written is known now, not after an hour."""
    if plot is not None:
        from mlxinfer.bench.plot import check

        check(plot)
    for path in (Path(json_to) if json_to not in (None, STDOUT) else None, plot):
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK)):
            raise InvalidRequestError(f"{str(path)!r:.160} can't be written: no folder of ours to write to")


def _run(
    model: str | None, settings: Settings, plan: Plan, own: Address | None, others: list[Address], ignore_eos: bool
) -> dict[str, Any]:
    from mlxinfer.bench import machine, process, report, runner
    from mlxinfer.bench.targets import OURS, Address, connect
    from mlxinfer.bench.words import Sizer, local_sizer

    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with ExitStack() as stack:
        stack.enter_context(_stopped_by_sigterm())
        server = None
        if own is None:
            assert model is not None
            _fetch(model, settings)
        sizer = local_sizer(model, settings) if model else Sizer()
        here, speed = machine.machine(), machine.bandwidth()
        if own is None:
            assert model is not None
            output.say(f"Starting a server with {model} …", dim=True)
            server = stack.enter_context(process.OwnServer(model, _serve_flags(settings)))
            own = Address(OURS, server.url, None)
        wait = {"ignore_eos": ignore_eos, "timeout_s": plan.timeout_s}
        key = os.environ.get("MLXINFER_API_KEY")
        targets = [connect(own, headers={"authorization": f"Bearer {key}"} if key else None, **wait)]
        targets += [connect(address, **wait) for address in others]
        for target in targets:
            _look_at(target)
        targets[0].server = server
        output.say(f"Seed {plan.seed}; prompt lengths by {sizer.how}.", dim=True)
        measured = runner.run(plan, targets, sizer, lambda line: output.say(line, dim=True))
        sizes = functools.partial(machine.model_bytes, model, settings) if model and targets[0].ours else None
        return report.build(
            plan,
            targets,
            measured,
            sizer,
            machine=here,
            bandwidth=machine.faster(speed, machine.bandwidth()),
            started=started,
            flags=_flags(settings),
            **({"size_at": sizes} if sizes else {}),
        )


def _fetch(model: str, settings: Settings) -> None:
    """What is wrong with the name is said here, and what is missing fetched with a bar, before a server is started."""
    from mlxinfer import zoo

    checks.check_generates(model)
    checks.check_fits(model, settings)
    with progress.reporting() as report:
        zoo.resolve(model, settings, progress=report)


def _serve_flags(settings: Settings) -> list[str]:
    """Options of `serve`; the rest of the settings reaches the child as it reached us."""
    flags = ["--dtype", settings.dtype, *(["--kv-bits", str(settings.kv_bits)] if settings.kv_bits else [])]
    return flags if settings.context_length is None else [*flags, "--ctx", str(settings.context_length)]


def _flags(settings: Settings) -> dict[str, Any]:
    from mlxinfer.config import as_dict

    return {key: value for key, value in as_dict(settings).items() if key not in ("host", "port", "model", "cache_dir")}


def _look_at(target: Target) -> None:
    from mlxinfer.bench.process import find_pid

    target.pid = find_pid(target.endpoint.url)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does, so that the server we started goes too."""
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _print(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mlxinfer.bench.table import notes, rows

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    for line in _about(report):
        console.print(Text(output.printable(line)))
    for result in report["results"]:
        header, body = rows(result)
        table = Table(box=SIMPLE_HEAD, title=Text(result["about"]), title_justify="left")
        for i, name in enumerate(header):
            table.add_column(Text(output.printable(name)), justify="right" if i else "left")
        for row in body:
            table.add_row(*(Text(output.printable(cell)) for cell in row))
        console.print(table)
        for note in notes(result):
            console.print(Text(f"  {output.printable(note)}"))


def _about(report: dict[str, Any]) -> list[str]:
    """The lines above the tables: what ran on what."""
    here, speed, plan = report["machine"], report["bandwidth"], report["plan"]
    lines = [
        f"{here['device']}, {here['cores']} cores, {here['memory_bytes'] / 1e9:.1f} GB, {here['os']}; "
        f"{speed['gb_s']:.1f} GB/s ({speed['source']})",
        f"seed {plan['seed']}, {plan['rounds']} rounds after {plan['warmup']} to warm up, temperature 0",
    ]
    for target in report["targets"]:
        says = ", ".join(str(v) for k, v in target["says"].items() if k not in ("meta", "root"))
        lines.append(f"{target['name']}: {target['model']} at {target['url']} ({says or 'says nothing of itself'})")
    if size := report["model"]:
        lines.append(f"{size['model']}: {size['architecture']}, {size['quantization']}, in memory {size['loaded_as']}")
    return lines


def _save(report: dict[str, Any], json_to: str | None, plot: Path | None) -> None:
    try:
        if json_to not in (None, STDOUT):
            from mlxinfer.bench.report import write

            write(report, Path(json_to))
            output.say(f"Wrote {json_to}", dim=True)
        if plot is not None:
            from mlxinfer.bench.plot import draw

            draw(report, plot)
            output.say(f"Wrote {plot}", dim=True)
    except OSError as error:
        raise click.ClickException(f"the report can't be written: {error}") from error
