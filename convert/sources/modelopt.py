"""NVIDIA ModelOpt: NVFP4 and FP8 with a scale for each matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.convert.sources.folder import (
    FolderSource,
    Layout,
    add_plain,
    gather,
    quantization_settings,
    require,
)
from mlxinfer.convert.sources.fp4 import nvfp4_entry
from mlxinfer.convert.sources.fp8 import scaled_entry
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store

ALGORITHMS = ("NVFP4", "FP8", "MIXED_PRECISION")


class ModelOptSource(FolderSource):
    """quant_method modelopt, or a hf_quant_config.json."""

    def __init__(self, folder: Path) -> None:
        settings = quantization_settings(folder)
        super().__init__("modelopt", folder, lambda store: lay_out(store, settings, folder))


def lay_out(store: Store, settings: Mapping[str, Any], folder: Path) -> Layout:
    """Modules by their tensors: two scales are NVFP4, one is FP8; everything else as it is."""
    inner = settings.get("quantization")
    algorithm = (inner if isinstance(inner, dict) else settings).get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise UnsupportedModelError(f"{folder}: quant_algo {algorithm!r:.40} is not read; read are {list(ALGORITHMS)}")
    layout = Layout()
    used: set[str] = set()
    for path, tensors in gather(store, ("weight", "weight_scale", "weight_scale_2")).items():
        if tensors.keys() == {"weight"} and tensors["weight"].dtype not in ("U8", "F8_E4M3"):
            continue
        require(tensors, ("weight", "weight_scale"), path)
        weight, scale = tensors["weight"], tensors["weight_scale"]
        if weight.dtype == "U8":
            require(tensors, ("weight_scale_2",), path)
            layout.entries.append(nvfp4_entry(store, path, weight, scale, tensors["weight_scale_2"]))
        else:
            layout.entries.append(scaled_entry(store, path, weight, scale))
        used |= {stored.name for stored in tensors.values()}
    add_plain(layout, store, used)
    return layout
