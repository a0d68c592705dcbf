"""What the pool keeps of each registered model, and the leases it gives out."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from mlxinfer.encoders import Encoder
    from mlxinfer.errors import MlxinferError
    from mlxinfer.llm import LLM
    from mlxinfer.types import ModelInfo

State = Literal["registered", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One registered model."""

    state: State
    error: str | None
    """Why the last load failed."""
    bytes: int
    """Of its weights in memory; 0 while it isn't loaded."""
    idle_s: float | None
    """Seconds since it was last used; None: never, or it is in use."""
    pinned: bool
    keep_s: float | None
    """Seconds without use after which the clock unloads it; None: it doesn't."""
    running: int
    waiting: int
    """Requests in its queue, and those that wait for it to load."""
    info: ModelInfo | None
    """What is known of it since it was first loaded."""


class Lease:
    """A model that stays loaded until `release`, which may be called more than once and from any thread."""

    __slots__ = ("_end", "model", "name")

    def __init__(self, name: str, model: LLM | Encoder, end: Callable[[], None]) -> None:
        self.name = name
        self.model = model
        self._end: deque[Callable[[], None]] = deque([end])

    @property
    def llm(self) -> LLM:
        """The model, if it writes text. Raises InvalidRequestError if it doesn't."""
        model = self.model
        if model.info.makes != "text":
            what = "makes embeddings" if model.info.makes == "embeddings" else "reranks"
            raise InvalidRequestError(f"{self.name} {what}; it writes no text", param="model")
        return cast("LLM", model)

    @property
    def encoder(self) -> Encoder:
        """The model, if it makes embeddings or reranks. Raises InvalidRequestError if it doesn't."""
        model = self.model
        if model.info.makes == "text":
            raise InvalidRequestError(
                f"{self.name} writes text; for embeddings and reranking, name a model made for that", param="model"
            )
        return cast("Encoder", model)

    def release(self) -> None:
        """The model may go."""
        with contextlib.suppress(IndexError):
            self._end.pop()()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class Entry:
    """A registered model; the pool's lock guards it."""

    name: str
    source: str | None
    """None for a model that was given loaded: it can't be loaded again, and belongs to who gave it."""
    pinned: bool = False
    due: bool = False
    """To be loaded at the start, and not loaded yet."""
    state: State = "registered"
    model: LLM | Encoder | None = None
    info: ModelInfo | None = None
    leases: int = 0
    waiters: list[tuple[str, Future[Lease]]] = field(default_factory=list)
    """With the name that each asked for."""
    used: float | None = None
    keep: float | None = None
    """In place of the pool's keep_alive, while it is loaded."""
    turn: int = 0
    """Order of last use."""
    recheck: float = 0.0
    error: MlxinferError | None = None
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name → folder; `fit` adds them to the model once it is there."""
    failures: int = 0
    retry_at: float = 0.0

    @property
    def bytes(self) -> int:
        return 0 if self.info is None or self.model is None else self.info.weight_bytes

    def fit(self, model: LLM | Encoder, only: Collection[str] | None = None) -> None:
        """Add the adapters, or `only` some, to a model that was loaded.

        Raises InvalidRequestError or what LLM.add_adapter raises.
        """
        if not self.adapters:
            return
        if model.info.makes != "text":
            names = ", ".join(self.adapters)
            raise InvalidRequestError(f"{self.name} writes no text; the adapters {names} can't be used with it")
        for name, folder in self.adapters.items():
            if only is not None and name not in only:
                continue
            cast("LLM", model).add_adapter(name, folder)

    def leased(self, name: str) -> LLM | Encoder:
        """The model as it is called `name`: itself, or with one of its adapters."""
        assert self.model is not None, "only loaded models are leased"
        adapter = name[len(self.name) + 1 :]
        return cast("LLM", self.model).adapted(adapter) if adapter else self.model

    def at_work(self) -> bool:
        """Leased, or with requests that run or wait in its engine."""
        if self.model is None or self.leases:
            return self.leases > 0
        stats = self.model.stats()
        return stats["running"] + stats["waiting"] > 0

    def fail_waiters(self, error: MlxinferError) -> None:
        """Each gets an error of its own: one that is raised in two threads mixes up its tracebacks."""
        waiters, self.waiters = self.waiters, []
        for _, waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(copy.copy(error))
