"""GPTQ and AWQ against packers written from the formats' descriptions: the codes are known before they are packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from tests.unit.convert.sources.checkpoints import (
    OF_NUMPY,
    Tensors,
    as_int32,
    bitstream,
    dequantized,
    opened,
    plain,
    write_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

ROWS, COLUMNS = 32, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def matrix(bits: int, groups: int, *, symmetric: bool = False, seed: int = 0) -> tuple[np.ndarray, ...]:
    """(codes [rows, columns], scales [rows, groups] of float16, zeros [rows, groups])."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS))
    scales = (rng.random((ROWS, groups)) * 0.02 + 0.001).astype(np.float16)
    zeros = rng.integers(1, 1 << bits, (ROWS, groups))
    return codes, scales, np.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros


def floats(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, of_column: np.ndarray) -> np.ndarray:
    out = np.empty(codes.shape, np.float64)
    for row in range(len(codes)):
        for column in range(codes.shape[1]):
            group = of_column[column]
            out[row, column] = float(scales[row, group]) * (int(codes[row, column]) - int(zeros[row, group]))
    return out.astype(np.float32)


def gptq(
    bits: int, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, *, less: int = 1
) -> dict[str, np.ndarray]:
    stored = (zeros - less) % (1 << bits)
    return {
        "m.l.qweight": as_int32([bitstream(row, bits) for row in codes]).T.copy(),
        "m.l.qzeros": as_int32([bitstream(group, bits) for group in stored.T]),
        "m.l.scales": scales.T.copy(),
    }


