"""`mlxinfer convert`: a published checkpoint in, an MLX model folder out."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output, progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.config import Settings
    from mlxinfer.convert import ConvertOptions, Outcome, Plan, Source
    from mlxinfer.convert.measure import Comparison

REFUSED = 1


@click.command(
    "convert",
    epilog=options.example(
        "mlxinfer convert org/name --bits 4",
        "mlxinfer convert model.gguf ./model-mlx",
        "mlxinfer convert org/name ./out --recipe mixed_4_6 --dry-run",
    ),
)
@options.model_argument
@click.argument("destination", required=False, type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of floats and scales [the source's own]."
)
@click.option("--bits", type=click.IntRange(1), metavar="N", help="Quantize to N bits [as the source is].")
@click.option("--group-size", type=click.IntRange(1), metavar="N", help="Weights that share a scale [64].")
@click.option("--mode", type=click.Choice(["affine", "mxfp4", "mxfp8", "nvfp4"]), help="Kind of packing [affine].")
@click.option("--recipe", metavar="NAME|FILE", help="Bits by layer: a named recipe, or a plan in a .toml file.")
@click.option("--target-bpw", type=float, metavar="BITS", help="Bits per weight in all, most where it hurts most.")
@click.option(
    "--scales", type=click.Choice(["min-max", "search"]), default="min-max", help="How scales are found [min-max]."
)
@click.option("--measure", is_flag=True, help="Compare the result with the source on a small text.")
@click.option(
    "--max-kl", type=float, metavar="NATS", help="Measure, and end with 1 if the mean KL divergence is above."
)
@click.option("--overwrite", is_flag=True, help="Replace DESTINATION if it is a model folder.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@options.json_option
def convert(
    model: str,
    destination: Path | None,
    measure: bool,
    max_kl: float | None,
    dry_run: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Convert MODEL into the folder DESTINATION [./NAME-mlx-BITS], for mlx-lm and for this program.

    The folder appears whole or not at all. The same command goes on where an earlier one was cut off.
    """
    from mlxinfer.convert import open_source
    from mlxinfer.convert import plan as make_plan
    from mlxinfer.convert.choosing import Wanted, default_name, prepare
    from mlxinfer.convert.places import check_place
    from mlxinfer.convert.whole import tokenizer_of

    path = _resolved(model, options.settings_of())
    if destination is not None and not dry_run:
        # Before what may take hours: learning, or measuring which layers are sensitive.
        check_place(path, Path(os.path.abspath(destination)), overwrite=asked["overwrite"])
    comparison = None
    if asked["target_bpw"] is not None:
        output.say("Measuring which matrices lose most: the model reads some text, for minutes …", dim=True)
    with contextlib.closing(open_source(path)) as origin:
        source, chosen = prepare(origin, Wanted(name=Path(model).name, dry_run=dry_run, **asked))
        plan = make_plan(source, chosen)
        if measure or max_kl is not None:
            # Known now, and not after the conversion: there is no text to measure on.
            tokenizer_of(origin)
        destination = destination or Path(default_name(model, plan))
        if dry_run:
            _dry_run(source, plan, destination, chosen, as_json=as_json)
            return
        outcome = _run(source, destination, chosen)
        if measure or max_kl is not None:
            comparison = _measured(origin, outcome, chosen)
    _say(outcome, comparison, destination, as_json=as_json)
    if comparison is not None and max_kl is not None and comparison.exceeds(max_kl):
        output.say(f"The mean KL divergence is {comparison.kl_mean:.5f}, above the limit of {max_kl:g}.")
        click.get_current_context().exit(REFUSED)


def _measured(origin: Source, outcome: Outcome, chosen: ConvertOptions) -> Comparison:
    """Compare both models and write the figures into the report and the card."""
    import functools

    from mlxinfer.convert.report import add_measurement
    from mlxinfer.convert.whole import measured

    output.say("Comparing the result with the source …", dim=True)
    comparison = measured(origin, outcome)
    told = chosen.documents
    add_measurement(outcome, comparison, **(told.keywords if isinstance(told, functools.partial) else {}))
    return comparison


def _say(outcome: Outcome, comparison: Comparison | None, destination: Path, *, as_json: bool) -> None:
    from mlxinfer.convert import report

    if as_json:
        said = _json(outcome) | {"path": str(destination)}
        output.emit_json(said | ({"measured": report.measured(comparison)} if comparison else {}))
        return
    click.echo(str(destination))
    output.say("\n".join(report.lines(outcome, comparison)), dim=True)


