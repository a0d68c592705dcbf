"""`mlxinfer run`: one question, a pipe, or a chat in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import loading, options, output, terminal
from mlxinfer.errors import ModelNotFoundError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.app.store import Store
    from mlxinfer.llm import LLM
    from mlxinfer.types import Reply, SamplingParams

MAX_STDIN_BYTES = 64 * 1024 * 1024
MAX_HINT = 80
"""Characters of a command line that is shown as a hint."""


@dataclass(frozen=True, slots=True)
class Words:
    """The positional arguments, told apart."""

    model: str | None
    prompt: str | None
    """None: no prompt among them."""
    stdin: bool
    """A `-` was given: stdin is the prompt, or follows it."""


def tell_apart(words: tuple[str, ...], model: str | None) -> Words:
    """The first word is the model if it has the form of a name (`loading.could_be_model`) and -m names none."""
    rest = list(words)
    if model is None and rest and loading.could_be_model(rest[0]):
        model = rest.pop(0)
    stdin = bool(rest) and rest[-1] == "-"
    if stdin:
        rest.pop()
    return Words(model, " ".join(rest) if rest else None, stdin)


@click.command(
    "run",
    epilog=options.example(
        'mlxinfer run smollm2-135m "What is the capital of France?"',
        "mlxinfer run smollm2-135m                    # chat; /help lists its commands",
        'cat notes.txt | mlxinfer run -m smollm2-135m "Summarise this:" -',
        'mlxinfer run "What is the capital of France?"   # the default model',
    ),
)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT | -]", shell_complete=options.ModelName().shell_complete)
@click.option("-m", "--model", type=options.ModelName(), help="The model; then every argument belongs to the prompt.")
@click.option("-s", "--system", metavar="TEXT", help="The system message.")
@options.sampling_options
@click.option(
    "--adapter",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Use the model with the adapter in this folder.",
)
@click.option(
    "--resume",
    metavar="ID",
    type=options.ConversationId(),
    help="Go on with a conversation of `mlxinfer chats ls`; `last` is the newest.",
)
@click.option("--private", is_flag=True, help="Keep nothing of this chat.")
@click.option("--raw", is_flag=True, help="No chat template: continue the text as it stands.")
@options.engine_options
@click.option("-y", "--yes", is_flag=True, help="With no model named, take the suggested one without asking.")
@click.option("--stats/--no-stats", default=True, help="Speed and token counts on stderr after the answer [on].")
@options.json_option
def run(words: tuple[str, ...], as_json: bool, **opts: Any) -> None:
    """Chat with a model, or ask it one thing.

    The first argument is the MODEL if it looks like a model's name (no white space: an alias, org/name, a path);
    otherwise it belongs to the prompt and the model is the configured one, the suggested one or the demo.
    `-` reads the prompt from stdin, and so does a pipe when no prompt is given.
    """
    told = tell_apart(words, opts["model"])
    params = options.sampling_params(opts)
    settings = options.settings_of(ctx=opts["ctx"], dtype=opts["dtype"], kv_bits=opts["kv_bits"])
    _check_text("--system", opts["system"])
    chat = told.prompt is None and not told.stdin and sys.stdin.isatty()
    hint = _as_prompt(words) if told.model is not None and opts["model"] is None else ""
    if told.model is not None:
        # Before the prompt: `mlxinfer run Hello < /dev/null` lacks a model, not a prompt.
        with _hinting(hint):
            loading.check_name(told.model, settings)
    if chat and as_json:
        raise click.UsageError("--json needs a prompt: mlxinfer run MODEL PROMPT --json")
    if chat and not sys.stdout.isatty():
        raise click.UsageError("no prompt, and stdout is not a terminal to chat in: mlxinfer run MODEL PROMPT")
    if not chat and (opts["resume"] or opts["private"]):
        raise click.UsageError("--resume and --private belong to a chat: a single prompt is never kept")
    if opts["resume"] and (opts["private"] or opts["raw"]):
        raise click.UsageError("--resume goes with neither --private nor --raw")
    prompt = "" if chat else _prompt(told, raw=opts["raw"])
    name = told.model or loading.default_model(settings, yes=opts["yes"])
    # What is typed ahead waits for the chat, and does not mix with the bars.
    quiet = terminal.no_echo() if chat else contextlib.nullcontext()
    with _hinting(hint), loading.naming_the_setting(name, given=told.model is not None), quiet:
        llm = loading.load_model(name, settings, opts["adapter"])
    try:
        if chat:
            from mlxinfer.cli import repl

            store = None if opts["private"] else _store(must=opts["resume"] is not None)
            shown = {"raw": opts["raw"], "stats": opts["stats"], "resume": opts["resume"]}
            repl.chat(llm, system=opts["system"], params=params, store=store, **shown)
        else:
            _once(llm, prompt, params, opts, as_json=as_json)
    finally:
        llm.unload()


def _store(*, must: bool) -> Store | None:
    """Where chats are kept; a word where that can't be opened and needn't."""
    from mlxinfer.cli import chats

    try:
        return chats.opened()
    except StoreError as error:
        if must:
            raise
        output.say(f"This conversation is not kept: {error}")
        return None


def _as_prompt(words: tuple[str, ...]) -> str:
    """How to ask all of `words`, the first of which was taken for a model; empty if it is org/name or a path."""
    if "/" in words[0] or words[0].endswith(".gguf"):
        return ""
    text = shlex.join(words)
    return f"mlxinfer run -m MODEL {text if len(text) <= MAX_HINT else text[:MAX_HINT] + '…'}"


@contextlib.contextmanager
def _hinting(hint: str) -> Iterator[None]:
    try:
        yield
    except ModelNotFoundError as error:
        if not hint:
            raise
        raise ModelNotFoundError(f"{error}\nIf it is the prompt: {hint}") from error


def _prompt(told: Words, *, raw: bool) -> str:
    """The prompt of a one-shot run: the words, then stdin after a blank line."""
    _check_text("the prompt", told.prompt)
    if told.prompt is not None and not told.stdin:
        text = told.prompt
    else:
        piped = read_stdin()
        # A shell's `echo` ends with a newline that nobody means; --raw is byte for byte.
        piped = piped if raw else piped.removesuffix("\n").removesuffix("\r")
        text = piped if told.prompt is None else f"{told.prompt}\n\n{piped}"
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    return text


def read_stdin() -> str:
    """All of stdin as text. Raises UsageError for what is not UTF-8 or beyond 64 MiB."""
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise click.UsageError(f"stdin is longer than {MAX_STDIN_BYTES // 2**20} MiB; no context holds that")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise click.UsageError(
            f"stdin is not valid UTF-8: byte 0x{bad:02x} at offset {error.start}; convert it, for example with iconv"
        ) from None


def _check_text(what: str, text: str | None) -> None:
    """An argument that is not UTF-8 arrives as lone surrogates."""
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{what} is not valid UTF-8 at character {error.start}") from None


def _once(llm: LLM, prompt: str, params: SamplingParams, opts: dict[str, Any], *, as_json: bool) -> None:
    raw = opts["raw"] or not llm.info.has_chat_template
    if raw and not opts["raw"]:
        output.say(f"{llm.info.name} has no chat template: continuing the text as it stands (--raw).", dim=True)
    if raw and opts["system"]:
        raise click.UsageError("--system needs a chat template; without one, put the text into the prompt")
    with llm.stream(prompt, raw=raw, system=opts["system"], params=params) as stream:
        wrote = ""
        for piece in stream:
            if not as_json:
                wrote = write_piece(piece) or wrote
        reply = stream.reply
    if as_json:
        output.emit_json(reply_json(reply))
        return
    if wrote[-1:] != "\n":
        click.echo()
    if opts["stats"]:
        output.say(reply.stats, dim=True)


def write_piece(piece: str) -> str:
    """Write a piece of a reply at once; a terminal gets it without control characters. Returns what was written."""
    text = output.printable(piece) if sys.stdout.isatty() else piece
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


def reply_json(reply: Reply) -> dict[str, Any]:
    """A reply as `run --json` prints it."""
    return {
        "model": reply.model,
        "text": str(reply),
        "finish_reason": reply.finish_reason,
        "usage": dataclasses.asdict(reply.usage) | {"total_tokens": reply.usage.total_tokens},
        "timings": dataclasses.asdict(reply.timings),
    }
