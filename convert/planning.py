"""Everything that a conversion writes, decided before it writes anything: tensors, shards, config, and a hash of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer import __version__, upstream
from mlxinfer.convert.quantizing import Uniform, choose, config_entry, describe, packed_parts, widest
from mlxinfer.convert.tracing import Tracer
from mlxinfer.engine.loading import check_layers
from mlxinfer.errors import InvalidRequestError, ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.convert.options import ConvertOptions
    from mlxinfer.convert.quantizing import Misfit
    from mlxinfer.convert.sources.base import Handling, Logical, Packing, Source
    from mlxinfer.convert.tracing import Output

Treatment = Literal["exact", "near", "quantized", "requantized"]
"""What becomes of a parameter's values: as Handling says, and quantized: floats that are packed for the first time."""
PLAN_VERSION = 1
"""Raised whenever the same plan would be written as other bytes."""
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES = FLOATS | {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64",
}  # fmt: skip
"""mlx's names and safetensors' names of what can be stored."""
DTYPE_BYTES = {name: int(code.strip("BFUIOL") or 8) // 8 for name, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a shard."""

    name: str
    dtype: str
    """As mlx names it."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the shard's data."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter of the model and the tensors that it is stored as: one of floats, or two or three of a packed one."""

    output: Output
    dtype: str
    """Of its floats, or of its affine scales."""
    packing: Packing | None
    kept: bool
    """The codes of the source are kept."""
    handling: Treatment
    """As far as the headers tell; values that don't survive a change of dtype turn "exact" into "near"."""
    note: str
    shard: int
    tensors: tuple[Stored, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion writes. Two plans with the same hash write the same bytes."""

    kind: str
    """Of the source."""
    dtype: str
    recipe: str
    items: tuple[Item, ...]
    shards: tuple[str, ...]
    """File names."""
    config: Mapping[str, Any]
    dropped: Mapping[str, str]
    """Tensors of the source that nothing is made of, and why."""
    notes: tuple[str, ...]
    hash: str

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(item.nbytes for item in self.items)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(item.output.shape) for item in self.items)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.total_bytes / max(1, self.num_weights)


def make_plan(source: Source, options: ConvertOptions) -> tuple[Plan, Tracer]:
    """The plan and what runs the model's code for it. Only headers are read.

    Raises ModelFileError, UnsupportedModelError or InvalidRequestError.
    """
    if not source.tensors:
        raise ModelFileError(f"{source.path} holds no tensors")
    check_layers(source.path, source.config, len(source.tensors))
    try:
        model = upstream.empty_model(source.config)
        tracer = Tracer(model, source.tensors)
        trace = tracer.trace()
    except (ModelFileError, UnsupportedModelError) as error:
        # The model's own code knows no file.
        raise type(error)(f"{source.path}: {error}") from error
    chooser = _Chooser(source, options, upstream.quantizable(model), upstream.keeps_dtype(model))
    items, shards = _in_shards([chooser.item(output) for output in trace.outputs], options.max_shard_bytes)
    config = upstream.published_config(source.config, model)
    _state_dtype(config, chooser.dtype)
    packed = {_module(i.output.name): (i.packing, math.prod(i.output.shape)) for i in items if i.packing}
    if quantization := config_entry(packed):
        config["quantization"] = config["quantization_config"] = quantization
    dropped = dict.fromkeys(trace.dropped, "left out by the model's code")
    plan = Plan(
        kind=source.kind,
        dtype=chooser.dtype,
        recipe=chooser.recipe_name,
        items=tuple(items),
        shards=shards,
        config=dict(sorted(config.items())),
        dropped=dict(source.dropped) | dropped,
        notes=tuple(source.notes),
        hash="",
    )
    return dataclasses.replace(plan, hash=_hash(plan, source, options)), tracer


def main_dtype(source: Source) -> str:
    """The type of float that most weights have.

    Codes have none: readers give what they stand for in float32. Where most weights are such, it is what the config
    says, else what most of the other weights have, else float16, and for Gemma, which overflows that, bfloat16.
    """
    counts: dict[str, int] = {}
    for tensor in source.tensors.values():
        if tensor.dtype in FLOATS:
            kind = "codes" if tensor.packing and tensor.dtype == "float32" else tensor.dtype
            counts[kind] = counts.get(kind, 0) + math.prod(tensor.shape)
    main = max(counts, key=lambda dtype: (counts[dtype], dtype), default="float32")
    if main != "codes":
        return main
    stated = [part[key] for part, key in _stated_dtypes(source.config) if part[key] in FLOATS]
    halves = {dtype: counts[dtype] for dtype in ("bfloat16", "float16") if dtype in counts}
    usual = "bfloat16" if str(source.config.get("model_type")).startswith("gemma") else "float16"
    return stated[0] if stated else max(halves, key=lambda dtype: halves[dtype], default=usual)


def _stated_dtypes(config: Mapping[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where a config says a dtype: the object and the key."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return [(part, key) for part in parts for key in ("torch_dtype", "dtype") if isinstance(part.get(key), str)]


class _Chooser:
    """Decides about one parameter after the other."""

    def __init__(
        self, source: Source, options: ConvertOptions, quantizable: Mapping[str, Any], keeps_dtype: Any
    ) -> None:
        self.dtype = options.dtype or main_dtype(source)
        if self.dtype not in FLOATS:
            raise InvalidRequestError(
                f"dtype is {self.dtype!r:.40}; it must be one of {', '.join(FLOATS)}", param="dtype"
            )
        self.recipe = options.wanted()
        self.recipe_name = self.recipe.name if self.recipe else "as published"
        self._tensors = source.tensors
        self._misfit: Misfit = options.misfit
        self._quantizable = quantizable
        self._keeps_dtype = keeps_dtype

    def item(self, output: Output) -> Item:
        """The parameter's form, not yet placed in a shard."""
        is_float = output.dtype in FLOATS
        keeps = self._keeps_dtype(output.name)
        dtype = self.dtype if is_float and not keeps else output.dtype
        if dtype not in DTYPES:
            raise ModelFileError(f"{output.name} is {dtype}, which safetensors can't hold")
        packing, kept, handling, note = self._packing(output) if is_float else (None, False, "exact", "")
        parts = packed_parts(output.shape, packing, dtype) if packing else [("", dtype, output.shape)]
        stem = _module(output.name)
        tensors = tuple(
            Stored(f"{stem}.{suffix}" if suffix else output.name, part_dtype, shape, 0)
            for suffix, part_dtype, shape in parts
        )
        return Item(output, dtype, packing, kept, handling, note, 0, tensors)

    def _packing(self, output: Output) -> tuple[Packing | None, bool, Treatment, str]:
        path = _module(output.name)
        logicals = [self._tensors[name] for piece in output.pieces for name in piece.inputs]
        note = "; ".join(dict.fromkeys(t.note for t in logicals if t.note))
        if any(piece.source is None for piece in output.pieces):
            note = _join(note, "made by the model's own code")
        had = [t.packing for t in logicals if t.packing]
        fits = output.name == f"{path}.weight" and path in self._quantizable
        plain = len(had) == len(output.pieces) and all(p.source is not None for p in output.pieces)
        own = had[0] if fits and plain and len(set(had)) == 1 and self._quantizable[path] is not False else None
        if not fits:
            return (
                None,
                False,
                _worst(logicals),
                _join(note, "dequantized: the model can't hold it packed" if had else ""),
            )
        if self.recipe is None:
            if own or not had:
                return own, own is not None, _worst(logicals), note
            wanted, why = Uniform(widest(had)), "its parts are packed differently or changed by the model's code"
            choice = choose(path, output.shape, wanted, self._quantizable[path], self._misfit)
            return choice.packing, False, "requantized", _join(_join(note, why), choice.note)
        choice = choose(path, output.shape, self.recipe, self._quantizable[path], self._misfit)
        if choice.packing is not None and choice.packing == own:
            return own, True, _worst(logicals), note
        changed = choice.packing is not None
        if changed and had:
            note = _join(note, f"was {describe(widest(had))}")
        treatment = ("requantized" if had else "quantized") if changed else _worst(logicals)
        return choice.packing, False, treatment, _join(note, choice.note)


def _worst(logicals: list[Logical]) -> Handling:
    order: tuple[Handling, ...] = ("exact", "near", "requantized")
    return order[max((order.index(t.handling) for t in logicals), default=0)]


def _join(first: str, second: str) -> str:
    return "; ".join(text for text in (first, second) if text)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _state_dtype(config: dict[str, Any], dtype: str) -> None:
    """Say the dtype wherever the config says one."""
    stated = _stated_dtypes(config)
    for part, key in stated or [(config, "torch_dtype")]:
        part[key] = dtype


def _in_shards(items: list[Item], limit: int) -> tuple[list[Item], tuple[str, ...]]:
    """Give every tensor its place. A parameter isn't cut: one above the limit has a shard of its own."""
    placed: list[Item] = []
    shard, end = 0, 0
    for item in items:
        if end and end + item.nbytes > limit:
            shard, end = shard + 1, 0
        tensors: list[Stored] = []
        for tensor in item.tensors:
            tensors.append(dataclasses.replace(tensor, offset=end))
            end += tensor.nbytes
        placed.append(dataclasses.replace(item, shard=shard, tensors=tuple(tensors)))
    count = shard + 1
    if count == 1:
        return placed, ("model.safetensors",)
    return placed, tuple(f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))


def _hash(plan: Plan, source: Source, options: ConvertOptions) -> str:
    """SHA-256 over the source's fingerprint, the versions and all that is decided."""
    facts = {
        "plan": PLAN_VERSION,
        "versions": {"mlxinfer": __version__, **upstream.versions()},
        "kind": plan.kind,
        "fingerprint": source.fingerprint(),
        "quantizer": options.quantizer_name(),
        "recipe": plan.recipe,
        "dtype": plan.dtype,
        "config": plan.config,
        "shards": plan.shards,
        "dropped": plan.dropped,
        "notes": plan.notes,
        "items": [_item_facts(item) for item in plan.items],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _item_facts(item: Item) -> list[Any]:
    """What of an item says which bytes are written; dataclasses.asdict takes seconds for many experts."""
    packing = item.packing
    form = [packing.bits, packing.group_size, packing.mode] if packing else None
    pieces = [[piece.source, piece.inputs] for piece in item.output.pieces]
    tensors = [[t.name, t.dtype, t.shape, t.offset] for t in item.tensors]
    return [item.output.name, item.dtype, form, item.kept, item.handling, item.note, item.shard, pieces, tensors]
