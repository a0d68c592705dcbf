"""`mlxinfer fit`: memory and speed of a model on this machine, before anything is downloaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from mlxinfer.cli import checks, options, output

if TYPE_CHECKING:
    from mlxinfer.zoo.fitting import FitReport

WONT_FIT = 4
VERDICTS = {
    "yes": ("yes, it fits", "green"),
    "tight": ("tight: it fits, with little to spare", "yellow"),
    "no": ("no, it does not fit", "red"),
}


@click.command(
    "fit", epilog=options.example("mlxinfer fit smollm2-135m", "mlxinfer fit mlx-community/Qwen3-8B-4bit --ctx 32768")
)
@options.model_argument
@click.option(
    "--ctx", type=click.IntRange(min=1), metavar="N", help="Tokens of context to plan for [8192 or the model's]."
)
@options.json_option
def fit(model: str, ctx: int | None, as_json: bool) -> None:
    """Predict the memory MODEL needs for weights and context, and its speed. Nothing is downloaded.

    Ends with 0 for yes and tight, with 4 for no.
    """
    from mlxinfer import zoo

    report = zoo.fit(model, options.settings_of(), context=ctx)
    if as_json:
        output.emit_json(report.as_dict())
    else:
        _print(report)
        if use := checks.no_text(checks.entry_of(model)):
            output.say(f"{model} {use}.", dim=True)
    if report.verdict == "no":
        click.get_current_context().exit(WONT_FIT)


def _print(report: FitReport) -> None:
    from mlxinfer.zoo.files import human_bytes

    words, colour = VERDICTS[report.verdict]
    click.echo(f"{output.printable(report.name)}: {output.style(words, to=sys.stdout, fg=colour)}")
    speed = f"about {report.tok_s:g} tokens/s" if report.tok_s else None
    rests = f"{report.bandwidth_gb_s:g} GB/s ({report.bandwidth_source}), {report.efficiency:.0%} of it reached"
    rows: list[tuple[str, object]] = [
        ("weights", f"{human_bytes(report.weight_bytes)}, {report.loaded_as}"),
        ("context", f"{human_bytes(report.cache_bytes)} for {report.context} tokens"),
        ("overhead", human_bytes(report.overhead_bytes)),
        ("in all", f"{human_bytes(report.total_bytes)} of {human_bytes(report.budget_bytes)}"),
        ("free now", human_bytes(report.available_bytes)),
        ("longest context", f"{report.max_context} tokens (the model's own: {report.model_context or 'not known'})"),
        ("speed", f"{speed}: {rests}" if speed else None),
    ]
    click.echo(output.pairs((f"  {key}", value) for key, value in rows))
    for line in report.advice:
        click.echo(f"  → {output.printable(line)}")
