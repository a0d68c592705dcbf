"""compressed-tensors against packers written from its description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from tests.unit.convert.sources.checkpoints import (
    Tensors,
    as_int32,
    bf16,
    bf16_values,
    dequantized,
    opened,
    plain,
    write_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

ROWS, COLUMNS = 12, 256
RNG = np.random.default_rng(0)


def settings(form: str, bits: int = 4, *, symmetric: bool = True, **more: object) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, **more,
    }  # fmt: skip


def packed_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Signed values [n, m] to int32 [n, ceil(m / (32 // bits))], each 2^(bits - 1) more, whole codes in a word."""
    per_word = 32 // bits
    lines = []
    for line in values:
        codes = [int(v) + (1 << (bits - 1)) for v in line]
        runs = [codes[i : i + per_word] for i in range(0, len(codes), per_word)]
        lines.append([sum(code << (bits * i) for i, code in enumerate(run)) for run in runs])
    return as_int32(lines)


def matrix(bits: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values, scales as the bits of bfloat16, zeros)."""
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    scales = bf16(RNG.random((ROWS, groups)) * 0.1 + 0.01)[1]
    return RNG.integers(low, high, (ROWS, COLUMNS)), scales, RNG.integers(low, high, (ROWS, groups))


def expected(values: np.ndarray, scales: np.ndarray, zeros: np.ndarray, of_column: np.ndarray) -> np.ndarray:
    wide = bf16_values(scales).astype(np.float64)
    return (wide[:, of_column] * (values - zeros[:, of_column])).astype(np.float32)


def packed_tensors(bits: int, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> Tensors:
    tensors: Tensors = {
        **plain({"l.weight_packed": packed_words(values, bits), "l.weight_shape": np.array(values.shape)}),
        "l.weight_scale": ("BF16", scales),
    }
    if zeros is not None:
        tensors |= plain({"l.weight_zero_point": packed_words(zeros.T, bits).T.copy()})
    return tensors


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_keep_every_value(tmp_path: Path, bits: int, group_size: int, symmetric: bool) -> None:
    values, scales, zeros = matrix(bits, COLUMNS // group_size)
    tensors = packed_tensors(bits, values, scales, None if symmetric else zeros)
    source = opened(
        write_folder(tmp_path, tensors, settings("pack-quantized", bits, symmetric=symmetric)), "compressed-tensors"
    )
    logical = source.tensors["l.weight"]
    assert (logical.packing, logical.handling) == (Packing(bits, min(group_size, 128)), "exact")
    of_column = np.arange(COLUMNS) // group_size
    right = expected(values, scales, np.zeros_like(zeros) if symmetric else zeros, of_column)
    np.testing.assert_array_equal(source.read("l.weight"), right)
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right)


def test_one_scale_for_a_matrix(tmp_path: Path) -> None:
    values, scales, _ = matrix(4, 1)
    tensors = packed_tensors(4, values, scales[:1, 0], None)
    source = opened(write_folder(tmp_path, tensors, settings("pack-quantized")))
    right = (bf16_values(scales[:1, :1]).astype(np.float64) * values).astype(np.float32)
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right)


def test_groups_of_a_shuffled_order_are_dequantized(tmp_path: Path) -> None:
    values, scales, zeros = matrix(4, 2)
    order = RNG.permutation(np.arange(COLUMNS) // 128)
    tensors = packed_tensors(4, values, scales, zeros) | plain({"l.weight_g_idx": order.astype(np.int32)})
    source = opened(write_folder(tmp_path, tensors, settings("pack-quantized", symmetric=False)))
    assert "act-order" in source.tensors["l.weight"].note
    np.testing.assert_array_equal(source.read("l.weight"), expected(values, scales, zeros, order))


@pytest.mark.parametrize("zeros_too", [True, False])
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
def test_plain_integers_keep_every_value(tmp_path: Path, form: str, zeros_too: bool) -> None:
    values, scales, zeros = matrix(8, 1)
    tensors = plain({"l.weight": values.astype(np.int8)}) | {"l.weight_scale": ("BF16", scales)}
    if zeros_too:
        tensors |= plain({"l.weight_zero_point": zeros.astype(np.int8)})
    source = opened(write_folder(tmp_path, tensors, settings(form, 8)))
    assert source.tensors["l.weight"].packing == Packing(8, 128)
    right = expected(values, scales, zeros if zeros_too else zeros * 0, np.zeros(COLUMNS, int))
    np.testing.assert_array_equal(source.read("l.weight"), right)
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right)


def test_what_was_ignored_stays_and_other_scales_go(tmp_path: Path) -> None:
    values, scales, _ = matrix(4, 2)
    more = {"lm_head.weight": np.ones((4, 8), np.float16), "l.input_scale": np.ones(1, np.float32)}
    tensors = packed_tensors(4, values, scales, None) | plain(more)
    source = opened(write_folder(tmp_path, tensors, settings("pack-quantized")))
    assert set(source.tensors) == {"l.weight", "lm_head.weight"}
    assert "activations" in source.dropped["l.input_scale"]


def test_8_bit_floats_a_row_are_dequantized(tmp_path: Path) -> None:
    codes = RNG.integers(0, 127, (4, 64)).astype(np.uint8)
    tensors: Tensors = {"l.weight": ("F8_E4M3", codes), "l.weight_scale": bf16(RNG.random((4, 1)))}
    source = opened(write_folder(tmp_path, tensors, settings("float-quantized", 8)))
    assert source.tensors["l.weight"].handling == "requantized"
    right = np.array([[e4m3(int(c)) for c in row] for row in codes]) * bf16_values(tensors["l.weight_scale"][1])
    np.testing.assert_array_equal(source.read("l.weight"), right.astype(np.float32))


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


@pytest.mark.parametrize(
    ("change", "message"),
    [({"l.weight_shape": None}, "weight_shape"), ({"l.weight_scale": None}, "weight_scale"),
     ({"l.weight_zero_point": None}, "weight_zero_point"),
     ({"l.weight_shape": np.array([ROWS, 300])}, "weight_packed"),
     ({"l.weight_shape": np.array([2**40, COLUMNS])}, "weight_shape"),
     ({"l.weight_shape": np.array([-1, COLUMNS])}, "weight_shape"),
     ({"l.weight_scale": np.ones((ROWS, 3), np.float16)}, "weight_scale"),
     ({"l.weight_zero_point": np.ones((ROWS, 2), np.int32)}, "weight_zero_point"),
     ({"l.weight_packed": np.ones((ROWS, 32), np.float32)}, "weight_packed"),
     ({"l.weight_g_idx": np.full(COLUMNS, 5, np.int32)}, "weight_g_idx")],
)  # fmt: skip
def test_tensors_that_do_not_agree_are_refused(
    tmp_path: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    tensors = packed_tensors(4, *matrix(4, 2))
    for name, array in change.items():
        tensors.pop(name, None)
        if array is not None:
            tensors |= plain({name: array})
    with pytest.raises(ModelFileError, match=rf"model\.safetensors: tensor 'l\.\w+'.*{message}|'l\.{message}'"):
        opened(write_folder(tmp_path, tensors, settings("pack-quantized", symmetric=False)))


@pytest.mark.parametrize(
    "change",
    [{"format": "marlin-24"}, {"format": None}, {"format": ["None"]}, {"config_groups": {"g": {"format": ["None"]}}},
     {"sparsity_config": {"format": "sparse-24-bitmask"}}],
)  # fmt: skip
def test_formats_that_are_not_read_are_named(tmp_path: Path, change: dict[str, object]) -> None:
    tensors = packed_tensors(4, *matrix(4, 2))
    with pytest.raises(UnsupportedModelError, match=r"marlin-24|None|sparse-24-bitmask"):
        opened(write_folder(tmp_path, tensors, settings("pack-quantized") | change))


@pytest.mark.parametrize("bits", [3, 16, "4", None])
def test_bits_that_do_not_fit_the_words_are_refused(tmp_path: Path, bits: Any) -> None:
    tensors = packed_tensors(4, *matrix(4, 2))
    with pytest.raises(ModelFileError, match=r"'l\.weight_packed'.*num_bits"):
        opened(write_folder(tmp_path, tensors, settings("pack-quantized", bits)))
