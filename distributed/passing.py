"""What a stage of a pipeline receives and sends, noted as its graph is built."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stage() -> Iterator[list[mx.array]]:
    """Inside, a pipeline's stages don't hand the last one's output to all: whoever samples has it, and nobody waits.

    Gives a list that fills with what is received and sent, in order, not evaluated. mlx-lm's models ask
    `mx.distributed` while their graph is built.
    """
    passed: list[mx.array] = []

    def noted(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*args: Any, **kwargs: Any) -> mx.array:
            passed.append(array := function(*args, **kwargs))
            return array

        return call

    own: Any = mx.distributed
    held = {name: getattr(own, name) for name in ("recv", "recv_like", "send", "all_gather")}
    try:
        vars(own).update({name: noted(function) for name, function in held.items()}, all_gather=_as_it_is)
        yield passed
    finally:
        vars(own).update(held)


def _as_it_is(array: mx.array, **_: Any) -> mx.array:
    return array
