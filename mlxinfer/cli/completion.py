"""`mlxinfer completion`: click's own completion script."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mlxinfer.cli import options, output

SHELLS = ("bash", "zsh", "fish")
WHERE = {
    "bash": '~/.bashrc:  eval "$(mlxinfer completion bash)"',
    "zsh": '~/.zshrc:  eval "$(mlxinfer completion zsh)"',
    "fish": "~/.config/fish/completions/mlxinfer.fish:  the output of mlxinfer completion fish",
}


@click.command(
    "completion",
    epilog=options.example(
        'eval "$(mlxinfer completion zsh)"        # in ~/.zshrc',
        'eval "$(mlxinfer completion bash)"       # in ~/.bashrc',
        "mlxinfer completion fish > ~/.config/fish/completions/mlxinfer.fish",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@options.json_option
def completion(shell: str | None, as_json: bool) -> None:
    """Print the completion script of SHELL (by default that of $SHELL)."""
    from click.shell_completion import get_completion_class

    from mlxinfer.cli.group import cli

    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise click.UsageError(f"name the shell: {', '.join(SHELLS)} ($SHELL is {name or 'not set'})")
    kind = get_completion_class(name)
    assert kind is not None, f"click does not know {name}"
    script = kind(cli, {}, "mlxinfer", "_MLXINFER_COMPLETE").source()
    if as_json:
        output.emit_json({"shell": name, "script": script, "where": WHERE[name]})
    else:
        click.echo(script)
