"""A model's layers as they are with the kernels: weights as stored, products by the kernels, all else in float32."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxinfer import runtime
from mlxinfer.engine import dtypes
from mlxinfer.kernels import calls, layers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@pytest.fixture
def installed(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels in their places."""
    monkeypatch.setattr(runtime, "on_cpu", lambda: True)
    calls.install(kernels, [*calls.REPLACED, *calls.OWN])
    yield kernels
    calls.uninstall()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 64), nn.RMSNorm(64)
        self.packed, self.plain = nn.Linear(64, 64, bias=True), nn.Linear(64, 64)
        nn.quantize(self, 32, 4, class_predicate=lambda path, _: path == "packed")
        self.set_dtype(mx.bfloat16)

    def __call__(self, x: mx.array) -> mx.array:
        return self.embed.as_linear(self.plain(self.packed(self.norm(self.embed(x)))))


def operations(out: mx.array) -> str:
    """The names of the operations that lead to an array."""
    text = io.StringIO()
    mx.export_to_dot(text, out)
    return text.getvalue()


def test_a_packed_bfloat16_layer_keeps_its_arrays_and_reaches_the_kernel(installed: ModuleType) -> None:
    model = Small()
    assert {"packed.scales", "packed.biases", "plain.weight", "embed.weight"} <= layers.adopt(model)
    model = Small()
    assert dtypes.apply_dtype_policy(model, "auto") == "float32"
    stored = [model.packed["scales"], model.packed["biases"], model.plain["weight"], model.embed["weight"]]
    assert [a.dtype for a in stored] == [mx.bfloat16] * 4
    assert model.norm["weight"].dtype == mx.float32
    x = mx.ones((1, 64))
    assert "QuantizedMatmulCPU" in operations(model.packed(x))
    assert "HalfMatmulCPU" in operations(model.plain(x))
    out = operations(model(mx.array([[3]])))
    assert out.count("QuantizedMatmulCPU") == 1
    assert out.count("HalfMatmulCPU") == 2
    assert model(mx.array([[3]])).dtype == mx.float32


def test_the_setting_float16_is_kept_to_and_gives_nearly_the_same(installed: ModuleType) -> None:
    mx.random.seed(1)
    model = Small()
    wide = Small()
    wide.update(model.parameters())
    assert dtypes.apply_dtype_policy(model, "float16") == "float16"
    dtypes.apply_dtype_policy(wide, "auto")
    kinds = {w.dtype for w in dtypes.parameters(model) if mx.issubdtype(w.dtype, mx.floating)}
    assert kinds == {mx.float16}
    assert type(model.plain) is nn.Linear
    tokens = mx.array([[3, 7, 1]])
    got, expected = model(tokens), wide(tokens)
    assert got.dtype == mx.float16
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=0.02 * float(np.abs(np.array(expected)).max()))


@pytest.mark.parametrize("missing", ["half_matmul", "quantized_matmul"])
def test_without_one_of_the_products_weights_are_made_float32(installed: ModuleType, missing: str) -> None:
    assert dtypes.as_stored()
    calls.uninstall()
    calls.install(installed, [name for name in (*calls.REPLACED, *calls.OWN) if name != missing])
    assert not dtypes.as_stored()
    model = Small()
    dtypes.apply_dtype_policy(model, "auto")
    assert {w.dtype for w in dtypes.parameters(model)} <= {mx.float32, mx.uint32}
    assert type(model.plain) is nn.Linear
    assert np.isfinite(np.array(model(mx.array([[3]])))).all()
