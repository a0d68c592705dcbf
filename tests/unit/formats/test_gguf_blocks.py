"""Packed layouts against the `gguf` package's dequantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import GGUFTensor, arrays
from mlxinfer.formats.gguf.arrays import Packed, narrowed, read_parameter
from mlxinfer.formats.gguf.blocks import PACKED, packed_rows
from mlxinfer.formats.gguf.parameters import Parameter

if TYPE_CHECKING:
    from pathlib import Path

ROWS, COLUMNS = 24, 512
# Where the float16 factors of a block lie, so that random bytes get sane ones.
FACTORS = {
    Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q5_0: [0], Kind.Q5_1: [0, 2], Kind.Q8_0: [0], Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2], Kind.Q6_K: [208], Kind.Q3_K: [108], Kind.Q2_K: [80, 82], Kind.IQ4_NL: [0], Kind.IQ4_XS: [0],
    Kind.TQ1_0: [52], Kind.TQ2_0: [64], Kind.IQ3_S: [0], Kind.IQ2_XS: [0], Kind.IQ1_S: [0],
}  # fmt: skip


def random_tensor(folder: Path, kind: Kind, shape: tuple[int, ...] = (ROWS, COLUMNS), seed: int = 1) -> GGUFTensor:
    """Blocks of random codes: every code, scale and minimum a file can hold occurs, odd sub-blocks too."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    raw = rng.integers(0, 256, (count // block, size), dtype=np.uint8)
    for at in FACTORS.get(kind, []):
        raw[:, at : at + 2] = (rng.standard_normal(len(raw)) * 0.05).astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind == Kind.MXFP4:
        raw[:, 0] = rng.integers(100, 150, len(raw))
    if kind == Kind.NVFP4:
        raw[:, :4] = rng.integers(0, 0x7F, (len(raw), 4))
    if kind == Kind.TQ2_0:
        # Two bits have a fourth value that no writer uses.
        codes = rng.integers(0, 3, (len(raw), 64, 4), dtype=np.uint8) << np.arange(0, 8, 2, dtype=np.uint8)
        raw[:, :64] = np.bitwise_or.reduce(codes, axis=-1)
    path = folder / f"{kind.name}.bin"
    path.write_bytes(raw.tobytes())
    return GGUFTensor("w", shape, kind, path, 0, raw.nbytes)


def reference(tensor: GGUFTensor) -> np.ndarray:
    return dequantize(tensor.read(), tensor.type).astype(np.float32).reshape(tensor.shape)


def read_tensor(tensor: GGUFTensor, dtype: mx.Dtype) -> Packed | mx.array:
    return read_parameter(Parameter("w.weight", tensor.shape, (tensor,)), dtype)


def unpacked(packed: Packed) -> np.ndarray:
    return np.array(
        mx.dequantize(
            packed.weight,
            packed.scales,
            packed.biases,
            group_size=packed.layout.group_size,
            bits=packed.layout.bits,
            mode=packed.layout.mode,
            dtype=mx.float32,
        )
    )


@pytest.mark.parametrize("kind", [k for k in PACKED if PACKED[k].exact], ids=lambda k: k.name)
def test_packed_weights_equal_the_reference_bit_for_bit(tmp_path: Path, kind: Kind) -> None:
    tensor = random_tensor(tmp_path, kind)
    packed = read_tensor(tensor, mx.float32)
    assert isinstance(packed, Packed)
    assert packed.layout == PACKED[kind]
    np.testing.assert_array_equal(unpacked(packed), reference(tensor))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda k: k.name)
def test_float16_scales_are_the_files_own(tmp_path: Path, kind: Kind) -> None:
    tensor = random_tensor(tmp_path, kind)
    exact, half = read_tensor(tensor, mx.float32), read_tensor(tensor, mx.float16)
    assert isinstance(exact, Packed)
    assert isinstance(half, Packed)
    for part in ("scales", "biases"):
        assert half.arrays()[part].dtype == mx.float16
        assert mx.array_equal(half.arrays()[part].astype(mx.float32), exact.arrays()[part])


@pytest.mark.parametrize(
    "kind", [Kind.Q6_K, Kind.Q3_K, Kind.Q2_K, Kind.IQ3_S, Kind.IQ2_XS, Kind.IQ1_S], ids=lambda k: k.name
)
def test_other_types_are_dequantized_as_the_reference_does(tmp_path: Path, kind: Kind) -> None:
    tensor = random_tensor(tmp_path, kind)
    array = read_tensor(tensor, mx.float32)
    assert isinstance(array, mx.array)
    np.testing.assert_array_equal(np.array(array), reference(tensor))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda k: k.name)
def test_float_types_keep_their_values(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    if kind == Kind.F16:
        raw, values = values.astype("<f2"), values.astype("<f2").astype(np.float32)
    elif kind == Kind.BF16:
        raw = (values.view(np.uint32) >> 16).astype("<u2")
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        raw = values
    path = tmp_path / "w.bin"
    path.write_bytes(raw.tobytes())
    array = read_tensor(GGUFTensor("w", (4, 6), kind, path, 0, raw.nbytes), mx.float32)
    assert isinstance(array, mx.array)
    np.testing.assert_array_equal(np.array(array), values)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q6_K], ids=lambda k: k.name)
