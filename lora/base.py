"""The base model of a training run: its weights as arrays that a gradient can be taken through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from mlxinfer import runtime, upstream
from mlxinfer.engine import loading
from mlxinfer.engine.governor import governor
from mlxinfer.lora.methods import is_quantized

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.nn as nn

    from mlxinfer.engine.loading import Prepared
    from mlxinfer.tokenizer import Tokenizer
    from mlxinfer.zoo import ModelFiles

PLAIN_SHARE = 0.5
"""On a CPU a packed base is unpacked where that takes at most this share of memory: its products are faster so."""


@dataclass(frozen=True, slots=True)
class Base:
    """A model's files, checked; no array yet."""

    files: ModelFiles
    prepared: Prepared

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prepared.tokenizer

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json, or what stands for it in a GGUF file."""
        return self.prepared.config

    def load(self, *, keep_packed: bool) -> nn.Module:
        """The model, with one float type throughout; float32 on a CPU. Raises ModelFileError, WontFitError."""
        governor().reclaim(self.prepared.needed_bytes)
        runtime.set_wired_limit(None)
        runtime.keep_freed_memory()
        model, _ = loading.drained(self.prepared.pieces())
        _one_dtype(model)
        if runtime.on_cpu() and is_quantized(model) and not keep_packed:
            plain = 4 * upstream.num_parameters(model)
            if plain <= PLAIN_SHARE * governor().whole:
                upstream.dequantize(model)
        model.eval()
        loading.drained(loading.evaluate(model))
        return model


def open_base(files: ModelFiles) -> Base:
    """Raises ModelFileError, UnsupportedModelError, or WontFitError before anything is loaded."""
    return Base(files, loading.prepare(files.kind, files.path))


def _one_dtype(model: nn.Module) -> None:
    """A stray float32 norm would promote everything; what mlx-lm keeps out of casts stays, but on a CPU."""
    sizes: dict[mx.Dtype, int] = {}
    for _, weight in tree_flatten(model.parameters()):
        value: Any = weight
        if mx.issubdtype(value.dtype, mx.floating):
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.size
    target = runtime.compute_dtype("auto", max(sizes, key=lambda kind: sizes[kind], default=mx.float32))
    may_cast = upstream.keeps_dtype(model)

    def cast(path: str, weight: mx.array) -> mx.array:
        kept = not mx.issubdtype(weight.dtype, mx.floating) or (target != mx.float32 and may_cast(path))
        return weight if kept else weight.astype(target)

    model.update(tree_map_with_path(cast, model.parameters()))
