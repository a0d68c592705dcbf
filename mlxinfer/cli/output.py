"""What the verbs print with: data to stdout, messages to stderr, and text that may not steer the terminal."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import process

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# C0 without tab and newline, DEL and C1: what a model (or a file name) could move a cursor or set a title with.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def say(message: str, *, dim: bool = False) -> None:
    """One message to stderr. Where stderr cannot be written, the answer on stdout is still worth having."""
    with stderr_may_fail():
        click.echo(style(printable(message), dim=True, to=sys.stderr) if dim else printable(message), err=True)


@contextlib.contextmanager
def stderr_may_fail() -> Iterator[None]:
    """A stderr that is full, or whose reader has left, is written to no more."""
    try:
        yield
    except OSError:
        process.discard(sys.stderr)


def emit_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json was given; asked before parsing, because a parse error has to be JSON too."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in before


def printable(text: str) -> str:
    """`text` without the control characters a terminal would obey. Carriage returns of CRLF vanish."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def style(text: str, *, to: Any, **styles: Any) -> str:
    """Colour for a terminal that wants it, the bare text elsewhere."""
    return click.style(text, **styles) if decorates(to) else text


def decorates(stream: Any) -> bool:
    """Whether colour and bars may go there: a terminal, and neither NO_COLOR nor TERM=dumb."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns; nothing is cut, so that a pipe gets whole names."""
    table = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def pairs(items: Iterable[tuple[str, object]]) -> str:
    """`key  value` lines; a value of None is left out."""
    kept = [(key, printable(str(value))) for key, value in items if value is not None]
    width = max((len(key) for key, _ in kept), default=0)
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in kept)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
