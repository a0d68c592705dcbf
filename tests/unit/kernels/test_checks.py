"""A kernel that differs from mlx's own is found, whatever it does; one that agrees is kept; and it is quick."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlxinfer.kernels.cases import CASES, PLAIN
from mlxinfer.kernels.checks import check, names

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

NAMES = list(CASES)


def extension(**functions: Any) -> Any:
    return SimpleNamespace(**functions)


def changed(name: str, change: Callable[[mx.array], mx.array]) -> Any:
    """The kernel as it should be, with every result changed."""
    return extension(**{name: lambda *a, **k: tree_map(change, PLAIN[name](*a, **k))})


@pytest.mark.parametrize("name", NAMES)
def test_what_mlx_itself_gives_passes(name: str) -> None:
    assert check(extension(**{name: PLAIN[name]}), name) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a * 1.05, "differs"),
        (lambda a: a * mx.nan, "differs"),
        (lambda a: a.astype(mx.bfloat16 if a.dtype == mx.float32 else mx.float32), "gives"),
        (lambda a: a[None], "gives"),
    ],
    ids=["values", "NaN", "dtype", "shape"],
)
def test_what_differs_is_found(name: str, change: Callable[[mx.array], mx.array], said: str) -> None:
    why = check(changed(name, change), name)
    assert why is not None
    assert said in why


@pytest.mark.parametrize("error", [RuntimeError("boom"), TypeError("boom"), MemoryError("boom"), OSError(5, "boom")])
def test_a_kernel_that_raises_is_found(error: Exception) -> None:
    def kernel(*_: Any, **__: Any) -> Any:
        raise error

    why = check(extension(rms_norm=kernel), "rms_norm")
    assert why is not None
    assert "boom" in why


def test_one_wrong_row_of_many_is_found() -> None:
    def kernel(x: mx.array, *rest: Any) -> mx.array:
        result = PLAIN["rms_norm"](x, *rest)
        result[-1, -1, -1] += 0.05
        return result

    assert check(extension(rms_norm=kernel), "rms_norm")


def test_only_what_is_called_counts_as_a_kernel() -> None:
    assert names(extension(rms_norm=1, silu_mul=1, isa=1, exp_of=1)) == ["rms_norm", "silu_mul"]


def test_the_global_random_state_is_left_alone() -> None:
    mx.random.seed(3)
    expected = mx.random.normal((4,))
    mx.random.seed(3)
    check(extension(rms_norm=PLAIN["rms_norm"]), "rms_norm")
    assert mx.array_equal(mx.random.normal((4,)), expected).item()


def test_the_extension_passes_in_half_a_second_on_any_thread(kernels: ModuleType) -> None:
    found: dict[str, str | None] = {}
    seconds: list[float] = []

    def run() -> None:
        for _ in range(3):
            begun = time.perf_counter()
            found.update({name: check(kernels, name) for name in names(kernels)})
            seconds.append(time.perf_counter() - begun)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found
    assert not any(found.values()), found
    assert min(seconds) < 0.5