def test_reading_in_slices_changes_nothing(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(tmp_path, kind)
    monkeypatch.setattr(arrays, "SLICE_ELEMENTS", 5 * COLUMNS)
    value = read_tensor(tensor, mx.float32)
    np.testing.assert_array_equal(unpacked(value) if isinstance(value, Packed) else np.array(value), reference(tensor))


def test_a_vector_of_a_packed_type_becomes_floats(tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path, Kind.Q8_0, (64,))
    array = read_tensor(tensor, mx.float32)
    assert isinstance(array, mx.array)
    np.testing.assert_array_equal(np.array(array), reference(tensor))


def test_a_block_scale_that_is_not_finite_is_corruption(tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path, Kind.Q4_1)
    raw = bytearray(tensor.path.read_bytes())
    raw[20:22] = np.float16(np.inf).tobytes()
    tensor.path.write_bytes(raw)
    with pytest.raises(ModelFileError, match="tensor w has a block scale that is not finite"):
        read_tensor(tensor, mx.float32)


def test_a_type_without_a_dequantizer_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="type I32"):
        read_tensor(random_tensor(tmp_path, Kind.I32, (4, 4)), mx.float32)


def test_a_file_that_shrinks_after_its_check_is_an_error(tmp_path: Path) -> None:
    tensor = random_tensor(tmp_path, Kind.Q8_0)
    tensor.path.write_bytes(tensor.path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="tensor w has"):
        read_tensor(tensor, mx.float32)


def test_what_half_precision_holds_exactly_can_come_in_half_precision(tmp_path):
    q4 = read_tensor(random_tensor(tmp_path, Kind.Q4_1, (4, 64)), mx.float32)
    half = narrowed(q4)
    assert isinstance(q4, Packed)
    assert isinstance(half, Packed)
    assert {a.dtype for a in half.arrays().values()} == {mx.uint32, mx.float16}
    assert mx.array_equal(half.scales.astype(mx.float32), q4.scales)
    thirds = mx.full((2, 2), 1 / 3)
    assert narrowed(thirds) is thirds
    for array, dtype in ((mx.full((2, 2), 2.0**100), mx.bfloat16), (mx.ones((4,)), mx.float32)):
        found = narrowed(array)
        assert isinstance(found, mx.array)
        assert found.dtype == dtype


def test_six_bits_in_eight_are_nearer_than_by_minimum_and_maximum(tmp_path: Path) -> None:
    # 6e-3 is what is promised; min/max of each group gives 4.1e-3 on these random blocks, and nothing exact.
    tensor = random_tensor(tmp_path, Kind.Q6_K, (64, 512))
    expected = reference(tensor)
    value = read_parameter(Parameter("w.weight", tensor.shape, (tensor,)), mx.float16)
    assert isinstance(value, Packed)
    assert (value.layout.bits, value.layout.group_size) == (8, 32)
    words, scales, biases = packed_rows(tensor, tensor.read())
    assert biases is not None
    codes = words.view(np.uint8).reshape(64, -1, 32).astype(np.float32)
    found = (codes * scales[..., None] + biases[..., None]).reshape(expected.shape)
    assert np.linalg.norm(found - expected) < 3.6e-3 * np.linalg.norm(expected)
    assert np.isclose(found, expected, rtol=1e-5, atol=0).mean() > 0.5
    assert (codes.max(), codes.min()) == (254, 0)


def test_six_bits_of_nothing_but_zeros_stay_zeros(tmp_path: Path) -> None:
    path = tmp_path / "zero.bin"
    path.write_bytes(bytes(210 * 4))
    tensor = GGUFTensor("w", (4, 256), Kind.Q6_K, path, 0, 840)
    words, scales, biases = packed_rows(tensor, tensor.read())
    assert biases is not None
    assert not (words.view(np.uint8).reshape(4, -1, 32) * scales[..., None] + biases[..., None]).any()


@pytest.mark.parametrize(("kind", "byte"), [(Kind.MXFP4, 0xFF), (Kind.NVFP4, 0x7F), (Kind.NVFP4, 0x80)])
def test_a_float_scale_that_is_no_number_is_corruption(tmp_path: Path, kind: Kind, byte: int) -> None:
    tensor = random_tensor(tmp_path, kind)
    raw = bytearray(tensor.path.read_bytes())
    raw[0] = byte
    tensor.path.write_bytes(raw)
    with pytest.raises(ModelFileError, match="not finite"):
        read_tensor(tensor, mx.float32)


def test_a_double_becomes_a_float(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((4, 6))
    path = tmp_path / "w.bin"
    path.write_bytes(values.tobytes())
    array = read_tensor(GGUFTensor("w", (4, 6), Kind.F64, path, 0, values.nbytes), mx.float32)
    assert isinstance(array, mx.array)
    np.testing.assert_array_equal(np.array(array), values.astype(np.float32))
