"""A score for every position from its logits, without ever holding the logits of more than one chunk of positions.

The chunks hang on each other: the next one's logits are made when the last one's are gone. Where the head is frozen,
the slope towards the hidden states is taken on the way forward, [n, hidden_size], so that no logits are made twice;
otherwise the way back makes each chunk's logits again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.lora.losses.split import Split

CHUNK_BYTES = 8 << 20
"""Of one chunk's logits in float32; up to eight arrays of this size are alive at a time (measured)."""
MIN_ROWS = 64
"""Fewer positions make a poor matrix product."""


def chunk_rows(vocab_size: int) -> int:
    """Positions of a chunk."""
    return max(MIN_ROWS, CHUNK_BYTES // (4 * vocab_size))


def scores(
    split: Split,
    hidden: mx.array,
    extras: list[mx.array],
    score: Callable[..., mx.array],
    *,
    rows: int,
    ahead: bool,
) -> mx.array:
    """score(logits [r, vocab], *extras [r, …]) → [r] over all of `hidden` [n, hidden_size] → [n] float32.

    `rows` is the positions of a chunk. `ahead`: a gradient will be taken, so its slope is taken on the way. It can be
    taken without, too. Each score may depend on its own position only. `extras` get no gradient.
    """
    names = list(split.parameters())
    inputs = [hidden, *split.parameters().values(), *extras]
    ahead = ahead and not names
    count = len(names)
    # Equal chunks: the last is no smaller than it must be.
    step = -(-hidden.shape[0] // -(-hidden.shape[0] // rows))
    cuts = list(range(step, hidden.shape[0], step))

    def of_chunk(part: mx.array, weights: list[mx.array], own: list[mx.array]) -> mx.array:
        with split.using(dict(zip(names, weights, strict=True))):
            return score(split.head(part), *own).astype(mx.float32)

    def pieces(arrays: tuple[mx.array, ...]) -> Any:
        return zip(*(mx.split(array, cuts) for array in (arrays[0], *arrays[1 + count :])), strict=True)

    @mx.custom_function
    def run(*arrays: mx.array) -> list[mx.array]:
        weights = list(arrays[1 : 1 + count])
        found: list[mx.array] = []
        slopes: list[mx.array] = []
        done: list[mx.array] = []
        for part, *own in pieces(arrays):
            part = _after(part, done)
            if ahead:
                (value,), (slope,) = _pull(lambda h, own=own: of_chunk(h, weights, own), [part], mx.ones(part.shape[0]))
                slopes.append(slope)
                done = [value, slope]
            else:
                value = of_chunk(part, weights, own)
                done = [value]
            found.append(value)
        return [mx.concatenate(found), *([mx.concatenate(slopes)] if ahead else [])]

    @run.vjp
    def back(primals: Any, cotangents: Any, outputs: Any) -> Any:
        arrays, cotangent = _flat(primals), _flat(cotangents)[0]
        rest = [mx.zeros_like(extra) for extra in arrays[1 + count :]]
        if ahead:
            slope = _flat(outputs)[1]
            return [(cotangent[:, None] * slope).astype(slope.dtype), *rest]
        weights = list(arrays[1 : 1 + count])
        towards: list[mx.array] = []
        sums = [mx.zeros(weight.shape, mx.float32) for weight in weights]
        done: list[mx.array] = []
        for (part, *own), seed in zip(pieces(tuple(arrays)), mx.split(cotangent, cuts), strict=True):
            part = _after(part, done)
            _, (slope, *own_sums) = _pull(lambda h, *w, own=own: of_chunk(h, list(w), own), [part, *weights], seed)
            towards.append(slope)
            sums = [total + more for total, more in zip(sums, own_sums, strict=True)]
            done = [slope, *sums]
        total = [more.astype(weight.dtype) for more, weight in zip(sums, weights, strict=True)]
        return [mx.concatenate(towards), *total, *rest]

    found: Any = run(*inputs)
    return found[0]


def _after(array: mx.array, done: list[mx.array]) -> mx.array:
    """The array, not before what is `done`."""
    return mx.depends([array], done)[0] if done else array


def _pull(
    function: Callable[..., mx.array], at: list[mx.array], seed: mx.array
) -> tuple[list[mx.array], list[mx.array]]:
    """([value], its slope towards each of `at`, weighed by `seed`)."""
    return mx.vjp(lambda *a: [function(*a)], at, [seed])


def _flat(arrays: Any) -> list[mx.array]:
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)
