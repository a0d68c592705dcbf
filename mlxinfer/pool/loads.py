"""Where the pool's models come from, and the memory they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mlxinfer import runtime

if TYPE_CHECKING:
    import threading

    from mlxinfer.config import Settings
    from mlxinfer.encoders import Encoder
    from mlxinfer.llm import LLM
    from mlxinfer.zoo import ModelFiles


class Loads(Protocol):
    """Where models come from and what memory they have; `Machine` is the real one."""

    def predict(self, source: str, cancel: threading.Event) -> int:
        """Bytes of the weights in memory. Raises what says that there is no such model here."""
        ...

    def load(self, source: str, cancel: threading.Event) -> LLM | Encoder:
        """The loaded model; raises what `mlxinfer.load` or `load_encoder` raises."""
        ...

    def budget(self) -> int:
        """Bytes that models may take together."""
        ...

    def held(self) -> int:
        """Bytes that they take now."""
        ...


class Machine:
    """Loads from the files on this machine; with `fetch`, what isn't here is fetched."""

    def __init__(self, settings: Settings, *, fetch: bool = False) -> None:
        self.settings = settings
        self._fetch = fetch
        self._instead: dict[str, ModelFiles] = {}

    def use(self, source: str, files: ModelFiles) -> None:
        """From now on load `files`, a conversion of what `source` stands for."""
        self._instead[source] = files

    def predict(self, source: str, cancel: threading.Event) -> int:
        from mlxinfer import zoo

        if source in self._instead:
            source = str(self._instead[source].path)
        zoo.resolve(source, self.settings, fetch=self._fetch, cancel=cancel)
        # The bytes don't rest on speed; a figure in its place spares the measurement.
        return zoo.fit(source, self.settings, bandwidth=(1.0, "not measured")).weight_bytes

    def load(self, source: str, cancel: threading.Event) -> LLM | Encoder:
        from mlxinfer import zoo
        from mlxinfer.encoders import encoder_kind

        if instead := self._instead.get(source):
            from mlxinfer.llm import load

            return load(source, settings=self.settings, files=instead, cancel=cancel)
        files = zoo.resolve(source, self.settings, fetch=self._fetch, cancel=cancel)
        if encoder_kind(files.path, source, files.name):
            from mlxinfer.encoders import load_encoder as load
        else:
            from mlxinfer.llm import load
        return load(source, settings=self.settings, fetch=self._fetch, cancel=cancel)

    def budget(self) -> int:
        return runtime.memory().budget if self.settings.memory_mb is None else self.settings.memory_mb << 20

    def held(self) -> int:
        from mlxinfer.engine.governor import governor

        return governor().held_bytes()
