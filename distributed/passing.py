"""What goes between ranks in a forward, as its graph is built: mlx-lm's models ask `mx.distributed` for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.distributed.groups import Pair, PretendGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def stage(pair: Pair | None = None) -> Iterator[list[mx.array]]:
    """Inside, a pipeline's stages don't hand the last one's output to all: whoever samples has it, and nobody waits.
    `pair`: the two ranks that this stage is; what groups of ours are asked for goes to them.

    Gives a list that fills with what is received and sent, in order; of a pair, which submits that itself, with what
    comes last of it.
    """
    passed: list[mx.array] = []
    own: Any = mx.distributed
    held = {name: getattr(own, name) for name in ("recv", "recv_like", "send", "all_gather", "all_sum")}

    def noted(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*args: Any, **kwargs: Any) -> mx.array:
            passed.append(array := function(*args, **kwargs))
            return array

        return call

    def collective(name: str) -> Callable[..., mx.array]:
        def call(x: mx.array, *, group: Any = None, **options: Any) -> mx.array:
            if isinstance(group, Pair | PretendGroup):
                return getattr(group, name)(x)
            return x if name == "all_gather" and group is None else held[name](x, group=group, **options)

        return call

    changed = (
        {name: noted(held[name]) for name in ("recv", "recv_like", "send")} if pair is None else _paired(passed, pair)
    )
    changed |= {name: collective(name) for name in ("all_gather", "all_sum")}
    try:
        vars(own).update(changed)
        yield passed
    finally:
        vars(own).update(held)


def _paired(passed: list[mx.array], pair: Pair) -> dict[str, Callable[..., mx.array]]:
    """Between stages of two ranks each. To whom and from whom is the pair's to know."""

    def recv(shape: Sequence[int], dtype: mx.Dtype, *_: Any, **__: Any) -> mx.array:
        passed[:] = [pair.take(shape, dtype)]
        return passed[-1]

    def recv_like(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return recv(x.shape, x.dtype)

    def send(x: mx.array, *_: Any, **__: Any) -> mx.array:
        passed[:] = [pair.give(x)]
        return passed[-1]

    return {"recv": recv, "recv_like": recv_like, "send": send}
