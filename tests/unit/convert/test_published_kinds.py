"""Whole models in the kinds that others publish: the converted one's logits against its weights written out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import upstream
from mlxinfer.convert import ConvertOptions, convert
from mlxinfer.formats.safetensors import shard_files
from tests.unit.convert.fake import llama_config, moe_config, random_weights
from tests.unit.convert.sources import test_compressed, test_gptq, test_small_floats
from tests.unit.convert.sources.checkpoints import Tensors, bf16, bf16_values, opened, plain, write_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GROUP = 32
Encoded = tuple[Tensors, np.ndarray]
"""What the file holds of a module (without its path), and its weight written out, float32."""


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    groups = shape[1] // GROUP
    scales = (rng.random((shape[0], groups)) * 0.02 + 0.005).astype(np.float16)
    zeros = rng.integers(1, 16, (shape[0], groups))
    return rng.integers(0, 16, shape), scales, zeros, np.arange(shape[1]) // GROUP


def gptq(rng: np.random.Generator, shape: tuple[int, ...]) -> Encoded:
    codes, scales, zeros, order = _codes(rng, shape)
    tensors = plain(test_gptq.gptq(4, codes, scales, zeros) | {"m.l.g_idx": order.astype(np.int32)})
    return _named(tensors, "m.l."), test_gptq.floats(codes, scales, zeros, order)


def act_order(rng: np.random.Generator, shape: tuple[int, ...]) -> Encoded:
    codes, scales, zeros, order = _codes(rng, shape)
    order = rng.permutation(order)
    tensors = plain(test_gptq.gptq(4, codes, scales, zeros) | {"m.l.g_idx": order.astype(np.int32)})
    return _named(tensors, "m.l."), test_gptq.floats(codes, scales, zeros, order)


def awq(rng: np.random.Generator, shape: tuple[int, ...]) -> Encoded:
    codes, scales, zeros, order = _codes(rng, shape)
    return _named(plain(test_gptq.awq(codes, scales, zeros)), "m.l."), test_gptq.floats(codes, scales, zeros, order)


def compressed(rng: np.random.Generator, shape: tuple[int, ...]) -> Encoded:
    groups = shape[1] // GROUP
    values, zeros = rng.integers(-8, 8, shape), rng.integers(-8, 8, (shape[0], groups))
    scales = bf16(rng.random((shape[0], groups)) * 0.02 + 0.005)[1]
    tensors = test_compressed.packed_tensors(4, values, scales, zeros)
    return _named(tensors, "l."), test_compressed.expected(values, scales, zeros, np.arange(shape[1]) // GROUP)


def fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> Encoded:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 127) == 127] = 0
    blocks = tuple(-(-n // 128) for n in shape)
    scales = (rng.random(blocks) * 1e-3 + 1e-4).astype(np.float32)
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
    tensors: Tensors = {"weight": ("F8_E4M3", codes), **plain({"weight_scale_inv": scales})}
    return tensors, (test_small_floats.e4m3(codes) * wide).astype(np.float32)


def _named(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items()}


KINDS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, ...]], Encoded], dict[str, Any], str]] = {
    "gptq": (gptq, test_gptq.settings("gptq", 4, GROUP), "exact"),
    "gptq act-order": (act_order, test_gptq.settings("gptq", 4, GROUP, desc_act=True), "requantized"),
    "awq": (awq, test_gptq.settings("awq", 4, GROUP, version="gemm", zero_point=True), "exact"),
    "compressed-tensors": (compressed, test_compressed.settings("pack-quantized", 4, symmetric=False), "exact"),
    "fp8": (fp8, test_small_floats.FP8, "requantized"),
}


@pytest.mark.parametrize("config", [llama_config(), moe_config()], ids=["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_quantization_computes_what_its_weights_written_out_do(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    encode, settings, handling = KINDS[kind]
    rng = np.random.default_rng(7)
    tensors: Tensors = {}
    written: dict[str, mx.array] = {}
    encoded: set[str] = set()
    for name, array in random_weights(config).items():
        path = name.removesuffix(".weight")
        if not path.endswith("_proj"):
            stored = bf16(np.array(array.astype(mx.float32)) * (0.05 if "norm" not in name else 1))
            tensors[name] = stored
            written[name] = mx.array(bf16_values(stored[1]))
            continue
        parts, floats = encode(rng, array.shape)
        tensors |= {f"{path}.{part}": value for part, value in parts.items()}
        written[name] = mx.array(floats)
        encoded.add(name)
    source = opened(write_folder(tmp_path / "in", tensors, settings, **config))
    outcome = convert(source, tmp_path / "out", ConvertOptions(dtype="float32"))

    packed = json.loads((tmp_path / "out" / "config.json").read_text()).get("quantization")
    assert (packed is not None) == (handling == "exact"), "codes are kept, or all is floats"
    assert {source.tensors[name].handling for name in encoded} == {handling}
    assert sum(d.packing is not None for d in outcome.decisions) >= (7 if packed else 0)
    model, _ = upstream.load_folder(tmp_path / "out", shard_files(tmp_path / "out"))
    reference = upstream.build_model(config, upstream.sanitized(upstream.empty_model(config), written))
    tokens = mx.array([[5, 9, 31, 7, 12, 88]])
    ours, theirs = model(tokens), reference(tokens)
    assert mx.max(mx.abs(ours - theirs)).item() <= 1e-4 * mx.max(mx.abs(theirs)).item()  # pyright: ignore
