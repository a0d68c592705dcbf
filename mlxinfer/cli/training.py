"""What the verbs of `mlxinfer lora` share: flags made from declared options, how a run is shown, its group of ranks."""

from __future__ import annotations

import os
import sys
import time
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mlxinfer.cli import converted, output, progress
from mlxinfer.cli import options as options_of_verbs
from mlxinfer.lora.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import mlx.core as mx

    from mlxinfer.config import Settings
    from mlxinfer.lora.base import Base
    from mlxinfer.lora.callbacks import Record
    from mlxinfer.lora.data import Dataset
    from mlxinfer.lora.options import Option

LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
"""What launchers of several ranks set."""
PLAIN_INTERVAL = 5.0
"""Seconds between two plain lines."""


def flags(options: Mapping[str, Option]) -> Callable[[Any], Any]:
    """A click option for each; one that isn't given is None."""

    def decorate(command: Any) -> Any:
        for option in reversed(list(options.values())):
            command = _flag(option)(command)
        return command

    return decorate


def _flag(option: Option) -> Callable[[Any], Any]:
    name, kind, text = f"--{option.name.replace('_', '-')}", option.plain, option.help
    shown = option.default
    if shown not in (None, (), "") and not text.endswith("]."):
        shown = {True: "on", False: "off"}.get(shown, shown) if isinstance(shown, bool) else shown
        text = f"{text[:-1]} [{shown:g}]." if isinstance(shown, float) else f"{text[:-1]} [{shown}]."
    if kind is bool:
        return click.option(f"{name}/--no-{name[2:]}", option.name, default=None, help=text)
    if typing.get_origin(kind) is Literal:
        return click.option(name, type=click.Choice(typing.get_args(kind)), help=text)
    if typing.get_origin(kind) is tuple:
        return click.option(name, option.name, multiple=True, metavar="TEXT", help=f"{text[:-1]}; may be repeated.")
    metavar = {int: "N", float: "X"}.get(kind, "TEXT")
    return click.option(name, type=kind, metavar=metavar, help=text)


def between_folders(command: Any) -> Any:
    """MODEL ADAPTER DST: what an adapter's way to somewhere else is named by."""
    command = click.argument("destination", type=click.Path(path_type=Path), metavar="DST")(command)
    command = click.argument("adapter", type=click.Path(path_type=Path))(command)
    return click.argument("model", type=options_of_verbs.InstalledName())(command)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def base_of(settings: Settings) -> Callable[[str], Base]:
    """Finds a base by name: fetched, and converted once where mlx-lm can't load it as it is."""
    from mlxinfer import zoo
    from mlxinfer.lora.base import open_base

    def find(name: str) -> Base:
        with progress.reporting() as report:
            files = zoo.resolve(name, settings, progress=report)
            return open_base(converted.loadable(files, settings, report))

    return find


def group_of_ranks() -> mx.distributed.Group | None:
    """The ranks that a launcher started this process among; None for a process of its own."""
    if not any(name in os.environ for name in LAUNCHED):
        return None
    import mlx.core as mx

    return mx.distributed.init()


def say_rows(datasets: list[Dataset]) -> None:
    """What became of the rows, and why some were dropped."""
    for dataset in datasets:
        output.say(f"Data: {dataset.summary()}", dim=True)
        for row in dataset.dropped[:5]:
            output.say(f"  dropped {row.where}: {row.reason}", dim=True)
        if len(dataset.dropped) > 5:
            output.say(f"  … and {len(dataset.dropped) - 5:,} more", dim=True)


def line(record: Record, total: int) -> str:
    """For example "12/100  loss 1.234  lr 1.0e-04  512 tok/s  3.1 GB"."""
    from mlxinfer.zoo.files import human_bytes

    if record["kind"] == "evaluation":
        perplexity = f", perplexity {record['perplexity']:.4g}" if "perplexity" in record else ""
        return f"{record['update']}/{total}  evaluation: loss {record['loss']:.4f}{perplexity}"
    if record["kind"] == "sample":
        return f"{record['update']}/{total}  sample: {output.printable(record['prompt'] + record['text'])}"
    return (
        f"{record['update']}/{total}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2g}  "
        f"{record['tokens_per_second']:,.0f} tok/s  {human_bytes(record['peak_memory_bytes'])}"
    )


class PlainLog(Callback):
    """A line now and then, where there is no terminal; evaluations and samples always."""

    def __init__(self) -> None:
        self._total, self._last, self._begun, self._first = 0, -PLAIN_INTERVAL, 0.0, 0

    def on_begin(self, total_updates: int, config: Mapping[str, Any]) -> None:
        self._total, self._begun = total_updates, time.monotonic()

    def on_record(self, record: Record) -> None:
        from mlxinfer.zoo.files import human_seconds

        now, update = time.monotonic(), record["update"]
        self._first = self._first or update
        if record["kind"] == "update" and now - self._last < PLAIN_INTERVAL and update != self._total:
            return
        self._last = now
        done = update - self._first + 1
        left = (now - self._begun) / done * (self._total - update)
        output.say(line(record, self._total) + (f"  {human_seconds(left)} left" if update < self._total else ""))

    def on_checkpoint(self, path: Path) -> None:
        output.say(f"Saved {path}", dim=True)


class BarLog(Callback):
    """A bar with the last figures; evaluations and samples above it."""

    def on_begin(self, total_updates: int, config: Mapping[str, Any]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._total = total_updates
        self._bars = Progress(
            BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(), console=Console(file=sys.stderr)
        )
        self._bars.start()
        self._task = self._bars.add_task("", total=total_updates)

    def on_record(self, record: Record) -> None:
        if record["kind"] == "update":
            self._bars.update(self._task, completed=record["update"], description=line(record, self._total))
        else:
            self._bars.console.print(line(record, self._total), markup=False, highlight=False)

    def on_end(self) -> None:
        self._bars.stop()


def shown() -> Callback:
    """How this terminal, or what stands for one, is told."""
    return BarLog() if output.decorates(sys.stderr) else PlainLog()
