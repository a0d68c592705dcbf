"""docs/cli.md names every verb, option, chat command, exit code and setting, with the default that holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import pytest

from mlxinfer.cli.chat import COMMANDS, SETTABLE
from mlxinfer.cli.group import VERBS, cli
from mlxinfer.config import ENV_PREFIX, Settings

TEXT = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("field", dataclasses.fields(Settings), ids=lambda field: field.name)
def test_every_setting_is_in_the_table_with_its_variable_and_default(field: dataclasses.Field[object]) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{field.name}` |"))
    assert f"`{ENV_PREFIX}{field.name.upper()}`" in row
    default = field.default
    if default is not None and not isinstance(default, Path):
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        assert f"`{shown}`" in row


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_option_is_described(verb: str) -> None:
    assert f"`{verb}`" in TEXT
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    for param in command.params:
        if isinstance(param, click.Option):
            assert f"`{param.opts[-1]}" in TEXT or f" {param.opts[-1]}" in TEXT, param.opts


def test_every_chat_command_and_parameter_is_described() -> None:
    for name in (*COMMANDS, *SETTABLE):
        assert f"`{name}" in TEXT
