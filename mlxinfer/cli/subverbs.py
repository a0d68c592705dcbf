"""Verbs below a verb, imported when they are run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import click

from mlxinfer.cli import output

if TYPE_CHECKING:
    from collections.abc import Mapping


class Subverbs(click.Group):
    """A group of (module:attribute, the line in the help) by name."""

    def __init__(self, name: str, verbs: Mapping[str, tuple[str, str]], help: str, epilog: str) -> None:
        super().__init__(name, help=help, epilog=epilog, no_args_is_help=True)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            if ctx.resilient_parsing:  # a shell asks what could follow; nothing
                return None
            raise click.UsageError(f"no such command {cmd_name!r}{output.did_you_mean(cmd_name, self._verbs)}", ctx=ctx)
        module, _, attribute = self._verbs[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{self._verbs[cmd_name][0]} is not a command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in self._verbs.items()])
