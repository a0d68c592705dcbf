"""What a model's own code does to published tensors, found out without reading one.

`sanitize` of mlx-lm's class runs over placeholders of the right shapes. A result that is a placeholder is a renamed
tensor, a recorded `mx.stack` is experts put together, and anything else was computed: which tensors it was computed
from is read off mlx's graph. The values come in a second run, over the few real tensors that one result needs.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import mlx.nn as nn

    from mlxinfer.convert.sources.base import Logical

LARGEST_AXIS = 2**31 - 1
NAMED = 12
"""How many tensors an error lists by name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An array that a parameter is, or is stacked of."""

    source: str | None
    """The logical tensor that it is, unchanged; None when the model's code computes it."""
    inputs: tuple[str, ...]
    """The logical tensors it is made of."""


@dataclass(frozen=True, slots=True)
class Output:
    """A parameter of the model and where its values come from."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As published, or as the model's code computes it."""
    pieces: tuple[Piece, ...]
    stacked: bool
    """The pieces are the parameter's parts along the first axis, for example experts."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Every parameter once, in the model's order, and the tensors that the model's code leaves out."""

    outputs: tuple[Output, ...]
    dropped: tuple[str, ...]


Key = tuple[str, int]
"""A parameter's name and the number of its piece."""


class Tracer:
    """Runs the model's code over the tensors of one checkpoint. Raises ModelFileError where they don't fit together."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Logical]) -> None:
        self._model = model
        self._tensors = tensors

    def trace(self) -> Trace:
        """Where each parameter comes from. Raises ModelFileError that names unknown, missing and misshapen tensors."""
        elements = {name: _element(tensor) for name, tensor in self._tensors.items()}
        placeholders = {name: _placeholder(tensor, elements[name]) for name, tensor in self._tensors.items()}
        results, stacks = self._run(placeholders)
        names = {id(array): name for name, array in placeholders.items()}
        arrays = {name: _pieces(array, stacks, names) for name, array in results.items()}
        computed = _computed([a for pieces in arrays.values() for a in pieces if id(a) not in names], elements)
        shapes = parameter_shapes(self._model)
        used: set[str] = set()
        outputs: dict[str, Output] = {}
        for name, array in results.items():
            pieces = tuple(
                Piece(names[id(a)], (names[id(a)],)) if id(a) in names else computed[id(a)] for a in arrays[name]
            )
            used.update(source for piece in pieces for source in piece.inputs)
            outputs[name] = Output(name, array.shape, dtype_name(array), pieces, arrays[name][0] is not array)
        self._check(outputs, shapes)
        dropped = tuple(name for name in self._tensors if name not in used)
        return Trace(tuple(outputs[name] for name in shapes), dropped)

    def compute(self, keys: Iterable[Key], given: Mapping[str, mx.array]) -> dict[Key, mx.array]:
        """The lazy values of computed pieces. `given` must hold their inputs; nothing else is looked at."""
        arrays = {
            name: given[name] if name in given else _placeholder(tensor, _element(tensor))
            for name, tensor in self._tensors.items()
        }
        results, stacks = self._run(arrays)
        wanted: dict[Key, mx.array] = {}
        for name, index in keys:
            pieces = _pieces(results[name], stacks, ())
            wanted[name, index] = pieces[index] if len(pieces) > index else results[name]
        return wanted

    def _run(self, arrays: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[int, _Stack]]:
        with _recorded_stacks() as stacks:
            results = upstream.sanitized(self._model, arrays)
        for name, array in results.items():
            if not isinstance(array, mx.array):
                raise ModelFileError(f"the model's code makes {name!r:.120} a {type(array).__name__}, not an array")
        return results, stacks

    def _check(self, outputs: Mapping[str, Output], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Every parameter is made, in its shape, and nothing else is."""
        problems: list[str] = []
        if unknown := [name for name in outputs if name not in shapes]:
            problems.append(f"{_listed(unknown)} belong to nothing in the model")
        if missing := [name for name in shapes if name not in outputs]:
            problems.append(f"{_listed(missing)} are missing")
        for name, output in outputs.items():
            if output.shape != shapes.get(name, output.shape):
                made = ", ".join(output.pieces[0].inputs[:2]) or "nothing"
                problems.append(f"{name} (from {made}) has the shape {output.shape}; the model needs {shapes[name]}")
        if problems:
            more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
            raise ModelFileError(
                f"the tensors don't match {self._model.__class__.__module__.rpartition('.')[2]}: "
                f"{'; '.join(problems[:NAMED])}{more}"
            )


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters by name, in its order."""
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # pyright: ignore
    return {name: array.shape for name, array in parameters}


def dtype_name(array: mx.array) -> str:
    """For example "bfloat16"."""
    return str(array.dtype).rpartition(".")[2]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(f'{name:.200}' for name in names[:NAMED])}{more}"


def _element(tensor: Logical) -> mx.array:
    dtype: Any = getattr(mx, tensor.dtype)
    return mx.array(1, dtype=dtype)


def _placeholder(tensor: Logical, element: mx.array) -> mx.array:
    """One element in the shape of many: whoever looks at it sees ones, and it takes no memory."""
    if max(tensor.shape, default=0) > LARGEST_AXIS:
        raise ModelFileError(
            f"{tensor.name:.200} has the shape {tensor.shape}; mlx counts to {LARGEST_AXIS} along an axis"
        )
    return mx.broadcast_to(element, tensor.shape)


@dataclass(frozen=True, slots=True)
class _Stack:
    result: mx.array
    """Held so that its id stays its own."""
    arrays: list[mx.array]


@contextlib.contextmanager
def _recorded_stacks() -> Iterator[dict[int, _Stack]]:
    """Note what `mx.stack` puts together along the first axis, by the id of its result."""
    original: Callable[..., mx.array] = mx.stack
    stacks: dict[int, _Stack] = {}

    def recording(arrays: list[mx.array], axis: int = 0, **rest: Any) -> mx.array:
        arrays = list(arrays)
        result = original(arrays, axis, **rest)
        if axis == 0:
            stacks[id(result)] = _Stack(result, arrays)
        return result

    mx.stack = recording
    try:
        yield stacks
    finally:
        mx.stack = original


def _pieces(array: mx.array, stacks: Mapping[int, _Stack], names: Iterable[int]) -> list[mx.array]:
    """The arrays that `array` is stacked of, or itself."""
    stack = stacks.get(id(array))
    return [array] if stack is None or id(array) in names else stack.arrays


def _computed(arrays: list[mx.array], elements: Mapping[str, mx.array]) -> dict[int, Piece]:
    """What each array is computed from, by its id: read off the graph that ends in the elements of the placeholders."""
    if not arrays:
        return {}
    sources = {f"in{i}": name for i, name in enumerate(elements)}
    named = {label: elements[name] for label, name in sources.items()}
    results = {f"out{i}": array for i, array in enumerate({id(a): a for a in arrays}.values())}
    before = _graph(list(results.values()), named | results)
    pieces: dict[int, Piece] = {}
    for label, array in results.items():
        # Two Python objects may stand for one array of mlx (a cast to the dtype it has); one of two names is lost.
        own = before if label in before else _graph([array], named | {label: array})
        pieces[id(array)] = _piece(label, own, sources)
    return pieces


def _graph(arrays: list[mx.array], named: Mapping[str, mx.array]) -> dict[str, list[str]]:
    """What stands right before each node of mlx's graph: operations before arrays, arrays before operations."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays, **named)
    before: dict[str, list[str]] = {}
    for line in text.getvalue().splitlines():
        source, arrow, target = line.partition(" -> ")
        if arrow:
            before.setdefault(target.strip('"'), []).append(source.strip('"'))
    return before


def _piece(label: str, before: Mapping[str, list[str]], sources: Mapping[str, str]) -> Piece:
    """The placeholders from which the node `label` can be reached, in their order."""
    found: set[str] = set()
    seen, todo = {label}, [label]
    while todo:
        node = todo.pop()
        if node in sources:
            found.add(node)
            continue
        for earlier in before.get(node, ()):
            if earlier not in seen:
                seen.add(earlier)
                todo.append(earlier)
    inputs = tuple(sources[source] for source in sorted(found, key=lambda source: int(source[2:])))
    # Nothing but the placeholder's own broadcast stands between: it is the placeholder under another Python object.
    operations = before.get(label, ())
    same = len(inputs) == 1 and len(operations) == 1 and all(node in sources for node in before[operations[0]])
    return Piece(inputs[0] if same else None, inputs)
