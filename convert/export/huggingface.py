"""Export to a folder of float safetensors that transformers loads."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.export.folder import FLOATS, MLXFolder, Parameter, narrowed, slices
from mlxinfer.convert.export.names import expert_name, family_of
from mlxinfer.convert.export.writing import Meter, Outcome, Output, appearing, check_destination, synced, write_chunks
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.formats.files import json_bytes, open_regular
from mlxinfer.formats.safetensors import INDEX_NAME

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mlxinfer.convert.export.names import Family
    from mlxinfer.convert.sources.base import Handling

WIDTH = {"F16": 2, "BF16": 2, "F32": 4}
DTYPES = {name: kind for kind, name in FLOATS.items()}
MAX_SHARD_BYTES = 5 << 30
MLX_ONLY = "rope_traditional"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_GATE = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.gate_proj\.(weight|bias)")
_FUSED = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate|up|down)_proj\.(weight|bias)")


def export_huggingface(
    folder: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dry_run: bool = False,
    report: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Outcome:
    """Write `folder`, a model of mlx-lm, as `destination`, which must not exist.

    `dtype` is float32, float16 or bfloat16; None is the folder's own. float32 holds every weight as mlx computes it.
    Memory: a few slices of one tensor, of gpt-oss one expert. Raises ModelFileError, UnsupportedModelError,
    InvalidRequestError where something is in the way, and ExportError.
    """
    with MLXFolder(folder) as model:
        kind = DTYPES[dtype] if dtype else usual_dtype(model)
        family = family_of(model.config["model_type"], str(folder))
        if model.config.get(MLX_ONLY):
            raise UnsupportedModelError(f"{folder}: config.json sets {MLX_ONLY}, which transformers doesn't have")
        outputs = tuple(_outputs(model, family, kind))
        outcome = Outcome(destination, "hf", family.architecture, outputs, ())
        check_destination(destination, outcome.nbytes)
        if not dry_run:
            with appearing(destination, folder=True) as work:
                write_shards(work, outputs, max_shard_bytes, Meter(outcome.nbytes, report, cancel))
                copy_files(folder, work)
                with synced(work / "config.json") as file:
                    file.write(json_bytes(_config(model, family, FLOATS[kind]), indent=2) + b"\n")
        return outcome


def usual_dtype(model: MLXFolder) -> str:
    """That of most float weights; packed ones count by their scales; bfloat16 where nothing says."""
    sizes: Counter[str] = Counter()
    for parameter in model.parameters.values():
        if parameter.dtype in FLOATS and len(parameter.shape) > 1:
            sizes[parameter.dtype] += math.prod(parameter.shape)
    return max(sizes, key=lambda kind: (sizes[kind], kind)) if sizes else "BF16"


def _outputs(model: MLXFolder, family: Family, kind: str) -> Iterator[Output]:
    for name, parameter in model.parameters.items():
        if family.fused_experts and (found := _FUSED.fullmatch(name)):
            if found[1] != "up":
                yield _fused(model, parameter, kind)
        elif family.experts and (pattern := expert_name(name, family.experts)):
            yield from _split(model, parameter, pattern, kind)
        else:
            yield _output(model, parameter, name, parameter.shape, kind, 0, parameter.rows)


def _output(
    model: MLXFolder, parameter: Parameter, name: str, shape: tuple[int, ...], kind: str, first: int, last: int
) -> Output:
    """Rows `first` to `last` of `parameter` as a tensor of its own."""

    def chunks() -> Iterator[np.ndarray]:
        for start, stop in slices(last - first, parameter.columns):
            yield narrowed(model.float_rows(parameter, first + start, first + stop), kind, parameter.name)

    handling, note = _fate([parameter], kind)
    return Output(name, shape, kind, math.prod(shape) * WIDTH[kind], (parameter.name,), handling, note, chunks)


def _fate(parameters: Sequence[Parameter], kind: str) -> tuple[Handling, str]:
    """Whether `kind` holds every value."""
    packed = any(p.packing for p in parameters)
    same = all(p.packing is None and p.dtype == kind for p in parameters)
    if kind == "F32" or same:
        return "exact", "dequantized" if packed else ""
    return "near", f"{'dequantized and ' if packed else ''}rounded to {FLOATS[kind]}"


def _split(model: MLXFolder, parameter: Parameter, pattern: str, kind: str) -> Iterator[Output]:
    experts, rows, columns = parameter.shape
    for e in range(experts):
        name = pattern.replace("{e}", str(e))
        yield _output(model, parameter, name, (rows, columns), kind, e * rows, (e + 1) * rows)


def _fused(model: MLXFolder, parameter: Parameter, kind: str) -> Output:
    """gate_up_proj: columns, then the rows of gate and up in turn. down_proj: columns, then rows."""
    gate = _GATE.fullmatch(parameter.name)
    parts = [parameter]
    name = parameter.name.removesuffix(".weight").replace(".bias", "_bias")
    if gate:
        parts.append(model.parameters[f"{gate[1]}.up_proj.{gate[2]}"])
        name = name.replace("gate_proj", "gate_up_proj")
    matrix = len(parameter.shape) == 3
    experts, rows = parameter.shape[0], parameter.shape[1] if matrix else 1
    last = len(parts) * parameter.shape[1]
    shape = (experts, parameter.columns, last) if matrix else (experts, last)

    def chunks() -> Iterator[np.ndarray]:
        for e in range(experts):
            values = [model.float_rows(p, e * rows, (e + 1) * rows) for p in parts]
            # Row i of gate comes before row i of up; a bias is one row, whose columns alternate.
            both = np.stack(values, axis=1).reshape(-1, parameter.columns).T if matrix else np.stack(values, axis=-1)
            yield narrowed(np.ascontiguousarray(both), kind, parameter.name)

    handling, note = _fate(parts, kind)
    nbytes = math.prod(shape) * WIDTH[kind]
    return Output(name, shape, kind, nbytes, tuple(p.name for p in parts), handling, note, chunks)


def write_shards(work: Path, outputs: Sequence[Output], limit: int, meter: Meter, form: str = "pt") -> None:
    """The safetensors files of a model folder, and their index; `form` is what transformers looks for in them."""
    shards: list[list[Output]] = [[]]
    for output in outputs:
        if shards[-1] and sum(o.nbytes for o in shards[-1]) + output.nbytes > limit:
            shards.append([])
        shards[-1].append(output)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        with synced(work / name) as file:
            file.write(_header(shard, form))
            for output in shard:
                write_chunks(file, output, meter)
    if len(shards) > 1:
        where = {o.name: name for name, shard in zip(names, shards, strict=True) for o in shard}
        index = {"metadata": {"total_size": meter.total}, "weight_map": where}
        with synced(work / INDEX_NAME) as file:
            file.write(json.dumps(index, indent=2).encode() + b"\n")


def _header(shard: Sequence[Output], form: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": form}}
    at = 0
    for output in shard:
        entries[output.name] = {
            "dtype": output.type,
            "shape": list(output.shape),
            "data_offsets": [at, at + output.nbytes],
        }
        at += output.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_files(folder: Path, work: Path) -> None:
    """The tokenizer's files, and the generation config."""
    names = [*TOKENIZER_FILES, *(path.name for path in folder.glob("*.tiktoken"))]
    for name in names:
        source = open_regular(folder / name)
        if source is None:
            continue
        with source, synced(work / name) as file:
            shutil.copyfileobj(source, file)


def _config(model: MLXFolder, family: Family, dtype: str) -> dict[str, Any]:
    """config.json with nothing of mlx in it, and with what mlx-lm assumed where it was silent."""
    config = {k: v for k, v in model.config.items() if k not in ("quantization", "quantization_config")}
    assumed = {k: v for k, v in model.arguments.items() if isinstance(v, bool | int | float) and k != MLX_ONLY}
    known = {"architectures": [family.architecture]}
    return (
        known
        | assumed
        | config
        | {
            "tie_word_embeddings": model.tied,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
    )
