"""Kernels called from several threads at once: the pool serves one of them, the others compute alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import mlx.core as mx

from tests.unit.kernels.compare import normal, same_bits

if TYPE_CHECKING:
    from types import ModuleType

CALLERS = 4
ROUNDS = 30


def test_callers_at_the_same_time_get_the_same_bits(kernels: ModuleType) -> None:
    x = normal(1, (5, 40000))
    expected = kernels.softmax(x, -1, stream=mx.cpu)
    mx.eval(x, expected)

    def call(_: int) -> bool:
        stream = mx.new_stream(mx.cpu)
        results = [kernels.softmax(x, -1, stream=stream) for _ in range(ROUNDS)]
        mx.eval(results)
        return all(same_bits(one, expected) for one in results)

    with ThreadPoolExecutor(CALLERS) as pool:
        assert all(pool.map(call, range(CALLERS)))
