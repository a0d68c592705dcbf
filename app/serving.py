"""The app as a process: opens the conversations, builds the house, serves until it is told to stop, closes it."""

from __future__ import annotations

import contextlib
import functools
import shutil
from typing import TYPE_CHECKING, Any

from mlxinfer.app import door, mount
from mlxinfer.app.comparisons import Comparisons
from mlxinfer.app.library import Library
from mlxinfer.app.page.context import House
from mlxinfer.app.replies import Replies
from mlxinfer.app.store import FILE, open_store
from mlxinfer.errors import StoreError
from mlxinfer.server.run import serve

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping

    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool

DELETED_S = 30 * 86400.0
"""How long a deleted conversation can be brought back."""
GRACE_S = 1.0
"""The page's connections have nothing to finish; replies are stopped and kept by `Replies.close`."""


@contextlib.contextmanager
def opened(pool: ModelPool, settings: Settings) -> Iterator[House]:
    """The house on `pool`; at the end every reply is on disk. Raises StoreError, UnsupportedModelError."""
    try:
        uploads = mount.uploads_folder(settings)
    except OSError as error:
        raise StoreError(f"the folder of uploads below {settings.cache_dir} cannot be made: {error}") from error
    mount.prepare_gradio(uploads)
    found = open_store(settings.data_dir / FILE)
    store, library = found.store, Library(pool, settings)
    replies = Replies(pool, store)
    comparisons = Comparisons(pool, store, replies, library)
    try:
        store.purge(older_than_s=DELETED_S)
        yield House(
            pool=pool,
            store=store,
            replies=replies,
            library=library,
            comparisons=comparisons,
            settings=settings,
            uploads=uploads,
            notice=found.notice,
        )
    finally:
        library.close()
        comparisons.close()
        replies.close()
        store.close()
        shutil.rmtree(uploads, ignore_errors=True)


def serve_house(
    house: House,
    *,
    port: int,
    lang: str | None = None,
    on_started: Callable[[str], None],
    until: threading.Event | None = None,
    access: Mapping[str, Any] | None = None,
) -> int | None:
    """Serve on 127.0.0.1 until a signal, whose number is returned, or `until`. `on_started` gets the private link.

    `access` are further fields of ServerOptions. Raises as `mlxinfer.server.run.serve`.
    """
    key = door.new_key()
    build = functools.partial(mount.with_page, house, key, mount.languages_of(lang))

    def started(host: str, port: int) -> None:
        on_started(f"http://{host}:{port}{door.PATH}/?key={key}")

    options: dict[str, Any] = {"grace_s": GRACE_S, "page": door.PATH, **(access or {})}
    return serve(house.pool, port=port, on_started=started, build=build, until=until, **options)
