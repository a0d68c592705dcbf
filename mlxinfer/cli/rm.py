"""`mlxinfer rm`: delete a model's files."""

from __future__ import annotations

import sys

import click

from mlxinfer.cli import options, output
from mlxinfer.errors import ModelFileError, OfflineError


@click.command("rm", epilog=options.example("mlxinfer rm smollm2-135m", "mlxinfer rm -y mlx-community/Qwen3-0.6B-4bit"))
@click.argument("model", type=options.InstalledName())
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@options.json_option
def rm(model: str, yes: bool, as_json: bool) -> None:
    """Delete MODEL from this machine and say how many bytes that freed."""
    from mlxinfer import zoo
    from mlxinfer.zoo.files import human_bytes

    settings = options.settings_of()
    try:
        files = zoo.resolve(model, settings, fetch=False)
    except (OfflineError, ModelFileError):
        files = None  # not whole: what a download or a crash left is removed all the same
    # What belongs to the user or to another program is refused by zoo.remove; there is nothing to ask.
    ours = files is not None and (files.origin == "hub cache" or files.origin.startswith("package"))
    if files is not None and ours and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"this deletes {files.path}; say -y to do it without being asked")
        if not click.confirm(f"Delete {files.path} ({human_bytes(files.size_bytes)})?", err=True):
            raise click.ClickException("nothing deleted")
    freed = zoo.remove(model, settings)
    if as_json:
        output.emit_json({"name": model, "freed_bytes": freed})
    else:
        click.echo(f"{model}: freed {human_bytes(freed)}")
