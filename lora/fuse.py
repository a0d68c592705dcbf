"""An adapter made part of its base: a model folder that needs no adapter, with how much of it each layer kept."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer import upstream
from mlxinfer.convert.export.folder import FLOATS, MLXFolder, Parameter, slices
from mlxinfer.convert.export.huggingface import (
    DTYPES,
    MAX_SHARD_BYTES,
    copy_files,
    usual_dtype,
    write_shards,
)
from mlxinfer.convert.export.writing import Meter, Output, appearing, check_destination
from mlxinfer.convert.quantizing import check_packing, config_entry, describe, packed_parts
from mlxinfer.errors import ConversionError, InvalidRequestError, UnsupportedModelError
from mlxinfer.lora.adapter import read_adapter
from mlxinfer.lora.card import CARD, fused_card
from mlxinfer.lora.changes import MIN_KEPT, Change, Form, Fused, changed_rows, changes_of, measure
from mlxinfer.lora.places import put_text

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import numpy as np

    from mlxinfer.convert.sources.base import Packing

REPORT = "fusion.json"
MAX_NAMED = 8
WIDTHS = {"U32": 4, "U8": 1, "F32": 4, "F16": 2, "BF16": 2}
_TYPES = {"uint32": "U32", "uint8": "U8"}

Dequantize = Literal["none", "adapted", "all"]


@dataclass(frozen=True, slots=True)
class FuseOptions:
    """How layers are stored afterwards."""

    dequantize: Dequantize = "none"
    """Which packed layers become floats: none, those that the adapter changes, or all."""
    packing: Packing | None = None
    """For the packed layers that the adapter changes; None: each as it is in the base."""
    dtype: str | None = None
    """float32, float16 or bfloat16, of all floats; None: as they are, and of dequantized ones that of the scales."""
    force: bool = False
    """Write it even where a layer keeps less than MIN_KEPT of the adapter."""


def fuse(
    base: Path,
    adapter: Path,
    destination: Path,
    options: FuseOptions | None = None,
    *,
    dry_run: bool = False,
    report: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> Fused:
    """Write `base`, a folder of mlx-lm's, with `adapter` in it as the folder `destination`, which must not exist.

    Memory: the adapter and a few rows. Raises ConversionError that names the layers where less than MIN_KEPT of the
    adapter would be left, ModelFileError, UnsupportedModelError, InvalidRequestError and ExportError.
    """
    options = options or FuseOptions()
    if options.packing:
        check_packing(options.packing)
        if options.dequantize != "none":
            raise InvalidRequestError("either another packing or floats for the adapted layers", param="packing")
    check_destination(destination, 0)
    with MLXFolder(base) as model:
        blank = upstream.empty_model(model.config)
        changes = changes_of(read_adapter(adapter, blank), blank)
        if missing := changes.keys() - model.parameters.keys():
            raise UnsupportedModelError(f"{base} has no {', '.join(sorted(missing))} of its own to put the adapter in")
        forms = {name: _form(model, found, changes, options) for name, found in model.parameters.items()}
        layers = tuple(measure(model, model.parameters[n], change, forms[n]) for n, change in changes.items())
        outputs = [o for name in model.parameters for o in _outputs(model, name, changes.get(name), forms[name])]
        fused = Fused(destination, layers, sum(output.nbytes for output in outputs))
        check_destination(destination, fused.nbytes)
        if dry_run:
            return fused
        if fused.lost and not options.force:
            raise ConversionError(_refusal(fused))
        with appearing(destination, folder=True) as work:
            write_shards(work, outputs, MAX_SHARD_BYTES, Meter(fused.nbytes, report, cancel), "mlx")
            copy_files(base, work)
            put_text(work / "config.json", json.dumps(_config(model, forms), indent=2, ensure_ascii=False))
            put_text(work / REPORT, json.dumps(as_dict(fused), indent=2))
            put_text(work / CARD, fused_card(fused, base, adapter))
        return fused


def as_dict(fused: Fused) -> dict[str, Any]:
    """For JSON."""
    return {
        "size_bytes": fused.nbytes,
        "min_kept": min((kept.share for kept in fused.layers), default=1.0),
        "layers": [
            {
                "name": kept.name,
                "stored": describe(kept.form.packing) if kept.form.packing else FLOATS[kept.form.dtype],
                "change": kept.size,
                "cosine": kept.cosine,
                "norm": kept.norm,
                "kept": kept.share,
            }
            for kept in fused.layers
        ],
    }


def _refusal(fused: Fused) -> str:
    lost = fused.lost
    named = "; ".join(
        f"{kept.name} keeps {kept.share:.1%} (cosine {kept.cosine:.3f}, {kept.norm:.2f} of its size)"
        for kept in lost[:MAX_NAMED]
    )
    more = f"; and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    packed = any(kept.form.packing for kept in lost)
    advice = (
        "keep those layers in floats (--dequantize adapted), give them more bits (--bits 8)"
        if packed
        else "hold the weights in float32 (--dtype float32)"
    )
    return (
        f"{len(lost)} of {len(fused.layers)} layers would keep less than {MIN_KEPT:.0%} of the adapter: {named}{more}. "
        f"{advice[0].upper()}{advice[1:]}, serve the adapter beside the base, or --force"
    )


def _form(model: MLXFolder, parameter: Parameter, changes: Mapping[str, Change], options: FuseOptions) -> Form:
    changed = parameter.name in changes
    scales = parameter.dtype if parameter.dtype in FLOATS else usual_dtype(model)
    dtype = DTYPES[options.dtype] if options.dtype else scales
    if parameter.packing is None or options.dequantize == "all" or (changed and options.dequantize == "adapted"):
        return Form(None, dtype)
    packing = (options.packing if changed else None) or parameter.packing
    if parameter.columns % packing.group_size:
        raise InvalidRequestError(
            f"{parameter.name}: {parameter.columns} columns are no multiple of the group size {packing.group_size}",
            param="group_size",
        )
    return Form(packing, scales)


def _outputs(model: MLXFolder, name: str, change: Change | None, form: Form) -> Iterator[Output]:
    parameter = model.parameters[name]
    if change is None and form.packing == parameter.packing and (form.packing or form.dtype == parameter.dtype):
        yield from _copies(model, parameter)
        return
    path = name.removesuffix(".weight")
    if form.packing is None:
        stored = [(name, form.dtype, parameter.shape)]
    else:
        parts = packed_parts(parameter.shape, form.packing, FLOATS[form.dtype])
        stored = [(f"{path}.{part}", _TYPES.get(kind, form.dtype), shape) for part, kind, shape in parts]
    made = _Made(model, parameter, change, form)
    for number, (part, kind, shape) in enumerate(stored):
        nbytes = math.prod(shape) * WIDTHS[kind]
        yield Output(part, shape, kind, nbytes, (name,), "requantized", "", made.part(number))


def _copies(model: MLXFolder, parameter: Parameter) -> Iterator[Output]:
    """The tensors as they are."""
    for info in parameter.stored:
        columns = info.shape[-1] if info.shape else 1

        def chunks(info: Any = info, columns: int = columns) -> Iterator[np.ndarray]:
            for start, stop in slices(math.prod(info.shape[:-1]), columns):
                yield model.raw(info, start, stop, columns)

        yield Output(info.name, info.shape, info.dtype, info.nbytes, (info.name,), "exact", "", chunks)


class _Made:
    """A parameter made anew. Its words are written first; scales and biases, far smaller, wait here until then."""

    def __init__(self, model: MLXFolder, parameter: Parameter, change: Change | None, form: Form) -> None:
        self.model = model
        self.parameter = parameter
        self.change = change
        self.form = form
        self._waiting: dict[int, list[np.ndarray]] = {}

    def part(self, number: int) -> Callable[[], Iterator[np.ndarray]]:
        return self._words if number == 0 else lambda: iter(self._waiting.pop(number))

    def _words(self) -> Iterator[np.ndarray]:
        self._waiting = {}
        for values in self._rows():
            words, *factors = self.form.parts(values, self.parameter.name)
            for number, factor in enumerate(factors, 1):
                self._waiting.setdefault(number, []).append(factor)
            yield words

    def _rows(self) -> Iterator[np.ndarray]:
        if self.change is not None:
            for _, _, _, new in changed_rows(self.model, self.parameter, self.change):
                yield new
            return
        for start, stop in slices(self.parameter.rows, self.parameter.columns):
            yield self.model.float_rows(self.parameter, start, stop)


def _config(model: MLXFolder, forms: Mapping[str, Form]) -> dict[str, Any]:
    config = {k: v for k, v in model.config.items() if k not in ("quantization", "quantization_config")}
    packings = {
        name.removesuffix(".weight"): (form.packing, math.prod(model.parameters[name].shape))
        for name, form in forms.items()
        if form.packing
    }
    if entry := config_entry(packings):
        config |= {"quantization": entry, "quantization_config": entry}
    return config
