"""gpt-oss in floats: experts as transformers holds them, [experts, inputs, outputs] and without ".weight".

Matrices are turned round here, and the columns of gate and up, which gate_up_proj has in turn, taken apart. The names
are those of mlx-lm's layers: its `sanitize` leaves tensors of such names alone, and would slice these the wrong way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.sources.folder import FLOATS, Entry, check_dtype, check_shape, plain_entry
from mlxinfer.convert.sources.mxfp4 import FUSED, biases, layers_of
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.convert.sources.folder import Layout
    from mlxinfer.convert.sources.store import Store, Stored

MODEL_TYPE = "gpt_oss"
MATRICES = (f".experts.{FUSED}", ".experts.down_proj")


def add_experts(layout: Layout, store: Store, config: Mapping[str, Any]) -> set[str]:
    """Entries for the experts' matrices and biases, and the names of the tensors that they are made of.

    Raises ModelFileError for shapes that config.json's hidden_size and intermediate_size don't agree with.
    """
    used: set[str] = set()
    for name, stored in store.tensors.items():
        if name.endswith(MATRICES):
            _check(stored, config)
            layout.entries += [_matrix(store, stored, path, columns) for path, columns in layers_of(name)]
            used |= {name}
            if bias := store.tensors.get(f"{name}_bias"):
                layout.entries += biases(store, bias)
                used |= {bias.name}
    return used


def _check(stored: Stored, config: Mapping[str, Any]) -> None:
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if type(hidden) is not int or type(inner) is not int:
        raise ModelFileError(
            f"config.json: hidden_size is {hidden!r:.40}, intermediate_size {inner!r:.40}; numbers are expected"
        )
    check_dtype(stored, *FLOATS, "F64")
    experts = stored.shape[0] if stored.shape else 0
    shape = (hidden, 2 * inner) if stored.name.endswith(FUSED) else (inner, hidden)
    check_shape(stored, (experts, *shape), "of [experts, inputs, outputs] by config.json")


def _matrix(store: Store, stored: Stored, path: str, columns: slice) -> Entry:
    whole = plain_entry(store, stored)
    experts, inputs, outputs = stored.shape
    shape = (experts, len(range(outputs)[columns]), inputs)

    def floats(part: int | None) -> np.ndarray:
        return np.ascontiguousarray(whole.floats(part)[..., columns].swapaxes(-1, -2))

    note = "transposed" if columns == slice(None) else f"every second column of {stored.name}, transposed"
    note = "; ".join(text for text in (whole.logical.note, note) if text)
    nbytes = stored.nbytes * shape[1] // outputs
    return Entry(replace(whole.logical, name=f"{path}.weight", shape=shape, nbytes=nbytes, note=note), floats)
