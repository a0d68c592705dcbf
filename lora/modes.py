"""A module for a while in another mode, or called in another way."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import mlx.nn as nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in evaluation mode; afterwards each in the mode that it had."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module._training = training


@contextlib.contextmanager
def calling(module: Any, run: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module(…)` is `run(its class, module, …)`. By instance; the class stays as it is."""
    own: Any = type(module)
    # A class refers to itself: what its method holds would stay, a whole graph, until garbage is collected.
    running = [run]
    del run

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return running[0](own, self, *args, **options)

    module.__class__ = type(own.__name__, (own,), {"__call__": call})
    try:
        yield
    finally:
        module.__class__ = own
        running.clear()
