"""Adapters of a model over ranks: which there are is known here, each rank has its part of them."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.engine.adapters import Adapters
from mlxinfer.engine.blank import blank
from mlxinfer.errors import MlxinferError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlxinfer.engine.adapter_files import AdapterFiles


log = logging.getLogger(__name__)


class RemoteAdapters(Adapters):
    """As Adapters, for Engine. Ranks read an adapter when a step first needs it, and let go of the one used longest ago
    where they have no more room, each for itself."""

    def __init__(
        self,
        config: Mapping[str, Any],
        bring: Callable[[AdapterFiles], Sequence[str]] | None,
        tell: Callable[[str, Sequence[str]], None],
    ) -> None:
        """`bring` cuts an adapter and gives the folder of each rank's part; `tell` says to each rank where its is."""
        super().__init__(nn.Module())
        self._config, self._bring, self._tell = config, bring, tell

    def add(self, files: AdapterFiles) -> None:
        """As Adapters.add; each rank's part is on its machine afterwards."""
        if self._bring is None:
            raise UnsupportedModelError(f"the adapter {files.name}: these ranks take no adapters")
        new = files.name not in self._files
        # All shapes: nothing of it is ever computed.
        self._model = blank(self._config, keep_packed=True)
        try:
            super().add(files)
        finally:
            self._model = nn.Module()
            mx.eval(mx.random.state)
        if not new:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self._files.pop, files.name)
            folders = self._bring(files)
            undo.pop_all()
        self._tell(files.name, folders)

    def again(self) -> None:
        """Tell new ranks. What can't be brought to them is there no more."""
        assert self._bring is not None or not self._files
        for name, files in list(self._files.items()):
            try:
                self._tell(name, self._bring(files) if self._bring else ())
            except MlxinferError as error:
                log.warning("the adapter %s is gone: %s", name, error)
                del self._files[name]

    def load(self, name: str) -> None:
        """Raises ModelNotFoundError."""
        self._known(name)

    def use(self, name: str) -> None:
        """The ranks do, with each step."""
