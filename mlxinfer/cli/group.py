"""The root command: a table of verbs that are imported when they are run, and the one place that ends the process."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mlxinfer import __version__
from mlxinfer.cli import INTERRUPTED, output, process
from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERBS = {
    "run": ("mlxinfer.cli.run:run", "Chat with a model, or ask it one thing."),
    "app": ("mlxinfer.cli.app:app", "Chat in a window, or in the browser."),
    "serve": ("mlxinfer.cli.serve:serve", "Serve models over HTTP: OpenAI's, Anthropic's, Ollama's API."),
    "ps": ("mlxinfer.cli.ps:ps", "List the servers that run on this machine."),
    "stop": ("mlxinfer.cli.stop:stop", "Stop a server, after its requests have ended."),
    "pull": ("mlxinfer.cli.pull:pull", "Download a model."),
    "ls": ("mlxinfer.cli.ls:ls", "List the models on this machine."),
    "show": ("mlxinfer.cli.show:show", "Say what a model is."),
    "rm": ("mlxinfer.cli.rm:rm", "Delete a model's files."),
    "convert": ("mlxinfer.cli.convert:convert", "Make an MLX model out of a published checkpoint."),
    "fit": ("mlxinfer.cli.fit:fit", "Say whether a model fits this machine, and how fast it will be."),
    "export": ("mlxinfer.cli.export:export", "Write a model for transformers or llama.cpp."),
    "lora": ("mlxinfer.cli.lora:lora", "Train adapters, and take them elsewhere."),
    "cluster": ("mlxinfer.cli.cluster:cluster", "Run one model over several machines."),
    "chats": ("mlxinfer.cli.chats:chats", "The conversations on this machine."),
    "config": ("mlxinfer.cli.config:config", "Read and write the settings."),
    "bench": ("mlxinfer.cli.bench:bench", "Measure speed under load, alone or against other servers."),
    "doctor": ("mlxinfer.cli.doctor:doctor", "Check this machine and say how to mend what is wrong."),
    "completion": ("mlxinfer.cli.completion:completion", "Print a shell completion script."),
}
"""Verb → (module:attribute, the line in `mlxinfer --help`)."""


class LazyGroup(click.Group):
    """A click group whose commands are imported on use, so that `--help` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{VERBS[cmd_name][0]} is not a command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"no such command {args[0]!r}{output.did_you_mean(args[0], VERBS)}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """--json belongs to the verb; before it, it is taken all the same."""
        leading = 0
        while args[leading : leading + 1] == ["--json"]:
            leading += 1
        if leading and args[leading:] == []:
            raise click.UsageError("--json needs a verb: mlxinfer VERB --json", ctx=ctx)
        rest = args[leading:]
        return super().parse_args(ctx, [rest[0], "--json", *rest[1:]] if leading and rest[0] in VERBS else rest)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _reader_may_leave():  # --help and --version print here
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run and, in standalone mode, end the process with the exit code that fits."""
        arguments = list(sys.argv[1:] if args is None else args)
        rest: dict[str, Any] = {"complete_var": complete_var, "windows_expand_args": windows_expand_args, **extra}
        if not standalone_mode:
            return super().main(arguments, prog_name, standalone_mode=False, **rest)
        process.prepare_streams()
        try:
            with _errors_end_the_process(as_json=output.wants_json(arguments)):
                code = super().main(arguments, prog_name or "mlxinfer", standalone_mode=False, **rest)
                sys.stdout.flush()
                # A verb returns nothing; click returns the code of ctx.exit().
                sys.exit(code if isinstance(code, int) else 0)
        except SystemExit as ending:
            process.end(ending.code if isinstance(ending.code, int) else 0)
        except process.OutputError as failure:
            process.discard(sys.stdout)
            output.say(f"Error: cannot write the output: {failure.strerror}")
            process.end(1)


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`mlxinfer ls | head -1`: the reader has what it wanted."""
    try:
        yield
    except BrokenPipeError:
        process.discard(sys.stdout)
        raise click.exceptions.Exit(0) from None


@contextlib.contextmanager
def _errors_end_the_process(*, as_json: bool) -> Iterator[None]:
    """Map every expected error to a message and an exit code. What is left over is our bug and keeps its traceback."""
    try:
        yield
    except click.Abort:
        _end(INTERRUPTED, "interrupted", "interrupted", as_json=as_json, quiet=True)
    except click.ClickException as error:
        if not as_json:
            with output.stderr_may_fail():
                error.show()
            sys.exit(error.exit_code)
        code = "usage" if isinstance(error, click.UsageError) else "failure"
        _end(error.exit_code, code, error.format_message(), as_json=True)
    except MlxinferError as error:
        _end(error.exit_code, error.code, str(error), as_json=as_json)


def _end(exit_code: int, code: str, message: str, *, as_json: bool, quiet: bool = False) -> NoReturn:
    if as_json:
        output.emit_json({"error": {"code": code, "message": message}})
    elif not quiet:
        output.say(f"Error: {message}")
    sys.exit(exit_code)


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n"
    '  mlxinfer run smollm2-135m "What is the capital of France?"\n'
    "  mlxinfer serve smollm2-135m\n"
    "  mlxinfer doctor\n\n"
    "Exit codes: 0 ok, 1 failure, 2 usage, 3 not found or offline, 4 won't fit, 130 Ctrl-C.",
)
@click.version_option(__version__, prog_name="mlxinfer")
def cli() -> None:
    """Run language models on this machine.

    Every command takes --json. Settings: flag > MLXINFER_* > ~/.config/mlxinfer/config.toml > default.
    """
