"""fp8, nvfp4, mxfp4 and BitNet against decoders written from the formats' descriptions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from tests.unit.convert.sources.checkpoints import Tensors, bf16, bf16_values, dequantized, opened, plain, write_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RNG = np.random.default_rng(0)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": None}


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Sign, exponent with a bias of half its range, mantissa; no infinities."""
    bias = (1 << (exponent_bits - 1)) - 1
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    size = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    return -size if code >> (exponent_bits + mantissa_bits) else size


def e4m3(codes: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda c: minifloat(int(c), 4, 3))(codes)


def e2m1(packed: np.ndarray) -> np.ndarray:
    """Bytes [..., n] to values [..., 2n], the low nibble first."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2))
    out[..., 0::2] = np.vectorize(lambda b: minifloat(int(b) & 15, 2, 1))(packed)
    out[..., 1::2] = np.vectorize(lambda b: minifloat(int(b) >> 4, 2, 1))(packed)
    return out


def fp8_codes(rows: int, columns: int) -> np.ndarray:
    codes = RNG.integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0
    return codes


def test_float32_block_scales_are_multiplied_in(tmp_path: Path) -> None:
    codes, scales = fp8_codes(200, 320), RNG.random((2, 3)).astype(np.float32)
    tensors: Tensors = {"l.weight": ("F8_E4M3", codes), **plain({"l.weight_scale_inv": scales})}
    source = opened(write_folder(tmp_path, tensors, FP8), "fp8")
    logical = source.tensors["l.weight"]
    assert (logical.packing, logical.handling) == (None, "requantized")
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :320]
    np.testing.assert_array_equal(source.read("l.weight"), (e4m3(codes) * wide).astype(np.float32))


@pytest.mark.parametrize("kind", ["F32", "F8_E8M0", "BF16"])
def test_power_of_two_block_scales_become_mxfp8(tmp_path: Path, kind: str) -> None:
    codes, exponents = fp8_codes(200, 320), RNG.integers(100, 130, (2, 3)).astype(np.uint8)
    scales = np.ldexp(1.0, exponents.astype(int) - 127).astype(np.float32)
    stored = {"F32": ("F32", scales), "F8_E8M0": ("F8_E8M0", exponents), "BF16": bf16(scales)}[kind]
    tensors: Tensors = {"l.weight": ("F8_E4M3", codes), "l.weight_scale_inv": stored}
    source = opened(write_folder(tmp_path, tensors, FP8 | {"scale_fmt": "ue8m0"}))
    logical = source.tensors["l.weight"]
    assert (logical.packing, logical.handling) == (Packing(8, 32, "mxfp8"), "exact")
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :320]
    right = (e4m3(codes) * wide).astype(np.float32)
    np.testing.assert_array_equal(source.read("l.weight"), right)
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right)


def test_scales_that_only_claim_to_be_powers_of_two_are_dequantized(tmp_path: Path) -> None:
    tensors: Tensors = {
        "l.weight": ("F8_E4M3", fp8_codes(128, 128)), **plain({"l.weight_scale_inv": np.full((1, 1), 0.3, np.float32)})
    }  # fmt: skip
    source = opened(write_folder(tmp_path, tensors, FP8 | {"scale_fmt": "ue8m0"}))
    assert source.tensors["l.weight"].packing is None


@pytest.mark.parametrize("shape", [(), (1,), (8, 1), (8,)])
def test_one_fp8_scale_for_a_matrix_or_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    codes, scales = fp8_codes(8, 64), RNG.random(shape).astype(np.float32)
    tensors: Tensors = {"l.weight": ("F8_E4M3", codes), **plain({"l.weight_scale": np.asarray(scales)})}
    source = opened(write_folder(tmp_path, tensors, {"quant_method": "fbgemm_fp8"}))
    by_row = np.broadcast_to(np.reshape(scales, (-1, 1)), (8, 1))
    np.testing.assert_array_equal(source.read("l.weight"), (e4m3(codes) * by_row).astype(np.float32))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [({"l.weight": ("F8_E4M3", fp8_codes(8, 64))}, r"needs l\.weight_scale"),
     (plain({"l.weight_scale_inv": np.ones((1, 1), np.float32)}), r"needs l\.weight"),
     ({"l.weight": ("F8_E4M3", fp8_codes(200, 64)), **plain({"l.weight_scale_inv": np.ones((3, 1), np.float32)})},
      r"'l\.weight_scale_inv' has shape"),
     ({"l.weight": ("F8_E4M3", fp8_codes(8, 64)), **plain({"l.weight_scale_inv": np.ones((1, 1), np.int32)})},
      r"'l\.weight_scale_inv' is I32"),
     ({"l.weight": ("F16", np.ones((8, 64), np.float16)), **plain({"l.weight_scale_inv": np.ones((1, 1), np.float32)})},
      r"'l\.weight' is F16")],
)  # fmt: skip
def test_fp8_tensors_that_do_not_agree_are_refused(tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        opened(write_folder(tmp_path, tensors, FP8))


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    codes = fp8_codes(8, 64)
    codes[3, 5] = 0xFF
    tensors: Tensors = {"l.weight": ("F8_E4M3", codes), **plain({"l.weight_scale_inv": np.ones((1, 1), np.float32)})}
    source = opened(write_folder(tmp_path, tensors, FP8))
    with pytest.raises(ModelFileError, match=r"'l\.weight' holds NaN"):
        source.read("l.weight")


def nvfp4(rows: int, columns: int, whole: float, codes: np.ndarray | None = None) -> tuple[Tensors, np.ndarray]:
    packed = RNG.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    scales = RNG.integers(0x30, 0x7F, (rows, columns // 16)).astype(np.uint8) if codes is None else codes
    tensors: Tensors = {
        **plain({"l.weight": packed, "l.weight_scale_2": np.array(whole, np.float32)}),
        "l.weight_scale": ("F8_E4M3", scales), **plain({"l.input_scale": np.array(1, np.float32)}),
    }  # fmt: skip
    wide = np.repeat(e4m3(scales).astype(np.float32) * np.float32(whole), 16, axis=1)
    return tensors, (e2m1(packed) * wide).astype(np.float32)


@pytest.mark.parametrize("whole", [1.0, 0.5, 2.0**-4])
def test_nvfp4_is_kept_where_its_scale_goes_into_the_others(tmp_path: Path, whole: float) -> None:
    tensors, right = nvfp4(8, 64, whole)
    source = opened(write_folder(tmp_path, tensors, MODELOPT), "modelopt")
    logical = source.tensors["l.weight"]
    assert (logical.packing, logical.handling) == (Packing(4, 16, "nvfp4"), "exact")
    np.testing.assert_array_equal(source.read("l.weight"), right)
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right)
    assert "l.input_scale" in source.dropped


@pytest.mark.parametrize("whole", [0.3, 2.0**-12, 2.0**9])
def test_nvfp4_is_dequantized_where_it_does_not(tmp_path: Path, whole: float) -> None:
    tensors, right = nvfp4(8, 64, whole)
    source = opened(write_folder(tmp_path, tensors, MODELOPT))
    logical = source.tensors["l.weight"]
    assert (logical.packing, logical.handling) == (None, "requantized")
    assert "whole matrix" in logical.note
    np.testing.assert_allclose(source.read("l.weight"), right, rtol=1e-6)


def test_hf_quant_config_says_that_it_is_modelopt(tmp_path: Path) -> None:
    tensors, right = nvfp4(8, 64, 1.0)
    folder = write_folder(tmp_path, tensors)
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    source = opened(folder, "modelopt")
    np.testing.assert_array_equal(source.read("l.weight"), right)


def test_modelopt_fp8_and_an_algorithm_that_is_not_read(tmp_path: Path) -> None:
    codes = fp8_codes(8, 64)
    tensors: Tensors = {"l.weight": ("F8_E4M3", codes), **plain({"l.weight_scale": np.array(0.25, np.float32)})}
    source = opened(write_folder(tmp_path, tensors, MODELOPT | {"quant_algo": "FP8"}))
    np.testing.assert_array_equal(source.read("l.weight"), (e4m3(codes) * 0.25).astype(np.float32))
    with pytest.raises(UnsupportedModelError, match="W4A8"):
        opened(write_folder(tmp_path, tensors, MODELOPT | {"quant_algo": "W4A8"}))


def test_the_whole_scale_of_compressed_nvfp4_divides(tmp_path: Path) -> None:
    tensors, _ = nvfp4(8, 64, 1.0)
    packed, scales = tensors["l.weight"][1], tensors["l.weight_scale"][1]
    named: Tensors = {
        **plain({"l.weight_packed": packed, "l.weight_global_scale": np.array([4], np.float32)}),
        "l.weight_scale": ("F8_E4M3", scales),
    }
    settings = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}
    source = opened(write_folder(tmp_path, named, settings))
    right = (e2m1(packed) * np.repeat(e4m3(scales) / 4, 16, axis=1)).astype(np.float32)
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right)


def test_compressed_mxfp4_is_mlx_s_own(tmp_path: Path) -> None:
    packed = RNG.integers(0, 256, (8, 32)).astype(np.uint8)
    exponents = RNG.integers(100, 130, (8, 2)).astype(np.uint8)
    settings = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    source = opened(write_folder(tmp_path, plain({"l.weight_packed": packed, "l.weight_scale": exponents}), settings))
    right = e2m1(packed) * np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 32, axis=1)
    assert source.tensors["l.weight"].packing == Packing(4, 32, "mxfp4")
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right.astype(np.float32))
    np.testing.assert_array_equal(source.read("l.weight"), right.astype(np.float32))


def gpt_oss(experts: int = 3, rows: int = 8, groups: int = 2) -> tuple[Tensors, np.ndarray]:
    blocks = RNG.integers(0, 256, (experts, rows, groups, 16)).astype(np.uint8)
    exponents = RNG.integers(100, 130, (experts, rows, groups)).astype(np.uint8)
    values = e2m1(blocks) * np.ldexp(1.0, exponents.astype(int) - 127)[..., None]
    tensors: Tensors = {
        **plain({"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": exponents}),
        "e.gate_up_proj_bias": bf16(RNG.random((experts, rows))),
        **plain({"e.down_proj_blocks": blocks, "e.down_proj_scales": exponents}),
        "e.down_proj_bias": bf16(RNG.random((experts, rows))),
    }
    return tensors, values.reshape(experts, rows, groups * 32).astype(np.float32)


def test_gpt_oss_experts_keep_every_value(tmp_path: Path) -> None:
    tensors, values = gpt_oss()
    source = opened(write_folder(tmp_path, tensors, {"quant_method": "mxfp4"}), "mxfp4")
    for name, rows in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2)), ("down_proj", slice(None))):
        logical = source.tensors[f"e.{name}.weight"]
        assert (logical.packing, logical.handling) == (Packing(4, 32, "mxfp4"), "exact")
        right = values[:, rows]
        assert logical.shape == right.shape
        np.testing.assert_array_equal(source.read(logical.name), right)
        np.testing.assert_array_equal(dequantized(source, logical.name), right)
        np.testing.assert_array_equal(dequantized(source, logical.name, 1), right[1])
        np.testing.assert_array_equal(source.read(logical.name, 2), right[2])
        stored = tensors["e.down_proj_bias" if name == "down_proj" else "e.gate_up_proj_bias"][1]
        np.testing.assert_array_equal(source.read(f"e.{name}.bias"), stored[:, rows])
    assert sum(t.nbytes for t in source.tensors.values()) == sum(a.nbytes for _, a in tensors.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda t: t.pop("e.down_proj_scales"), "needs e.down_proj_scales"),
     (lambda t: t.pop("e.gate_up_proj_blocks"), "needs e.gate_up_proj_blocks"),
     (lambda t: t.update(plain({"e.down_proj_scales": np.ones((3, 8, 3), np.uint8)})), "'e.down_proj_scales' has"),
     (lambda t: t.update(plain({"e.down_proj_blocks": np.ones((3, 8, 2, 8), np.uint8)})), "'e.down_proj_blocks' has"),
     (lambda t: t.update(plain({"e.gate_up_proj_blocks": np.ones((3, 7, 2, 16), np.uint8),
                                "e.gate_up_proj_scales": np.ones((3, 7, 2), np.uint8)})), "even number")],
)  # fmt: skip
def test_gpt_oss_tensors_that_do_not_agree_are_refused(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    tensors, _ = gpt_oss()
    change(tensors)
    with pytest.raises(ModelFileError, match=message):
        opened(write_folder(tmp_path, tensors, {"quant_method": "mxfp4"}))


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_bitnet_keeps_every_value(tmp_path: Path, linear_class: str) -> None:
    signs = RNG.integers(-1, 2, (16, 64))
    packed = np.zeros((4, 64), np.uint8)
    for quarter in range(4):
        packed |= (signs[quarter * 4 : quarter * 4 + 4] + 1).astype(np.uint8) << (2 * quarter)
    scale = bf16(np.array([1.2]))
    settings = {"quant_method": "bitnet", "linear_class": linear_class}
    source = opened(
        write_folder(tmp_path, {**plain({"l.weight": packed}), "l.weight_scale": scale}, settings), "bitnet"
    )
    factor = bf16_values(scale[1])[0]
    right = (signs * (factor if linear_class == "autobitlinear" else np.float32(1) / factor)).astype(np.float32)
    assert source.tensors["l.weight"].packing == Packing(2, 64)
    np.testing.assert_array_equal(source.read("l.weight"), right)
    np.testing.assert_array_equal(dequantized(source, "l.weight"), right)


def test_rows_that_are_no_whole_groups_of_32_are_dequantized(tmp_path: Path) -> None:
    codes = fp8_codes(8, 48)
    tensors: Tensors = {
        "l.weight": ("F8_E4M3", codes),
        "l.weight_scale_inv": ("F8_E8M0", np.full((1, 1), 126, np.uint8)),
    }
    source = opened(write_folder(tmp_path, tensors, FP8 | {"scale_fmt": "ue8m0"}))
    assert source.tensors["l.weight"].packing is None
    np.testing.assert_array_equal(source.read("l.weight"), (e4m3(codes) / 2).astype(np.float32))
