"""`mlxinfer lora`: train adapters, see what they do, and take them elsewhere."""

from __future__ import annotations

import importlib

import click

VERBS = {
    "train": ("mlxinfer.cli.lora_train:train", "Train an adapter on rows of data."),
    "eval": ("mlxinfer.cli.lora_eval:evaluate", "Loss and perplexity on rows, with an adapter and without."),
}
"""Verb → (module:attribute, the line in the help)."""


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


@click.group(cls=_Group)
def lora() -> None:
    """Fine-tune a model with low-rank adapters, and use them."""
