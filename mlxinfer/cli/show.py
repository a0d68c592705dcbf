"""`mlxinfer show`: what a model is, from its files' headers and the catalogue; nothing is loaded or fetched."""

from __future__ import annotations

from typing import Any

import click

from mlxinfer.cli import checks, options, output
from mlxinfer.cli.ls import entry_json
from mlxinfer.errors import OfflineError


@click.command("show", epilog=options.example("mlxinfer show smollm2-135m", "mlxinfer show ./my-model --json"))
@options.model_argument
@options.json_option
def show(model: str, as_json: bool) -> None:
    """Say what MODEL is: architecture, size, context, quantization, licence, and where its files are."""
    from mlxinfer import zoo
    from mlxinfer.zoo.cards import card_of

    entry = checks.entry_of(model)
    try:
        card = card_of(zoo.resolve(model, options.settings_of(), fetch=False)).as_dict()
    except OfflineError:
        if entry is None:
            raise
        card = None
    catalog = entry_json(entry) if entry else None
    if as_json:
        output.emit_json({"name": model, "installed": card is not None, "model": card, "catalog": catalog})
        return
    click.echo(output.pairs(_rows(model, card or {}, catalog or {})))
    if use := checks.no_text(entry):
        output.say(f"{model} {use}.", dim=True)
    if card is None:
        output.say(f"Not on this machine. Get it: mlxinfer pull {model}", dim=True)


def _rows(name: str, card: dict[str, Any], catalog: dict[str, Any]) -> list[tuple[str, object]]:
    """The card's facts, the catalogue's where the files don't say."""
    from mlxinfer.zoo.files import human_bytes

    def known(key: str) -> Any:
        return card.get(key) or catalog.get(key) or None

    parameters, size, context = known("parameters"), known("size_bytes"), known("context_length")
    files = card.get("files", ())
    return [
        ("name", name),
        ("family", known("family")),
        ("architecture", known("architecture")),
        ("parameters", f"{parameters:,}" if parameters else None),
        ("size", human_bytes(size) if size else None),
        ("quantization", known("quantization")),
        ("context", f"{context} tokens" if context else None),
        ("can", ", ".join(known("capabilities") or ()) or None),
        ("licence", known("licence")),
        ("sources", ", ".join(known("sources") or ()) or None),
        ("from", known("origin")),
        ("path", known("path")),
        ("files", ", ".join(f"{file} ({human_bytes(count)})" for file, count in files) if len(files) > 1 else None),
    ]
