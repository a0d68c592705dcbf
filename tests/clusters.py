"""A model over ranks on this machine, with an engine in front."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed import shards
from mlxinfer.distributed.ranks import Here, RankSet, Seat
from mlxinfer.distributed.remote import RemoteRunner
from mlxinfer.engine.engine import Engine
from mlxinfer.engine.governor import Governor
from mlxinfer.engine.worker import mlx_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlxinfer.distributed.ranks import Place

SECRET = "a secret of tests, long enough"


def parts_of(source: Path, target: Path, kind: Any, size: int, split: Sequence[int] = ()) -> list[Path]:
    """A folder for each rank."""
    return [shards.cut(source, shards.Part(kind, rank, size, tuple(split)), target) for rank in range(size)]


@contextlib.contextmanager
def engine_over(folders: Sequence[Path], places: Sequence[Place] = (), **options: Any) -> Iterator[Engine]:
    """An engine whose model is on as many ranks as there are folders, at `places` if they are given."""
    where = places or [Here() for _ in folders]
    seats = [Seat(place, str(folder)) for place, folder in zip(where, folders, strict=True)]
    runner = RemoteRunner(lambda _: RankSet(seats, SECRET))
    thread = mlx_thread()

    def make() -> Engine:
        chosen = {"max_num_seqs": 8, "max_queue": 64, "prefill_chunk": 64, "prefix_bytes": 0, **options}
        engine = Engine(thread, runner, memory=Governor(1 << 34), **chosen)  # pyright: ignore[reportArgumentType]
        thread.attach(engine)
        return engine

    engine = thread.call(make)
    try:
        yield engine
    finally:
        thread.call(engine.close)
