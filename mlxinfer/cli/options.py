"""Options that several verbs share, and the settings they resolve to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mlxinfer.config import Settings, load_settings
from mlxinfer.errors import MlxinferError
from mlxinfer.types import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])


class ModelName(click.ParamType):
    """A model: a catalogue alias, a hub id `org/name[@revision]`, a folder or a .gguf file."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from mlxinfer import zoo

        aliases = [entry.alias for entry in zoo.catalog()]
        found = [CompletionItem(alias) for alias in aliases if alias.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


class InstalledName(ModelName):
    """A model that is on this machine."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from mlxinfer import zoo

        try:
            names = dict.fromkeys(files.name for files in zoo.installed(load_settings()))
        except MlxinferError:  # the verb itself says what is wrong; a completion has no place to
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


ID_SHOWN = 8
"""Characters of an id in a list; any beginning that is unique names a conversation."""


class ConversationId(click.ParamType):
    """The beginning of a conversation's id."""

    name = "id"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from mlxinfer.app.store import FILE
        from mlxinfer.app.store.peek import recent
        from mlxinfer.cli import output

        try:
            file = load_settings().data_dir / FILE
        except MlxinferError:
            return []
        found = recent(file, incomplete, deleted=bool(ctx.params.get("undo")))
        length = max(ID_SHOWN, len(incomplete))
        return [CompletionItem(key[:length], help=" ".join(output.printable(title).split())) for key, title in found]


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
model_argument = click.argument("model", type=ModelName())


def example(*lines: str) -> str:
    """The epilog of a verb's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def engine_options(command: F) -> F:
    """--ctx, --dtype and --kv-bits."""
    command = click.option(
        "--kv-bits", type=click.Choice(["8", "4"]), help="Hold keys and values in this many bits: more context fits."
    )(command)
    command = click.option(
        "--dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16"]), help="Compute type [auto]."
    )(command)
    return click.option("--ctx", type=int, metavar="N", help="Context limit in tokens, below the model's own.")(command)


def sampling_options(command: F) -> F:
    """The options that become SamplingParams; None means the model's own default."""
    for option in reversed(
        (
            click.option("--max-tokens", type=int, metavar="N", help="Stop after N new tokens."),
            click.option("-t", "--temperature", type=float, metavar="T", help="0 is greedy."),
            click.option(
                "--top-p", type=float, metavar="P", help="Sample from the likeliest tokens with probability P."
            ),
            click.option("--top-k", type=int, metavar="K", help="Sample from the K likeliest tokens."),
            click.option(
                "--min-p", type=float, metavar="P", help="Drop tokens less likely than P times the likeliest."
            ),
            click.option("--repetition-penalty", type=float, metavar="R", help="Above 1 discourages repetition."),
            click.option("--seed", type=int, metavar="N", help="Same seed, same text."),
            click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; up to four times."),
        )
    ):
        command = option(command)
    return command


SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """SamplingParams of the options; they check themselves and raise InvalidRequestError."""
    return SamplingParams(**{name: values[name] for name in SAMPLING})


def settings_of(*, ctx: int | None = None, dtype: str | None = None, **flags: Any) -> Settings:
    """Flag > MLXINFER_* > config.toml > default."""
    return load_settings({"context_length": ctx, "dtype": dtype, **flags})
