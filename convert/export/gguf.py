"""Export to one GGUF file that llama.cpp loads."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, LlamaFileType
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from gguf.tensor_mapping import get_tensor_name_map

from mlxinfer.convert.export.folder import MLXFolder, Parameter, narrowed, slices
from mlxinfer.convert.export.gguf_blocks import BLOCK, Fate, chunks_of, fate_of
from mlxinfer.convert.export.gguf_config import Config, base_metadata, rope_scaling, target_of
from mlxinfer.convert.export.gguf_file import string, u32, write_gguf
from mlxinfer.convert.export.gguf_tokenizer import read_vocabulary
from mlxinfer.convert.export.huggingface import usual_dtype
from mlxinfer.convert.export.names import FAMILIES, expert_name
from mlxinfer.convert.export.writing import Meter, Outcome, Output, appearing, check_destination, synced
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mlxinfer.convert.export.gguf_config import Metadata, Target
    from mlxinfer.convert.export.gguf_tokenizer import Vocabulary

FLOAT_KINDS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16, "q8_0": Kind.Q8_0}
"""What `floats` may be: the type of matrices that are not packed."""
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q5_1": LlamaFileType.MOSTLY_Q5_1,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "MXFP4": LlamaFileType.MOSTLY_MXFP4_MOE,
}
QUANTIZATION_VERSION = 2
PHI3 = ("phi-3", "phi3")
SQUEEZED = "ffn_gate_inp_shexp"
"""A matrix of one row that llama.cpp takes as a vector."""


def export_gguf(
    folder: Path,
    destination: Path,
    *,
    floats: str | None = None,
    dry_run: bool = False,
    report: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Outcome:
    """Write `folder`, a model of mlx-lm with a tokenizer.json, as the file `destination`, which must not exist.

    Packed matrices keep their codes where a type of GGUF has them; `floats` (a key of FLOAT_KINDS, None for the
    folder's own type) is for the others. Memory: a few slices of one tensor. Raises ModelFileError,
    UnsupportedModelError, InvalidRequestError where something is in the way, and ExportError.
    """
    with MLXFolder(folder) as model:
        target = target_of(model.config["model_type"], str(folder))
        config = Config(model)
        vocabulary = read_vocabulary(folder, config.integer("vocab_size"), model.config)
        own, tables = _metadata(config, target)
        kind = FLOAT_KINDS[floats] if floats else Kind[usual_dtype(model)]
        outputs = [
            _output(model, parameter, name, config, target, kind)
            for name, parameter in _by_gguf_name(model, config, target).items()
        ]
        outputs += [_table(name, values) for name, values in tables.items()]
        metadata = {
            "general.architecture": string(MODEL_ARCH_NAMES[target.arch]),
            "general.type": string("model"),
            "general.name": string(_display_name(folder, vocabulary)),
            "general.file_type": u32(FILE_TYPES[_usual_type(outputs)]),
            "general.quantization_version": u32(QUANTIZATION_VERSION),
            **{f"{MODEL_ARCH_NAMES[target.arch]}.{key}": value for key, value in own.items()},
            **vocabulary.metadata,
        }
        outcome = Outcome(destination, "gguf", MODEL_ARCH_NAMES[target.arch], tuple(outputs), vocabulary.notes)
        check_destination(destination, outcome.nbytes)
        if not dry_run:
            with appearing(destination, folder=False) as work, synced(work) as file:
                write_gguf(file, metadata, outputs, Meter(outcome.nbytes, report, cancel))
        return outcome


def _display_name(folder: Path, vocabulary: Vocabulary) -> str:
    """The folder's, held to what llama.cpp reads out of it: a name with phi-3 in it means Phi-3's tokenizer."""
    name = folder.resolve().name
    named = any(word in name.lower() for word in PHI3)
    if vocabulary.drops_space:
        return name if named else f"{PHI3[0]} {name}"
    return "model" if named else name


def _metadata(config: Config, target: Target) -> tuple[Metadata, dict[str, list[float]]]:
    scaling, tables = rope_scaling(config)
    return base_metadata(config) | target.extra(config) | scaling, tables


def _usual_type(outputs: Sequence[Output]) -> str:
    sizes: Counter[str] = Counter()
    for output in outputs:
        sizes[output.type] += math.prod(output.shape)
    return max(sizes, key=lambda kind: (sizes[kind], kind))


def _table(name: str, values: list[float]) -> Output:
    data = np.array(values, "<f4")
    return Output(name, data.shape, "F32", data.nbytes, (), "exact", "factors of rope_scaling", lambda: iter([data]))


def _output(model: MLXFolder, parameter: Parameter, name: str, config: Config, target: Target, floats: Kind) -> Output:
    order = _row_order(parameter, config) if target.interleaved else None
    shape = parameter.shape[1:] if SQUEEZED in name else parameter.shape
    matrix = name.endswith(".weight") and len(shape) > 1 and ".ffn_gate_inp." not in name
    if matrix and parameter.packing:
        fate = fate_of(model, parameter)

        def chunks() -> Iterator[np.ndarray]:
            return chunks_of(model, parameter, fate, order)
    else:
        kind = floats if matrix else Kind.F32
        if kind == Kind.Q8_0 and parameter.columns % BLOCK:
            kind = Kind.F16
        shift = target.shifted_norms and name.endswith("norm.weight")
        fate = _float_fate(model, parameter, kind, shift=shift)

        def chunks() -> Iterator[np.ndarray]:
            return _float_chunks(model, parameter, kind, order, shift=shift)

    note = fate.note + ("; rows of q and k interleaved" if order is not None else "")
    block, size = GGML_QUANT_SIZES[fate.kind]
    nbytes = math.prod(shape) // block * size
    return Output(
        name, shape, fate.kind.name, nbytes, (parameter.name,), fate.handling, note.removeprefix("; "), chunks
    )


def _by_gguf_name(model: MLXFolder, config: Config, target: Target) -> dict[str, Parameter]:
    """By the tensor maps of the `gguf` package, which know the published names."""
    experts = FAMILIES[model.config["model_type"]].experts
    known = get_tensor_name_map(target.arch, config.integer("num_hidden_layers"))
    found: dict[str, Parameter] = {}
    for parameter in model.parameters.values():
        published = (expert_name(parameter.name, experts) if experts else None) or parameter.name
        stem, dot, kind = published.replace(".{e}", "").rpartition(".")
        if kind not in ("weight", "bias"):
            stem, kind = f"{stem}{dot}{kind}", "weight"  # a bare array, such as attention sinks
        name = known.get_name(stem)
        if name is None or f"{name}.{kind}" in found:
            raise UnsupportedModelError(
                f"{model.path}: llama.cpp's {target.arch.name} has no tensor for {parameter.name}"
            )
        found[f"{name}.{kind}"] = parameter
    return found


def _row_order(parameter: Parameter, config: Config) -> np.ndarray | None:
    """llama.cpp wants the two halves that rope pairs in turn: rows 0, n/2, 1, n/2 + 1, … of each head."""
    path = parameter.name.rpartition(".")[0]
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(path.rpartition(".")[2])
    if heads is None:
        return None
    return rope_order(parameter.shape[0], heads)


def rope_order(rows: int, heads: int) -> np.ndarray:
    """Which row of mlx-lm's each row of llama.cpp's is, where q and k are interleaved."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _float_fate(model: MLXFolder, parameter: Parameter, kind: Kind, *, shift: bool) -> Fate:
    note = "dequantized" if parameter.packing else ""
    if kind == Kind.Q8_0:
        return Fate(kind, "requantized", "quantized")
    if shift:
        values = model.float_rows(parameter, 0, parameter.rows)
        same = np.array_equal((values + np.float32(1)) - np.float32(1), values)
        return Fate(kind, "exact" if same else "near", "1 added")
    if kind == Kind.F32 or (parameter.packing is None and parameter.dtype == kind.name):
        return Fate(kind, "exact", note)
    return Fate(kind, "near", f"{note} and rounded".removeprefix(" and ") + f" to {kind.name}")


def _float_chunks(
    model: MLXFolder, parameter: Parameter, kind: Kind, order: np.ndarray | None, *, shift: bool
) -> Iterator[np.ndarray]:
    for start, stop in slices(parameter.rows, parameter.columns) if order is None else [(0, parameter.rows)]:
        values = model.float_rows(parameter, start, stop)
        if order is not None:
            # A bias is one row: its columns move.
            values = values[order] if len(parameter.shape) > 1 else values[:, order]
        if shift:
            values = values + np.float32(1)
        yield quantize(values, kind) if kind == Kind.Q8_0 else narrowed(values, kind.name, parameter.name)
