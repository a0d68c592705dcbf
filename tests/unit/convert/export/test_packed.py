"""mlx's packed words taken apart."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.convert.export.folder import narrowed, slices, widened
from mlxinfer.convert.export.packed import BITS, floats_of, unpack_codes
from mlxinfer.convert.sources.base import Packing
from mlxinfer.formats.gguf.blocks import pack_codes


@pytest.mark.parametrize("bits", BITS)
def test_codes_come_out_of_the_words_they_were_packed_into(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, 96), dtype=np.uint8)
    np.testing.assert_array_equal(unpack_codes(pack_codes(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", BITS)
def test_codes_times_scales_plus_biases_are_the_weights_of_mlx(bits: int) -> None:
    weights = mx.array(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32))
    words, scales, biases = (np.array(a) for a in mx.quantize(weights, group_size=32, bits=bits))
    values = floats_of(words, [scales, biases], Packing(bits, 32))
    codes = unpack_codes(words, bits).reshape(4, 2, 32).astype(np.float32)
    np.testing.assert_allclose(values, (codes * scales[..., None] + biases[..., None]).reshape(4, 64), rtol=1e-5)


def test_bfloat16_is_widened_and_narrowed_as_mlx_does_it() -> None:
    values = np.array([[0.0, -1.5, 3.14159, 1e30, np.inf, 1e-40]], np.float32)
    bits = narrowed(values, "BF16", "x")
    expected = mx.array(values).astype(mx.bfloat16)
    np.testing.assert_array_equal(bits, np.array(expected.view(mx.uint16)))
    np.testing.assert_array_equal(widened(bits), np.array(expected.astype(mx.float32)))


@given(rows=st.integers(1, 4000), columns=st.integers(1, 2**23))
def test_slices_cover_every_row_once(rows: int, columns: int) -> None:
    edges = list(slices(rows, columns))
    assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == rows
