"""Adapters over one loaded model: which there are, which are in memory, and which one the model computes with now.

An adapter is a set of mlx-lm's LoRA layers around the model's own, whose weights they share. Between two steps the
layers are put in their places in the model, or the model's own back: a few hundred assignments, no copy. A graph that
is built keeps the arrays it was built with.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import runtime, upstream
from mlxinfer.engine.adapter_files import FLOATS, AdapterFiles, digest_of
from mlxinfer.engine.governor import governor
from mlxinfer.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, UnsupportedModelError, WontFitError
from mlxinfer.formats.safetensors import check_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_BYTES = 1 << 30
LEAVES = ("lora_a", "lora_b", "m")
MAX_NAMED = 1000
"""Tensors that one message names."""


@dataclass(slots=True)
class Place:
    """Where a module hangs in the model."""

    container: Any
    key: Any
    own: nn.Module
    """The model's."""
    layer: nn.Module
    """The adapter's, around it."""


@dataclass(slots=True)
class _Loaded:
    places: list[Place]
    nbytes: int


class Adapters:
    """Of one model. On the MLX thread, except `in`, `names` and `digest`."""

    def __init__(self, model: nn.Module, max_bytes: int = DEFAULT_BYTES) -> None:
        """`max_bytes` of adapters stay in memory, and always the one in use."""
        self.max_bytes = max_bytes
        self.active = ""
        """The adapter that the model computes with; empty: none."""
        self._model: Any = model
        self._files: dict[str, AdapterFiles] = {}
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        """Least recently used first."""

    def __contains__(self, name: object) -> bool:
        return name in self._files

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def digest(self, name: str) -> str:
        """What tells its keys and values from another's. Raises ModelNotFoundError."""
        return self._known(name).digest

    @property
    def nbytes(self) -> int:
        """Of the adapters in memory."""
        return sum(held.nbytes for held in self._loaded.values())

    @property
    def in_memory(self) -> tuple[str, ...]:
        """Least recently used first."""
        return tuple(self._loaded)

    def add(self, files: AdapterFiles) -> None:
        """Register an adapter, if it goes with this model. Its weights are read when a request first needs them.

        Raises ModelFileError with every tensor that doesn't fit, UnsupportedModelError where the model can't run with
        it, InvalidRequestError when another has the name.
        """
        there = self._files.get(files.name)
        if there is not None:
            if there.digest == files.digest:
                return
            message = f"there is another adapter {files.name} already ({there.folder})"
            raise InvalidRequestError(message, param="adapter")
        self.use("")
        places = self._checked(files, files.tensors)
        self._try(files, list(places.values()))
        self._files[files.name] = files

    def load(self, name: str) -> None:
        """Have an adapter in memory, and others go for it. Raises what is wrong with its file, or WontFitError."""
        files = self._known(name)
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return
        needed = sum(_bytes_in_memory(t.shape, t.dtype) for t in files.tensors.values())
        self._make_room(needed)
        governor().reclaim(needed)
        room = governor().whole - governor().held_bytes()
        if needed > room:
            raise WontFitError(
                f"the adapter {name} needs {needed / 2**20:,.0f} MiB and {max(0, room) / 2**20:,.0f} MiB are left; "
                "give models more memory (memory_mb)"
            )
        active = self.active
        self.use("")
        try:
            places = self._filled(files)
        finally:
            self.use(active)
        self._loaded[name] = _Loaded(places, needed)

    def use(self, name: str) -> None:
        """Have the model compute with an adapter from now on, or, with an empty name, as it is."""
        if name == self.active:
            if name:
                self._loaded.move_to_end(name)
            return
        if name:
            self.load(name)
        if self.active:
            for place in self._loaded[self.active].places:
                place.container[place.key] = place.own
            self.active = ""
        if name:
            for place in self._loaded[name].places:
                place.container[place.key] = place.layer
            self.active = name

    def close(self) -> None:
        """Let go of everything."""
        self.use("")
        self._loaded.clear()
        self._model = None

    def _known(self, name: str) -> AdapterFiles:
        files = self._files.get(name)
        if files is None:
            there = f"there are: {', '.join(self._files)}" if self._files else "there are none"
            raise ModelNotFoundError(f"no adapter {name!r:.80} here; {there}")
        return files

    def _make_room(self, needed: int) -> None:
        """Until the others and `needed` bytes are within the limit."""
        for name in list(self._loaded):
            if self.nbytes + needed <= self.max_bytes:
                return
            if name != self.active:
                del self._loaded[name]

    def _checked(self, files: AdapterFiles, tensors: Mapping[str, Any]) -> dict[str, Place]:
        """Layers for the adapter, by path, with weights still to be filled in. The model must be as it is."""
        layers = upstream.lora_layers(
            self._model,
            num_layers=files.num_layers,
            rank=files.rank,
            scale=files.scale,
            keys=None if files.keys is None else list(files.keys),
            dora=files.dora,
        )
        expected = {f"{path}.{leaf}": layer[leaf].shape for path, layer in layers.items() for leaf in _leaves(layer)}
        problems = [*_wrong(tensors, expected), *(f"{name}: missing" for name in expected if name not in tensors)]
        if problems:
            named = "\n  ".join(problems[:MAX_NAMED])
            more = f"\n  … and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
            raise ModelFileError(f"{files.weights} doesn't fit this model; was it made for another?\n  {named}{more}")
        return {
            path: Place(container, key, own, layers[path])
            for path, container, key, own in upstream.child_slots(self._model)
            if path in layers
        }

    def _try(self, files: AdapterFiles, places: Iterable[Place]) -> None:
        """Build a forward, without computing it: some models look into a layer in place of calling it."""
        try:
            for place in places:
                place.container[place.key] = place.layer
            self._model(mx.array([[0]]))
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            raise UnsupportedModelError(
                f"this model can't run with the adapter in {files.folder}: {type(error).__name__}: {error}"
            ) from error
        finally:
            for place in places:
                place.container[place.key] = place.own

    def _filled(self, files: AdapterFiles) -> list[Place]:
        """The adapter's layers with its weights, read and computed."""
        tensors = check_safetensors(files.weights)
        says = json.dumps([files.num_layers, files.rank, files.scale, files.keys, files.dora])
        if digest_of(files.weights, says) != files.digest:
            raise ModelFileError(f"{files.weights} has changed since it was registered; load the model again")
        places = self._checked(files, tensors)
        try:
            arrays = mx.load(str(files.weights))
        except (RuntimeError, ValueError, OSError) as error:
            raise ModelFileError(f"{files.weights} cannot be read: {error}") from error
        assert isinstance(arrays, dict)
        for path, place in places.items():
            for leaf in _leaves(place.layer):
                weight = arrays[f"{path}.{leaf}"]
                place.layer[leaf] = weight.astype(mx.float32) if runtime.on_cpu() else weight
            place.layer.eval()
        mx.eval([place.layer[leaf] for place in places.values() for leaf in _leaves(place.layer)])
        return list(places.values())


def _leaves(layer: nn.Module) -> list[str]:
    return [leaf for leaf in LEAVES if isinstance(layer.get(leaf), mx.array)]


def _wrong(tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with each tensor that is there."""
    found: list[str] = []
    for name, info in tensors.items():
        if name not in expected:
            found.append(f"{name:.200}: the model has no such place for an adapter")
        elif tuple(info.shape) != tuple(expected[name]):
            found.append(f"{name:.200}: its shape is {list(info.shape)}, the model's {list(expected[name])}")
        elif info.dtype not in FLOATS:
            found.append(f"{name:.200}: its dtype is {info.dtype}; {', '.join(sorted(FLOATS))} can be used")
    return found


def _bytes_in_memory(shape: Iterable[int], dtype: str) -> int:
    size = 1
    for axis in shape:
        size *= axis
    return size * (4 if runtime.on_cpu() or dtype == "F32" else 2)
