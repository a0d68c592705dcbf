"""`mlxinfer pull`: download a model, resume, verify."""

from __future__ import annotations

import click

from mlxinfer.cli import checks, options, output, progress
from mlxinfer.cli.ls import files_json


@click.command(
    "pull", epilog=options.example("mlxinfer pull smollm2-135m", "mlxinfer pull mlx-community/Qwen3-0.6B-4bit")
)
@options.model_argument
@options.json_option
def pull(model: str, as_json: bool) -> None:
    """Download MODEL and print where its files are.

    What is here already is not fetched again; a download that broke off is resumed by the same command.
    """
    from mlxinfer import zoo
    from mlxinfer.zoo.files import human_bytes

    settings = options.settings_of()
    if report_of_fit := checks.too_large(model, settings):
        output.say(f"Warning: {checks.wont_fit(model, report_of_fit)}")
    with progress.reporting() as report:
        files = zoo.pull(model, settings, progress=report)
    if as_json:
        output.emit_json(files_json(files))
        return
    click.echo(str(files.path))
    use = checks.no_text(checks.entry_of(model))
    what = f"{files.name}: {human_bytes(files.size_bytes)}, {files.origin}."
    output.say(f"{what} It {use}." if use else f"{what} Try: mlxinfer run {files.name}", dim=True)
