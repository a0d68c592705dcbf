"""Every command's help ends with examples, and each of them is a command line that this program takes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click
import pytest

from mlxinfer.cli.group import cli

if TYPE_CHECKING:
    from collections.abc import Iterator


def tree(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """The names that lead to every command, groups included, at any depth."""
    if path:
        yield path
    if isinstance(command, click.Group):
        with click.Context(command) as ctx:
            for name in command.list_commands(ctx):
                below = command.get_command(ctx, name)
                assert below is not None
                yield from tree(below, *path, name)


PATHS = list(tree(cli))


def examples(command: click.Command) -> list[str]:
    """Example lines that are this program's, each with what goes on in the next line after a backslash."""
    _, _, text = (command.epilog or "").partition("Examples:\n")
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("mlxinfer ")]


def find(path: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        below = command.get_command(click.Context(command), name)
        assert below is not None
        command = below
    return command


def test_the_walk_finds_verbs_below_verbs() -> None:
    assert {("serve",), ("lora", "train"), ("chats", "rm"), ("config", "path")} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_an_example_of_the_command_itself(path: tuple[str, ...]) -> None:
    own = " ".join(("mlxinfer", *path))
    _, heading, below = find(path).get_help(click.Context(find(path), info_name=own)).partition("Examples:")
    assert heading
    assert own in below


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_each_example_is_a_command_line_that_is_taken(path: tuple[str, ...]) -> None:
    for line in examples(find(path)):
        words = shlex.split(line, comments=True)[1:]
        for cut in ("|", ">", "<", "&&"):
            words = words[: words.index(cut)] if cut in words else words
        _takes(cli, words, line)


def _takes(command: click.Command, words: list[str], line: str) -> None:
    """Resolves verbs and parses options; files and models need not be there."""
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        assert words, f"{line}: a verb is missing"
        below = command.get_command(ctx, words[0])
        assert below is not None, line
        _takes(below, words[1:], line)
        return
    ctx = click.Context(command, info_name=command.name, **command.context_settings)
    command.make_parser(ctx).parse_args(args=list(words))
