"""Kernels take the places of mlx's functions, and leave them again."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxinfer.kernels import calls, kernel
from mlxinfer.kernels.cases import CASES, PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    calls.uninstall()


def marker(*_: Any, **__: Any) -> mx.array:
    return mx.array(7.0)


def test_a_kernel_is_what_models_call_until_it_is_taken_out() -> None:
    norm = nn.RMSNorm(8)
    calls.install(SimpleNamespace(rms_norm=marker, rope=marker), ["rms_norm"])  # pyright: ignore[reportArgumentType]
    assert norm(mx.ones((1, 8))).item() == 7
    assert mx.fast.rope is calls.ORIGINAL["rope"]
    calls.uninstall()
    assert mx.fast.rms_norm is calls.ORIGINAL["rms_norm"]
    assert norm(mx.ones((1, 8))).shape == (1, 8)


def test_a_kernel_that_mlx_has_no_function_for_is_had_by_name() -> None:
    assert kernel("silu_mul") is None
    calls.put({"silu_mul": marker})
    assert kernel("silu_mul") is marker
    assert not hasattr(mx, "silu_mul")
    calls.uninstall()
    assert kernel("silu_mul") is None


def test_every_kernel_has_its_cases_and_something_to_compare_with() -> None:
    assert CASES.keys() == PLAIN.keys() == {*calls.REPLACED, *calls.OWN}
    for name, original in calls.ORIGINAL.items():
        assert inspect.getdoc(original), name
        assert not inspect.isfunction(original), f"{name} was not mlx's own when the module was imported"


KEYWORDS: dict[str, dict[str, Any]] = {
    "rms_norm": {"x": mx.ones((2, 8)), "weight": None, "eps": 1e-5},
    "rope": {"a": mx.ones((1, 2, 8)), "dims": 8, "traditional": False, "base": 1e4, "scale": 1.0, "offset": 0},
    "scaled_dot_product_attention": {n: mx.ones((1, 1, 2, 8)) for n in "qkv"} | {"scale": 1.0},
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_arguments_have_the_names_that_mlx_gives_them(kernels: ModuleType, name: str) -> None:
    ours, theirs = (f(**KEYWORDS[name]) for f in (getattr(kernels, name), calls.ORIGINAL[name]))
    assert mx.allclose(ours, theirs, atol=1e-5).item()


def test_arguments_that_mlx_gives_no_names_have_none(kernels: ModuleType) -> None:
    for place in (kernels, mx):
        with pytest.raises(TypeError):
            place.softmax(a=mx.ones((2, 8)))
        with pytest.raises(TypeError):
            place.logsumexp(a=mx.ones((2, 8)))
