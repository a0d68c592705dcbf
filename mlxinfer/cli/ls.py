"""`mlxinfer ls`: the models on this machine, and the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output

if TYPE_CHECKING:
    from mlxinfer.zoo import CatalogEntry, ModelFiles


@click.command("ls", epilog=options.example("mlxinfer ls", "mlxinfer ls --all", "mlxinfer ls --json"))
@click.option("-a", "--all", "everything", is_flag=True, help="The catalogue too: what can be pulled.")
@options.json_option
def ls(everything: bool, as_json: bool) -> None:
    """List the models on this machine: the hub's cache, LM Studio's, Ollama's and llama.cpp's, and our own."""
    from mlxinfer import zoo
    from mlxinfer.zoo.files import human_bytes

    here = zoo.installed(options.settings_of())
    catalog = zoo.catalog() if everything else ()
    if as_json:
        models = [files_json(files) for files in here]
        output.emit_json({"models": models} | ({"catalog": [entry_json(e) for e in catalog]} if everything else {}))
        return
    if here:
        rows = [(f.name, human_bytes(f.size_bytes), f.origin, str(f.path)) for f in here]
        click.echo(output.columns(("NAME", "SIZE", "FROM", "PATH"), rows))
    else:
        output.say(f"No model on this machine yet. Try: mlxinfer pull {zoo.DEMO}")
    if everything:
        rows = [
            (
                e.alias,
                human_bytes(e.size_bytes),
                str(e.context),
                ",".join(e.capabilities),
                e.licence,
                e.hub or "package",
            )
            for e in catalog
        ]
        click.echo(
            ("\n" if here else "") + output.columns(("CATALOGUE", "SIZE", "CONTEXT", "CAN", "LICENCE", "HUB"), rows)
        )


def files_json(files: ModelFiles) -> dict[str, Any]:
    """The files of a model on this machine."""
    return {
        "name": files.name,
        "kind": files.kind,
        "path": str(files.path),
        "origin": files.origin,
        "size_bytes": files.size_bytes,
    }


def entry_json(entry: CatalogEntry) -> dict[str, Any]:
    """A model of the catalogue."""
    return {
        "alias": entry.alias,
        "family": entry.family,
        "parameters": entry.parameters,
        "active_parameters": entry.active_parameters,
        "bits": entry.bits,
        "size_bytes": entry.size_bytes,
        "context_length": entry.context,
        "capabilities": list(entry.capabilities),
        "licence": entry.licence,
        "sources": list(entry.sources),
    }
