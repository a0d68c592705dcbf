"""A model over ranks on this machine, with an engine in front."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.config import Settings
from mlxinfer.distributed import shards
from mlxinfer.distributed.ranks import Here, RankSet, Seat
from mlxinfer.distributed.remote import RemoteRunner
from mlxinfer.engine.engine import Engine, Request
from mlxinfer.engine.governor import Governor
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.start import start_engine
from mlxinfer.engine.worker import mlx_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlxinfer.distributed.ranks import Place

SECRET = "a secret of tests, long enough"
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
}
"""A model that can be split by heads and by layers."""


def parts_of(source: Path, target: Path, kind: Any, size: int, split: Sequence[int] = ()) -> list[Path]:
    """A folder for each rank."""
    return [shards.cut(source, shards.Part(kind, rank, size, tuple(split)), target) for rank in range(size)]


@contextlib.contextmanager
def engine_over(folders: Sequence[Path], places: Sequence[Place] = (), **options: Any) -> Iterator[Engine]:
    """An engine whose model is on as many ranks as there are folders, at `places` if they are given."""
    with _engine(RemoteRunner(lambda _: RankSet(_seats(folders, places), SECRET)), options) as engine:
        yield engine


class Lent:
    """Ranks that are started once and hold one model after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: RankSet | None = None

    @contextlib.contextmanager
    def engine(self, folders: Sequence[Path], adapters: Sequence[Any] = (), **options: Any) -> Iterator[Engine]:
        """An engine whose model is on these ranks. `adapters`: what a RemoteRunner wants to know for them."""
        with _engine(_Keeping(lambda _: self._load(folders), *adapters), options) as engine:
            yield engine

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _load(self, folders: Sequence[Path]) -> RankSet:
        if self._ranks is None or self._ranks.lost:
            self.close()
            self._ranks = RankSet(_seats(folders), SECRET)
        else:
            self._ranks.load([str(folder) for folder in folders])
        return self._ranks


class _Keeping(RemoteRunner):
    """The ranks are another's."""

    def close(self) -> None:
        self._known.clear()


def _seats(folders: Sequence[Path], places: Sequence[Place] = ()) -> list[Seat]:
    where = places or [Here() for _ in folders]
    return [Seat(place, str(folder)) for place, folder in zip(where, folders, strict=True)]


@contextlib.contextmanager
def _engine(runner: RemoteRunner, options: dict[str, Any]) -> Iterator[Engine]:
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


@contextlib.contextmanager
def engine_here(folder: Path) -> Iterator[Engine]:
    """An engine in this process, without a prefix cache."""
    started = start_engine("folder", folder, name="m", source="here", settings=Settings(prefix_cache_mb=0))
    try:
        yield started.engine
    finally:
        started.engine.thread.call(started.engine.close)


def replies(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 16, during: Any = None, **sampling: Any
) -> list[list[int]]:
    """Of requests that run together; `during` is called when each has some tokens."""
    return [tokens for tokens, _ in answers(engine, prompts, tokens, during, **sampling)]


def answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int = 16,
    during: Any = None,
    boundaries: tuple[int, ...] = (),
    adapters: Sequence[str] = (),
    **sampling: Any,
) -> list[tuple[list[int], int]]:
    """As `replies`, each with how many tokens of its prompt were cached. `adapters`: one for each prompt, or none."""
    events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    chosen: dict[str, Any] = {"temperature": 0.0} | sampling
    for i, prompt in enumerate(prompts):
        adapter = adapters[i] if adapters else ""
        spec = RowSpec(f"r{i}-{time.monotonic_ns()}", tuple(prompt), RowSampling(**chosen), i, adapter, adapter=adapter)
        asked = Request(spec, tokens, frozenset(), boundaries=boundaries)
        engine.submit(asked, lambda event, i=i: events.put((i, event)))
    got: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    left = len(prompts)
    while left:
        i, event = events.get(timeout=90)
        assert event.error is None, event.error
        if event.token is not None:
            got[i].append(event.token)
        if event.finished is not None:
            left -= 1
            cached[i] = event.usage.cached_tokens
        if during is not None and all(len(one) > 3 for one in got):
            during()
            during = None
    return list(zip(got, cached, strict=True))
