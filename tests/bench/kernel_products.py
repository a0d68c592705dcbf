"""`python -m tests.bench.kernel_products [--pairs N]`: the products against mlx's own, interleaved, as JSON lines.

Medians of pairs; rates from the fastest run. The read bandwidth is that of the kernels' own threads: one row against
float32 weights, which takes one multiplication per number read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.config import load_settings
from mlxinfer.kernels.build import build
from mlxinfer.kernels.load import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

SHAPES = ((576, 1536), (1536, 576), (576, 49152), (4096, 4096))
ROWS = (1, 8, 64, 512)
CHAIN = 16
FORMATS = ((4, 32), (4, 64), (8, 64), (2, 64), (3, 64), (5, 64), (6, 64))
READ_BYTES = 192 << 20
"""Far more than a last-level cache holds."""


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - start


def fastest(run: Callable[[], Any], repeats: int) -> float:
    return min(seconds(run) for _ in range(repeats))


def bandwidth(kernels: ModuleType, repeats: int) -> None:
    """GB/s at one row, over as many matrices as don't fit a cache."""
    x = mx.random.normal((1, 4096))
    weights = [mx.random.normal((4096, 4096)) for _ in range(READ_BYTES // (4096 * 4096 * 4))]
    mx.eval(x, weights)
    read = sum(w.nbytes for w in weights) / fastest(lambda: [kernels.half_matmul(x, w) for w in weights], repeats)
    report(what="read bandwidth", gb_per_s=read / 1e9)
    for bits, group in FORMATS:
        how: dict[str, Any] = {"bits": bits, "group_size": group}
        size = 4096 * 4096 * (bits + 64 / group) / 8
        many: list[Any] = [mx.quantize(mx.random.normal((4096, 4096)), **how) for _ in range(int(READ_BYTES / size))]
        mx.eval(many)
        took = fastest(lambda all=many, how=how: [kernels.quantized_matmul(x, *w, **how) for w in all], repeats)
        rate = size * len(many) / took
        report(what="one row", bits=bits, group_size=group, gb_per_s=rate / 1e9, of_read_bandwidth=rate / read)


def against_mlx(kernels: ModuleType, pairs: int) -> None:
    """CHAIN products an eval, as in a forward: alone, a small one is mostly mlx's way to its thread and back."""
    for depth, columns in SHAPES:
        chain = 1 if columns * depth > 4 << 20 else CHAIN
        many: list[Any] = [mx.quantize(mx.random.normal((columns, depth))) for _ in range(chain)]
        for rows in ROWS:
            x = mx.random.normal((rows, depth))
            mx.eval(x, many)
            ours = lambda x=x, many=many: [kernels.quantized_matmul(x, *w) for w in many]  # noqa: E731
            theirs = lambda x=x, many=many: [mx.quantized_matmul(x, *w) for w in many]  # noqa: E731
            mx.eval(ours())
            times = [(seconds(ours) / chain, seconds(theirs) / chain) for _ in range(pairs)]
            ratio, best = statistics.median(b / a for a, b in times), min(a for a, _ in times)
            gflops = 2e-9 * rows * depth * columns / best
            report(what="product", shape=[depth, columns], rows=rows, us=best * 1e6, gflops=gflops, times_mlx=ratio)


def report(**line: Any) -> None:
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args().pairs
    mx.set_default_device(mx.Device(mx.cpu))
    kernels = load(build(load_settings().cache_dir))
    bandwidth(kernels, pairs)
    against_mlx(kernels, pairs)


if __name__ == "__main__":
    main()
