"""GGUF files: parameters under mlx-lm's own names, the file's codes kept wherever mlx can hold them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.sources.base import Logical, PackedArrays, Packing
from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import json_bytes
from mlxinfer.formats.gguf.plan import plan_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlxinfer.formats.gguf.parameters import Parameter
    from mlxinfer.formats.gguf.plan import GGUFPlan
    from mlxinfer.formats.gguf.vocab import Vocabulary

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}


class GGUFSource:
    """A `Source` over one GGUF file, or over all parts of a split one given the first."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ModelFileError or UnsupportedModelError."""
        self.path = path
        self._plan = plan_gguf(path)
        self._parameters = {p.name: p for p in self._plan.parameters}
        self.config: Mapping[str, Any] = self._plan.config
        self.tensors: Mapping[str, Logical] = {name: _logical(p) for name, p in self._parameters.items()}
        self.dropped: Mapping[str, str] = self._plan.dropped
        self.extras: Mapping[str, bytes | Path] = dict(
            _extras(self._plan.vocabulary, self.config["max_position_embeddings"])
        )
        self.notes: Sequence[str] = _notes(self._plan)

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """The tensor, or one expert of it, as floats of its dtype; bfloat16 as its bits in uint16."""
        parameter = self._parameter(name, part)
        values = parameter.floats(part)
        dtype = self.tensors[name].dtype
        if dtype == "bfloat16":
            # Widened bits: nothing is rounded by leaving out the lower half.
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(dtype, copy=False)

    def read_packed(self, name: str, part: int | None = None) -> PackedArrays:
        """The tensor, or one expert of it, packed as its `packing` says."""
        if self.tensors[name].packing is None:
            raise ValueError(f"{name} cannot be had packed")
        return PackedArrays(*self._parameter(name, part).packed(part))

    def fingerprint(self) -> str:
        """Over names, sizes, times and tensor tables of all parts."""
        tensors = self._plan.file.tensors.values()
        digest = hashlib.sha256()
        for path in sorted({t.path for t in tensors} | {self.path}):
            try:
                found = path.stat()
            except OSError as error:
                raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
            digest.update(repr((path.name, found.st_size, found.st_mtime_ns)).encode())
        table = [(t.name, t.shape, int(t.type), t.path.name, t.offset) for t in tensors]
        digest.update(repr((table, sorted(self._plan.file.metadata.items()))).encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Files are opened for each read, so there is nothing to let go of."""

    def _parameter(self, name: str, part: int | None) -> Parameter:
        parameter = self._parameters[name]
        if part is not None and not (len(parameter.shape) == 3 and 0 <= part < parameter.shape[0]):
            raise ValueError(f"{name} of shape {parameter.shape} has no part {part}")
        return parameter


def _logical(parameter: Parameter) -> Logical:
    layout = parameter.layout
    kinds = [t.type.name for t in parameter.tensors]
    plain = all(kind in FLOATS for kind in kinds)
    same = len(set(kinds)) == 1 and parameter.function is None and parameter.factor is None
    notes = [parameter.note] if parameter.note else []
    if layout is not None and not layout.exact:
        notes.append(f"{kinds[0]} as {layout.bits} bits: two scales become one, within 6e-3 of the values")
    elif layout is None and not plain:
        notes.append(f"{', '.join(sorted(set(kinds)))} has no counterpart in mlx: dequantized")
    if parameter.factor is not None:
        notes.append(f"multiplied with {parameter.factor.name}")
    return Logical(
        name=parameter.name,
        shape=parameter.shape,
        dtype=FLOATS[kinds[0]] if plain and same else "float32",
        nbytes=parameter.nbytes,
        made_of=tuple(t.name for t in (*parameter.tensors, *([parameter.factor] if parameter.factor else []))),
        packing=None if layout is None else Packing(layout.bits, layout.group_size, layout.mode),
        handling="exact" if plain or (layout is not None and layout.exact) else "near" if layout else "requantized",
        note="; ".join(notes),
    )


def _extras(vocabulary: Vocabulary, context_length: int) -> dict[str, bytes]:
    tokenizer: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos_token,
        "eos_token": vocabulary.eos_token,
        "unk_token": vocabulary.unk_token,
        "pad_token": vocabulary.pad_token,
        "add_bos_token": vocabulary.add_bos_token,
        "add_eos_token": vocabulary.add_eos_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": vocabulary.chat_template,
    }
    return {
        "tokenizer.json": _json(vocabulary.tokenizer_json, indent=None),
        "tokenizer_config.json": _json({key: value for key, value in tokenizer.items() if value is not None}),
        "generation_config.json": _json(vocabulary.generation_config),
    }


def _json(value: object, indent: int | None = 2) -> bytes:
    return json_bytes(value, indent) + b"\n"


def _notes(plan: GGUFPlan) -> list[str]:
    name = plan.file.metadata.get("general.name")
    notes = [f"GGUF architecture {plan.file.architecture}"]
    if isinstance(name, str) and name:
        notes.append(f"general.name: {name[:200]}")
    return notes
