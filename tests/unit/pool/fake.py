"""Models without weights, a memory of 100 bytes and a clock that stands still."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import MlxinferError, ModelNotFoundError
from mlxinfer.pool import ModelPool

if TYPE_CHECKING:
    from collections.abc import Mapping

BUDGET = 100


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeLLM:
    """What the pool uses of LLM."""

    def __init__(self, loads: FakeLoads, source: str) -> None:
        self.info: Any = SimpleNamespace(name=source, weight_bytes=loads.sizes[source], makes="text")
        self.running = 0
        self.alive = True
        self._loads = loads
        self._source = source

    def stats(self) -> dict[str, int]:
        return {"running": self.running, "waiting": 0}

    def unload(self) -> None:
        if not self.alive or self.running:
            self._loads.wrong.append(f"{self._source} is unloaded {'at work' if self.alive else 'twice'}")
        self.alive = False
        self._loads.here.pop(self._source, None)
        self._loads.log.append(f"-{self._source}")


class FakeLoads:
    """Loads at once, or when its gate is opened; counts bytes and keeps a log of loads (+a) and unloads (-a)."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.here: dict[str, FakeLLM] = {}
        self.log: list[str] = []
        self.asked: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.started = {name: threading.Event() for name in sizes}
        self.wrong: list[str] = []
        self._loading: str | None = None

    def predict(self, source: str, cancel: threading.Event) -> int:
        self.asked.append(source)
        if source not in self.sizes:
            raise ModelNotFoundError(f"no model is called {source!r}")
        return self.sizes[source]

    def load(self, source: str, cancel: threading.Event) -> Any:
        if source in self.here or self._loading:
            self.wrong.append(f"{source} is loaded beside {self._loading or 'itself'}")
        self._loading = source
        try:
            return self._load(source, cancel)
        finally:
            self._loading = None

    def _load(self, source: str, cancel: threading.Event) -> FakeLLM:
        self.started[source].set()
        gate = self.gates.get(source)
        while gate is not None and not gate.wait(0.01):
            if cancel.is_set():
                raise MlxinferError("loading was cancelled")
        if (error := self.errors.get(source)) is not None:
            raise error
        made = self.here[source] = FakeLLM(self, source)
        self.log.append(f"+{source}")
        if self.held() > BUDGET:
            self.wrong.append(f"{self.held()} bytes are held")
        return made

    def budget(self) -> int:
        return BUDGET

    def held(self) -> int:
        return sum(self.sizes[source] for source in self.here)


def make(sizes: Mapping[str, int], clock: FakeClock | None = None, **options: Any) -> tuple[ModelPool, FakeLoads]:
    """A pool of models that are called like their sources; time passes when the test says so, by `unload_idle`."""
    loads = FakeLoads(sizes)
    pool = ModelPool({name: name for name in sizes}, loads, clock=clock or FakeClock(), timer=False, **options)
    return pool, loads


def use(pool: ModelPool, name: str) -> None:
    with pool.lease(name):
        pass


def states(pool: ModelPool) -> dict[str, str]:
    return {name: status.state for name, status in pool.status().items()}
