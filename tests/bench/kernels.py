"""Each CPU kernel against mlx's own call, through Python and mlx.eval: `python -m tests.bench.kernels [NAME …]`.

Ours and mlx's take turns; the shortest of many runs of each counts.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.config import load_settings
from mlxinfer.kernels.build import build
from mlxinfer.kernels.load import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    Case = tuple[str, Callable[[], mx.array], Callable[[], mx.array]]

MIN_SECONDS = 0.5
"""For each case, both sides together."""


def small(kernels: ModuleType) -> Iterator[Case]:
    """The shapes of SmolLM2-135M at 1, 8 and 512 tokens. Each: name, ours, mlx's."""
    weight = mx.random.normal((576,))
    for rows in (1, 8, 512):
        x = mx.random.normal((rows, 576))
        yield f"rms_norm {rows} x 576", *_both(kernels.rms_norm, mx.fast.rms_norm, x, weight, 1e-5)
    options = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 100}
    for tokens in (1, 8, 512):
        x = mx.random.normal((1, tokens, 9, 64))
        yield (
            f"rope {tokens} tokens x 9 x 64",
            *_both(kernels.rope, mx.fast.rope, x.transpose(0, 2, 1, 3), 64, **options),
        )
    silu, gelu = (mx.compile(lambda g, x, f=f: f(g) * x) for f in (nn.silu, nn.gelu_approx))
    for rows in (1, 8, 512):
        gate, x = mx.random.normal((rows, 1536)), mx.random.normal((rows, 1536))
        yield f"silu_mul {rows} x 1536", *_both(kernels.silu_mul, silu, gate, x)
        yield f"gelu_mul {rows} x 1536", *_both(kernels.gelu_mul, gelu, gate, x)
    for rows in (1, 8):
        logits = mx.random.normal((rows, 49152))
        yield f"logsumexp {rows} x 49152", *_both(kernels.logsumexp, mx.logsumexp, logits, -1)
        yield f"softmax {rows} x 49152", *_both(kernels.softmax, mx.softmax, logits, -1)


def _both(ours: Callable[..., mx.array], theirs: Callable[..., mx.array], *args: Any, **options: Any) -> Any:
    mx.eval([a for a in args if isinstance(a, mx.array)])
    return (lambda: ours(*args, **options)), (lambda: theirs(*args, **options))


def _seconds(call: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - start


def shortest(ours: Callable[[], mx.array], theirs: Callable[[], mx.array]) -> tuple[float, float]:
    """Seconds of the shortest run of each."""
    best = _seconds(ours), _seconds(theirs)
    until = time.perf_counter() + MIN_SECONDS
    while time.perf_counter() < until:
        best = min(best[0], _seconds(ours)), min(best[1], _seconds(theirs))
    return best


def main() -> None:
    mx.set_default_device(mx.cpu)
    kernels = load(build(load_settings().cache_dir))
    print(f"{kernels.isa()}, {kernels.threads()} threads; microseconds")
    for name, ours, theirs in small(kernels):
        if not sys.argv[1:] or any(wanted in name for wanted in sys.argv[1:]):
            mine, other = shortest(ours, theirs)
            print(f"{name:28} {mine * 1e6:9.1f} mlx {other * 1e6:9.1f}   {other / mine:6.1f}x", flush=True)


if __name__ == "__main__":
    main()
