"""`mlxinfer config`: read and write the settings file."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

from mlxinfer.cli import options, output
from mlxinfer.cli.subverbs import Subverbs
from mlxinfer.config import ENV_PREFIX, Settings, as_dict, config_path, load_settings, source_of
from mlxinfer.errors import InvalidRequestError
from mlxinfer.formats.files import replace_file

config = Subverbs(
    "config",
    {
        "get": ("mlxinfer.cli.config:get", "Say what a setting is and what set it."),
        "set": ("mlxinfer.cli.config:set_", "Write a setting into the file."),
        "path": ("mlxinfer.cli.config:path", "Print the file's path."),
    },
    help="The settings of this user.",
    epilog=options.example("mlxinfer config get", "mlxinfer config set model smollm2-135m", "mlxinfer config path"),
)


def _keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Those that begin so, for a shell."""
    return [field.name for field in dataclasses.fields(Settings) if field.name.startswith(incomplete)]


@click.command("path", epilog=options.example("mlxinfer config path"))
@options.json_option
def path(as_json: bool) -> None:
    """Print the path of config.toml, whether it is there or not."""
    file = config_path()
    if as_json:
        output.emit_json({"path": str(file), "exists": file.is_file()})
    else:
        click.echo(str(file))


@click.command("get", epilog=options.example("mlxinfer config get", "mlxinfer config get model"))
@click.argument("key", required=False, shell_complete=_keys)
@options.json_option
def get(key: str | None, as_json: bool) -> None:
    """Say what KEY is and what set it; all of them without KEY."""
    values = as_dict(load_settings())
    if key is not None:
        _check_key(key)
        values = {key: values[key]}
    if as_json:
        output.emit_json({name: {"value": value, "from": source_of(name)} for name, value in values.items()})
        return
    rows = [(name, _shown(value), source_of(name) or "default") for name, value in values.items()]
    click.echo(rows[0][1] if key is not None else output.columns(("KEY", "VALUE", "FROM"), rows))


@click.command("set", epilog=options.example("mlxinfer config set port 9000", "mlxinfer config set model --unset"))
@click.argument("key", shell_complete=_keys)
@click.argument("value", required=False)
@click.option("--unset", is_flag=True, help="Take KEY out of the file.")
@options.json_option
def set_(key: str, value: str | None, unset: bool, as_json: bool) -> None:
    """Write KEY = VALUE into config.toml. Comments and other keys stay; a value that is wrong is refused."""
    if unset == (value is not None):
        raise click.UsageError("a VALUE or --unset is expected")
    _check_key(key)
    file = config_path()
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    new = _with(text, key, None if value is None else _toml(key, value))
    _check_text(new, file)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, new.encode())
    if overriding := [f"MLXINFER_{key.upper()}"] if f"MLXINFER_{key.upper()}" in os.environ else []:
        output.say(f"{overriding[0]} is set in the environment and wins over the file.")
    if as_json:
        output.emit_json({"path": str(file)})
    else:
        output.say(f"Wrote {file}.", dim=True)


def _check_key(key: str) -> None:
    known = as_dict(Settings())
    if key not in known:
        raise InvalidRequestError(f"there is no setting {key!r:.80}{output.did_you_mean(key, known)}", param=key[:80])


def _toml(key: str, value: str) -> str:
    """As the file holds it, by the kind that the setting has."""
    # As from the environment: text that says a number, a list with commas.
    made: Any = as_dict(load_settings(environ={f"{ENV_PREFIX}{key.upper()}": value}, path=Path(os.devnull)))[key]
    return json.dumps(list(made) if isinstance(made, tuple) else made, ensure_ascii=False)


def _with(text: str, key: str, value: str | None) -> str:
    """The file's text with one key changed, added or taken out, whatever else stands in it."""
    import tomlkit
    from tomlkit.exceptions import ParseError

    try:
        document = tomlkit.parse(text)
    except ParseError as error:
        raise InvalidRequestError(f"{config_path()} is no TOML: {error}; mend it first", param="config") from error
    if value is None:
        document.pop(key, None)
    else:
        document[key] = tomlkit.parse(f"value = {value}")["value"]
    return tomlkit.dumps(document)


def _check_text(text: str, file: Path) -> None:
    """What is about to be written can be read again. Raises InvalidRequestError."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / file.name
        trial.write_text(text, encoding="utf-8")
        load_settings(environ={}, path=trial)


def _shown(value: Any) -> str:
    if value in (None, (), []):
        return "none"
    return output.printable(", ".join(value) if isinstance(value, list | tuple) else str(value))