def _resolved(model: str, settings: Settings) -> Path:
    """The folder or file of a name. A folder is taken as it is: its reader says what is wrong with it."""
    from mlxinfer import zoo
    from mlxinfer.zoo.names import parse_name

    parsed = parse_name(model)
    if parsed.kind == "path" and parsed.path is not None and os.path.isfile(parsed.path / "config.json"):
        return parsed.path
    with progress.reporting() as report:
        return zoo.resolve(model, settings, progress=report).path


def _run(source: Source, destination: Path, chosen: ConvertOptions) -> Outcome:
    from mlxinfer.convert import convert as convert_source

    with _says_what_is_kept(destination), progress.reporting() as report:
        return convert_source(source, destination, chosen, progress=report)


@contextlib.contextmanager
def _says_what_is_kept(destination: Path) -> Iterator[None]:
    from mlxinfer.convert.places import work_folder

    try:
        yield
    except KeyboardInterrupt:
        kept = work_folder(Path(os.path.abspath(destination)))
        if kept.is_dir():
            output.say(f"Stopped. What is done is kept in {kept}; the same command goes on from there.")
        raise


def _dry_run(source: Source, plan: Plan, destination: Path, chosen: ConvertOptions, *, as_json: bool) -> None:
    from mlxinfer.convert.outcome import outcome_of
    from mlxinfer.convert.places import HEADROOM, free_bytes, problem_with
    from mlxinfer.engine.governor import governor
    from mlxinfer.zoo.files import human_bytes

    target = Path(os.path.abspath(destination))
    free, budget = free_bytes(target.parent), governor().whole
    refused = problem_with(source.path, target, overwrite=chosen.overwrite)
    if refused is None and plan.total_bytes + HEADROOM > free:
        refused = f"{human_bytes(plan.total_bytes)} are needed on the disk and {human_bytes(free)} are free"
    outcome = outcome_of(plan, (), target, source)
    fits = {"disk_free_bytes": free, "memory_bytes": budget, "in_memory": plan.total_bytes <= budget}
    if as_json:
        output.emit_json(_json(outcome) | {"path": str(destination), "refused": refused, "fits": fits})
    else:
        click.echo(_table(outcome))
        output.say(f"{destination}: {_summary(outcome)}")
        if not fits["in_memory"]:
            needed = f"its weights take {human_bytes(plan.total_bytes)}"
            output.say(f"It will not fit this machine's memory: {needed}, and {human_bytes(budget)} can be used.")
        if refused:
            output.say(f"It would be refused: {refused}")
    if refused:
        click.get_current_context().exit(REFUSED)


def _json(outcome: Outcome) -> dict[str, Any]:
    from mlxinfer.convert.outcome import as_dict

    return as_dict(outcome)


def _summary(outcome: Outcome) -> str:
    from mlxinfer.convert.outcome import counts
    from mlxinfer.zoo.files import human_bytes

    handled = counts(outcome)
    shares = ", ".join(
        f"{100 * handled[word] / max(1, outcome.num_weights):.1f} % {word}"
        for word in ("exact", "near", "quantized", "requantized")
        if word in handled
    )
    left = f", {len(outcome.dropped)} tensors left out" if outcome.dropped else ""
    size = f"{human_bytes(outcome.total_bytes)}, {outcome.bits_per_weight:.2f} bits per weight"
    return f"{size}, {outcome.dtype} ({shares}{left})"


def _table(outcome: Outcome) -> str:
    """One line for tensors of different layers that are treated alike."""
    from mlxinfer.convert.quantizing import describe
    from mlxinfer.zoo.files import human_bytes

    rows: dict[tuple[str, ...], list[int]] = {}
    for d in outcome.decisions:
        form = d.dtype if d.packing is None else describe(d.packing)
        shape = "x".join(map(str, d.shape)) or "scalar"
        rows.setdefault((re.sub(r"\.\d+(?=\.)", ".*", d.name), shape, form, d.handling, d.note), []).append(d.nbytes)
    lines = [
        (name, str(len(sizes)), shape, form, human_bytes(sum(sizes)), handling, note)
        for (name, shape, form, handling, note), sizes in rows.items()
    ]
    text = output.columns(("TENSOR", "COUNT", "SHAPE", "BECOMES", "BYTES", "VALUES", "NOTE"), lines)
    dropped = [f"left out: {output.printable(name)} ({output.printable(why)})" for name, why in outcome.dropped.items()]
    return "\n".join([text, *dropped, *(output.printable(note) for note in outcome.notes)])
