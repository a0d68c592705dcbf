"""Every architecture of mlx-lm: the same bytes as mlx-lm's own quantization of the same tensors, and the same logits.

The tensors are published as far as that can be had from a tiny model: experts one by one where the model's own code
stacks them again.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.utils import quantize_model

from mlxinfer import upstream
from mlxinfer.convert.job import ConvertOptions, convert
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import ModelFileError
from mlxinfer.formats.safetensors import check_safetensors, shard_files
from tests.conformance.configs import CONFIGS
from tests.conformance.examine import module_of, tiny_model
from tests.conformance.selection import cases
from tests.unit.convert.fake import FakeSource, parameters, stored

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.nn as nn

GROUP = 32
OWN_PACKS = {"prism_hadamard_qwen35": "is published packed, with 2 bits and groups of 128, and loads nothing else"}
EXPERTS = {"switch_mlp": "experts.{}", "experts": "experts.{}", "switch_glu": "experts.{}"}
"""Module of stacked experts in mlx-lm → the modules of one on the hub."""


def published(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """`weights` with experts taken apart, if the model's code puts them together again."""
    for stacked, single in EXPERTS.items():
        apart: dict[str, mx.array] = {}
        pattern = re.compile(rf"\.{stacked}\.(gate|up|down)_proj\.weight$")
        for name, array in weights.items():
            match = pattern.search(name)
            for expert in range(array.shape[0] if match else 0):
                apart[name.replace(f".{stacked}.", f".{single.format(expert)}.")] = array[expert]
            if not match:
                apart[name] = array
        with contextlib.suppress(ModelFileError):
            if len(apart) > len(weights) and upstream.sanitized(model, apart).keys() == weights.keys():
                return apart
    return weights


def reference(config: dict[str, Any], weights: dict[str, mx.array]) -> nn.Module:
    """As mlx_lm.convert does it: sanitize, load, quantize with the model's own predicate."""
    model = upstream.empty_model(config)
    model.load_weights(list(upstream.sanitized(model, weights).items()), strict=True)
    predicate: Any = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def fitting(path: str, module: nn.Module) -> bool | dict[str, Any]:
        """Groups of 64, which some ask for, don't divide 32 columns; the converter takes a smaller group there."""
        if path not in upstream.quantizable(model):
            return False
        answer, columns = predicate(path, module), module["weight"].shape[-1]
        return {**answer, "group_size": 32 if columns % 64 else 64} if isinstance(answer, dict) else answer

    return quantize_model(model, config, GROUP, 4, quant_predicate=fitting)[0]


@pytest.mark.parametrize("case", cases())
def test_a_conversion_has_the_bytes_and_logits_of_mlx_lm(case: str, tmp_path: Path) -> None:
    if case in OWN_PACKS:
        pytest.skip(f"{case} {OWN_PACKS[case]}")
    config: dict[str, Any] = {**CONFIGS[case], "model_type": module_of(case)}
    model = tiny_model(case)
    cast = upstream.keeps_dtype(model)
    weights = {
        name: a.astype(mx.bfloat16) if mx.issubdtype(a.dtype, mx.floating) and not cast(name) else a
        for name, a in parameters(model).items()
    }
    weights = published(model, weights)
    expected = reference(config, weights)

    options = ConvertOptions(packing=Packing(4, GROUP))
    convert(FakeSource(config, weights), tmp_path / "out", options)

    arrays, theirs = stored(tmp_path / "out"), parameters(expected)
    assert arrays.keys() == theirs.keys()
    for name, array in theirs.items():
        assert arrays[name].dtype == array.dtype, name
        assert mx.array_equal(arrays[name], array, equal_nan=True), name
    shards = shard_files(tmp_path / "out")
    for shard in shards:
        check_safetensors(shard)
    loaded, _ = upstream.load_folder(tmp_path / "out", shards)
    tokens = mx.array([[5, 9, 31, 7, 12]])
    expected.eval()
    for either in (loaded, expected):
        # mlx has no expert products in bfloat16 on a CPU.
        either.apply(lambda a: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a)
    assert mx.array_equal(loaded(tokens), expected(tokens), equal_nan=True)
