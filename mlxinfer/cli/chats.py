"""`mlxinfer chats`: the conversations that the app and the terminal keep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxinfer.cli import options, output
from mlxinfer.cli.subverbs import Subverbs
from mlxinfer.errors import InvalidRequestError
from mlxinfer.formats.files import replace_file

if TYPE_CHECKING:
    from mlxinfer.app.store import Conversation, Store

chats = Subverbs(
    "chats",
    {
        name: (f"mlxinfer.cli.chats:{attribute}", text)
        for name, attribute, text in (
            ("ls", "ls", "List the conversations."),
            ("show", "show", "Print a conversation as Markdown."),
            ("search", "search", "Find a text in titles and messages."),
            ("export", "export", "Write a conversation to a .json or .md file."),
            ("import", "import_", "Read conversations from such files."),
            ("rm", "rm", "Delete a conversation."),
        )
    },
    help="The conversations on this machine.",
    epilog=options.example("mlxinfer chats ls", "mlxinfer chats search Paris", "mlxinfer chats export 3f2a chat.md"),
)
id_argument = click.argument("conversation", metavar="ID", type=options.ConversationId())


def opened() -> Store:
    """The store of this user; says so where a damaged file was set aside."""
    from mlxinfer.app.store import FILE, open_store

    found = open_store(options.settings_of().data_dir / FILE)
    if found.notice:
        output.say(found.notice)
    return found.store


def _json(chat: Conversation) -> dict[str, Any]:
    named = {"id": chat.id, "title": chat.title, "model": chat.model, "created": chat.created, "updated": chat.updated}
    return named | {"pinned": chat.pinned}


def _row(chat: Conversation) -> tuple[str, ...]:
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated))
    title = output.printable(chat.title) or "(no title)"
    return chat.id[: options.ID_SHOWN], day, output.printable(chat.model), f"{'* ' if chat.pinned else ''}{title}"


@click.command("ls", epilog=options.example("mlxinfer chats ls --limit 20"))
@click.option("--limit", type=click.IntRange(1), default=50, help="How many at most [50].")
@click.option("--deleted", is_flag=True, help="Those that were deleted and can be brought back.")
@options.json_option
def ls(limit: int, deleted: bool, as_json: bool) -> None:
    """List the conversations, pinned ones first, then the newest."""
    found = opened().conversations(deleted=deleted, limit=limit)
    if as_json:
        output.emit_json({"conversations": [_json(chat) for chat in found]})
    elif found:
        click.echo(output.columns(("ID", "CHANGED", "MODEL", "TITLE"), map(_row, found)))
    else:
        output.say("There are no conversations yet.", dim=True)


@click.command("show", epilog=options.example("mlxinfer chats show 3f2a"))
@id_argument
@options.json_option
def show(conversation: str, as_json: bool) -> None:
    """Print a conversation: what is shown of it as Markdown, or everything as JSON."""
    from mlxinfer.app.store import exchange

    text = (exchange.to_json if as_json else exchange.to_markdown)(opened(), conversation)
    click.echo(text if as_json else output.printable(text), nl=False)


@click.command("search", epilog=options.example("mlxinfer chats search 'the capital'"))
@click.argument("text")
@click.option("--limit", type=click.IntRange(1), default=20, help="How many at most [20].")
@options.json_option
def search(text: str, limit: int, as_json: bool) -> None:
    """Find TEXT in titles and messages, the newest first."""
    hits = opened().search(text, limit=limit)
    if as_json:
        said = [_json(hit.conversation) | {"message": hit.message, "snippet": hit.snippet} for hit in hits]
        output.emit_json({"hits": said})
        return
    for hit in hits:
        click.echo(f"{'  '.join(_row(hit.conversation))}\n    {output.printable(hit.snippet)}")
    if not hits:
        output.say("Nothing was found.", dim=True)


@click.command("export", epilog=options.example("mlxinfer chats export 3f2a chat.md"))
@id_argument
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--overwrite", is_flag=True, help="Replace FILE.")
@options.json_option
def export(conversation: str, file: Path, overwrite: bool, as_json: bool) -> None:
    """Write a conversation to FILE: .json has every branch, .md the one that is shown."""
    from mlxinfer.app.store import exchange

    write = {".json": exchange.to_json, ".md": exchange.to_markdown}.get(file.suffix)
    if write is None:
        raise InvalidRequestError(f"{file} ends in neither .json nor .md", param="file")
    text = write(opened(), conversation)
    if file.exists() and not overwrite:
        raise InvalidRequestError(f"{file} exists; --overwrite replaces it", param="file")
    try:
        replace_file(file, text.encode())
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be written: {error}", param="file") from error
    if as_json:
        output.emit_json({"path": str(file)})
    else:
        click.echo(str(file))


@click.command("import", epilog=options.example("mlxinfer chats import chat.json"))
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@options.json_option
def import_(files: tuple[Path, ...], as_json: bool) -> None:
    """Read conversations that `export` wrote. Each becomes a new one."""
    from mlxinfer.app.store import exchange

    store, made = opened(), list[Any]()
    for file in files:
        try:
            if file.stat().st_size > exchange.MAX_BYTES:
                raise InvalidRequestError(f"{file} is above {exchange.MAX_BYTES:,} bytes", param="files")
            text = file.read_text(encoding="utf-8")
            read = exchange.from_markdown if file.suffix == ".md" else exchange.from_json
            made.append(read(store, text))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"{file} cannot be read: {error}", param="files") from error
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{file}: {error}", param="files") from error
    if as_json:
        output.emit_json({"conversations": [_json(chat) for chat in made]})
    else:
        click.echo(output.columns(("ID", "CHANGED", "MODEL", "TITLE"), map(_row, made)))


@click.command("rm", epilog=options.example("mlxinfer chats rm 3f2a", "mlxinfer chats rm --undo 3f2a"))
@id_argument
@click.option("--undo", is_flag=True, help="Bring a deleted one back.")
@click.option("--for-good", is_flag=True, help="Remove it from the disk; there is no way back.")
@options.json_option
def rm(conversation: str, undo: bool, for_good: bool, as_json: bool) -> None:
    """Delete a conversation. It can be brought back until it is removed for good."""
    if undo and for_good:
        raise click.UsageError("--undo and --for-good exclude each other")
    store = opened()
    chat = store.conversation(conversation)
    if for_good:
        store.remove(chat.id)
    elif undo:
        store.restore(chat.id)
    else:
        store.delete(chat.id)
    if as_json:
        output.emit_json({"id": chat.id, "deleted": not undo})
    else:
        output.say(f"{chat.id[: options.ID_SHOWN]} {'is back' if undo else 'is deleted'}.")
