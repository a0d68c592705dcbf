"""How many layers each stage of a pipeline gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def split_layers(
    cost: Sequence[int], room: Sequence[int], rate: Sequence[float], *, level: bool = False
) -> tuple[int, ...] | None:
    """Layers of each stage, in order, at least one each: the least total time that fits, then the least slowest stage;
    with `level`, the other way round.

    `cost` are bytes of each layer, `room` bytes that each stage has, `rate` the bytes it reads a second. None where
    nothing fits. By dynamic programming over stages and layers.
    """
    layers, stages = len(cost), len(room)
    if not 0 < stages <= layers:
        return None
    sums = [0]
    for one in cost:
        sums.append(sums[-1] + one)
    # best[n]: (what is least, what comes second, layers of each stage so far) of the first n layers.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for done, (first, second, split) in best.items():
            slowest, total = (first, second) if level else (second, first)
            for count in range(1, layers - done - (stages - stage - 1) + 1):
                held = sums[done + count] - sums[done]
                if held > room[stage]:
                    break
                seconds = held / rate[stage]
                # Rounded: equal totals are to be told apart by the slowest stage.
                times = (round(total + seconds, 9), max(slowest, seconds))
                found = (times[level], times[not level], (*split, count))
                if done + count not in after or found < after[done + count]:
                    after[done + count] = found
        best = after
    return best[layers][2] if layers in best else None