def awq(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> dict[str, np.ndarray]:
    def words(table: np.ndarray) -> np.ndarray:
        runs = table.reshape(len(table), -1, 8)[:, :, AWQ_ORDER]
        return as_int32([[bitstream(run, 4)[0] for run in line] for line in runs])

    return {"m.l.qweight": words(codes.T), "m.l.qzeros": words(zeros.T), "m.l.scales": scales.T.copy()}


def settings(method: str, bits: int, group_size: int, **more: object) -> dict[str, object]:
    return {"quant_method": method, "bits": bits, "group_size": group_size, **more}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_keeps_every_value(tmp_path: Path, bits: int, group_size: int, symmetric: bool) -> None:
    size = COLUMNS if group_size == -1 else group_size
    codes, scales, zeros = matrix(bits, COLUMNS // size, symmetric=symmetric)
    order = np.arange(COLUMNS) // size
    tensors = plain({**gptq(bits, codes, scales, zeros), "m.l.g_idx": order.astype(np.int32)})
    source = opened(write_folder(tmp_path, tensors, settings("gptq", bits, group_size)), "gptq")
    logical = source.tensors["m.l.weight"]
    assert logical.packing == Packing(bits, min(size, 128))
    assert (logical.shape, logical.handling) == ((ROWS, COLUMNS), "exact")
    assert set(logical.made_of) == set(tensors)
    expected = floats(codes, scales, zeros, order)
    np.testing.assert_array_equal(source.read("m.l.weight"), expected)
    np.testing.assert_array_equal(dequantized(source, "m.l.weight"), expected)


def test_gptq_v2_stores_the_zero_itself(tmp_path: Path) -> None:
    codes, scales, zeros = matrix(4, 2)
    tensors = plain(gptq(4, codes, scales, zeros, less=0))
    source = opened(write_folder(tmp_path, tensors, settings("gptq", 4, 128, checkpoint_format="gptq_v2")))
    expected = floats(codes, scales, zeros, np.arange(COLUMNS) // 128)
    np.testing.assert_array_equal(dequantized(source, "m.l.weight"), expected)


def test_a_gptq_zero_of_nought_wraps(tmp_path: Path) -> None:
    codes, scales, zeros = matrix(4, 2)
    zeros[0, 0] = 0
    source = opened(write_folder(tmp_path, plain(gptq(4, codes, scales, zeros)), settings("gptq", 4, 128)))
    expected = floats(codes, scales, zeros, np.arange(COLUMNS) // 128)
    np.testing.assert_array_equal(dequantized(source, "m.l.weight"), expected)


def test_act_order_is_dequantized_and_said_so(tmp_path: Path) -> None:
    codes, scales, zeros = matrix(4, 2)
    order = np.random.default_rng(1).permutation(np.arange(COLUMNS) // 128)
    tensors = plain({**gptq(4, codes, scales, zeros), "m.l.g_idx": order.astype(np.int32)})
    source = opened(write_folder(tmp_path, tensors, settings("gptq", 4, 128, desc_act=True)))
    logical = source.tensors["m.l.weight"]
    assert (logical.packing, logical.handling) == (None, "requantized")
    assert "act-order" in logical.note
    np.testing.assert_array_equal(source.read("m.l.weight"), floats(codes, scales, zeros, order))


@pytest.mark.parametrize("group_size", [16, 96])
def test_groups_that_mlx_lacks_are_dequantized(tmp_path: Path, group_size: int) -> None:
    groups = -(-COLUMNS // group_size)
    codes, scales, zeros = matrix(4, groups)
    source = opened(write_folder(tmp_path, plain(gptq(4, codes, scales, zeros)), settings("gptq", 4, group_size)))
    assert source.tensors["m.l.weight"].handling == "requantized"
    expected = floats(codes, scales, zeros, np.arange(COLUMNS) // group_size)
    np.testing.assert_array_equal(source.read("m.l.weight"), expected)


def test_float32_scales_are_near(tmp_path: Path) -> None:
    codes, scales, zeros = matrix(4, 2)
    wide = scales.astype(np.float32) * np.float32(1.0001)
    source = opened(write_folder(tmp_path, plain(gptq(4, codes, wide, zeros)), settings("gptq", 4, 128)))
    assert source.tensors["m.l.weight"].handling == "near"
    expected = floats(codes, wide, zeros, np.arange(COLUMNS) // 128)
    np.testing.assert_allclose(dequantized(source, "m.l.weight"), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_awq_keeps_every_value(tmp_path: Path, group_size: int) -> None:
    size = COLUMNS if group_size == -1 else group_size
    codes, scales, zeros = matrix(4, COLUMNS // size)
    tensors = plain(awq(codes, scales, zeros))
    source = opened(write_folder(tmp_path, tensors, settings("awq", 4, group_size, version="gemm")), "awq")
    assert source.tensors["m.l.weight"].packing == Packing(4, min(size, 128))
    expected = floats(codes, scales, zeros, np.arange(COLUMNS) // size)
    np.testing.assert_array_equal(source.read("m.l.weight"), expected)
    np.testing.assert_array_equal(dequantized(source, "m.l.weight"), expected)


def test_symmetric_awq_is_about_eight(tmp_path: Path) -> None:
    codes, scales, zeros = matrix(4, 2, symmetric=True)
    arrays = awq(codes, scales, zeros)
    del arrays["m.l.qzeros"]
    source = opened(write_folder(tmp_path, plain(arrays), settings("awq", 4, 128, zero_point=False)))
    expected = floats(codes, scales, zeros, np.arange(COLUMNS) // 128)
    np.testing.assert_array_equal(dequantized(source, "m.l.weight"), expected)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_modules_that_were_left_alone_stay_floats(tmp_path: Path, method: str) -> None:
    codes, scales, zeros = matrix(4, 2)
    head = np.ones((4, 8), np.float16)
    arrays = gptq(4, codes, scales, zeros) if method == "gptq" else awq(codes, scales, zeros)
    bias = np.ones(ROWS, np.float16)
    tensors = plain({**arrays, "lm_head.weight": head, "m.l.bias": bias, "m.l.k_scale": np.ones(1, np.float32)})
    source = opened(write_folder(tmp_path, tensors, settings(method, 4, 128, modules_to_not_convert=["lm_head"])))
    assert set(source.tensors) == {"m.l.weight", "lm_head.weight", "m.l.bias"}
    assert source.tensors["lm_head.weight"].packing is None
    assert "KV cache" in source.dropped["m.l.k_scale"]
    assert "quantization_config" not in source.config


def changed(tensors: Tensors, name: str, array: np.ndarray | None) -> Tensors:
    rest = {key: value for key, value in tensors.items() if key != name}
    return rest if array is None else {**rest, name: (OF_NUMPY[str(array.dtype)], array)}


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("name", ["qweight", "scales", "qzeros"])
def test_half_a_module_is_refused(tmp_path: Path, method: str, name: str) -> None:
    arrays = gptq(4, *matrix(4, 2)) if method == "gptq" else awq(*matrix(4, 2))
    folder = write_folder(tmp_path, changed(plain(arrays), f"m.l.{name}", None), settings(method, 4, 128))
    with pytest.raises(ModelFileError, match=rf"model\.safetensors: tensor 'm\.l\.\w+' needs m\.l\.{name}"):
        opened(folder)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("name", "array"),
    [("scales", np.ones((2, 31), np.float16)), ("scales", np.ones((3, ROWS), np.float16)),
     ("qzeros", np.ones((2, 3), np.int32)), ("qzeros", np.ones((1, 4), np.int32)),
     ("qweight", np.ones((32, 4), np.int64)), ("qweight", np.ones((2, 2, 2), np.int32)),
     ("scales", np.ones((2, ROWS), np.int32)), ("qweight", np.ones((0, 4), np.int32))],
)  # fmt: skip
def test_tensors_that_do_not_agree_are_refused(tmp_path: Path, method: str, name: str, array: np.ndarray) -> None:
    arrays = gptq(4, *matrix(4, 2)) if method == "gptq" else awq(*matrix(4, 2))
    folder = write_folder(tmp_path, changed(plain(arrays), f"m.l.{name}", array), settings(method, 4, 128))
    with pytest.raises(ModelFileError, match=r"model\.safetensors: tensor 'm\.l\."):
        opened(folder)


@pytest.mark.parametrize("bad", [2, -1])
def test_a_group_index_out_of_range_is_refused(tmp_path: Path, bad: int) -> None:
    order = (np.arange(COLUMNS) // 128).astype(np.int32)
    order[7] = bad
    tensors = plain({**gptq(4, *matrix(4, 2)), "m.l.g_idx": order})
    with pytest.raises(ModelFileError, match=r"'m\.l\.g_idx' has .*0 to 1"):
        opened(write_folder(tmp_path, tensors, settings("gptq", 4, 128)))


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    codes, scales, zeros = matrix(4, 2)
    scales[3, 1] = np.inf
    source = opened(write_folder(tmp_path, plain(gptq(4, codes, scales, zeros)), settings("gptq", 4, 128)))
    for read in (source.read, source.read_packed):
        with pytest.raises(ModelFileError, match=r"'m\.l\.scales'.*not finite"):
            read("m.l.weight")


@pytest.mark.parametrize(
    ("method", "change"),
    [("gptq", {"bits": 5}), ("gptq", {"bits": "4"}), ("gptq", {"bits": None}), ("gptq", {"group_size": 0}),
     ("gptq", {"group_size": -2}), ("gptq", {"checkpoint_format": "marlin"}), ("gptq", {"checkpoint_format": ["gptq"]}),
     ("gptq", {"group_size": 2**40}),
     ("awq", {"bits": 8}), ("awq", {"version": "gemv"}), ("awq", {"group_size": 1.5})],
)  # fmt: skip
def test_settings_that_are_not_known_are_refused(tmp_path: Path, method: str, change: dict[str, object]) -> None:
    arrays = gptq(4, *matrix(4, 2)) if method == "gptq" else awq(*matrix(4, 2))
    folder = write_folder(tmp_path, plain(arrays), settings(method, 4, 128) | change)
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        opened(folder)
