"""A model's body and head run apart, so that the head can see some positions only, a chunk at a time.

mlx-lm's models end in `head(stack(tokens))`: tied, untied or quantized, scaled, capped. The stack, the module that
owns the list of layers, is either listened to or made to return given hidden states; whatever the model does with them
is its head. Whether a model is built that way is tried, not assumed; where it isn't, the body is the whole model.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer.engine.head import layers_of, stack_of
from mlxinfer.lora.modes import calling, evaluating

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILURES = (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError)
TOLERANCE = {mx.float32: 1e-5}
HALF_TOLERANCE = 2e-2
"""Of the largest logit: the head is the same arithmetic, on another number of rows."""
TRIAL_TOKENS = 6


class Split:
    """One model as body and head. `whole` says that they could not be told apart."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._stack: Any = stack_of(model)
        self._owners: list[str] = []
        self._names: list[str] = []
        self._hidden: tuple[int, mx.Dtype] = (0, mx.float32)
        self.vocab_size = 0
        # Dropout in front of the head would make two runs differ.
        with evaluating(model):
            try:
                self.whole = not self._agrees()
            except FAILURES:
                self.whole = True

    def body(self, inputs: mx.array) -> mx.array:
        """Token ids [rows, width] → what the head is fed, [rows, width, hidden_size]."""
        model: Any = self.model
        if self.whole:
            return model(inputs)
        heard: list[mx.array] = []

        def listen(own: Any, stack: Any, *args: Any, **options: Any) -> Any:
            heard.append(own.__call__(stack, *args, **options))
            return heard[-1]

        with calling(self._stack, listen):
            # The head's part of this graph is never evaluated.
            model(inputs)
        # One, or one for each row of a packed batch.
        return mx.concatenate(heard) if len(heard) > 1 else heard[0]

    def head(self, hidden: mx.array) -> mx.array:
        """[n, hidden_size] → logits [n, vocab_size]."""
        if self.whole:
            return hidden
        model: Any = self.model
        with calling(self._stack, lambda *_, **__: hidden[None]):
            return model(mx.zeros((1, hidden.shape[0]), mx.int32))[0]

    def parameters(self) -> dict[str, mx.array]:
        """What is trained and the head depends on, by path; {} where the head is frozen."""
        if self.whole:
            return {}
        trained = self._outside_layers()
        names = list(trained)
        if names != self._names:
            self._owners, self._names = self._find_owners(trained), names
        return {name: array for name, array in trained.items() if _owner(name) in self._owners}

    @contextlib.contextmanager
    def using(self, parameters: dict[str, mx.array]) -> Iterator[None]:
        """Inside, the model has these."""
        if not parameters:
            yield
            return
        now: Any = dict(tree_flatten(self.model.trainable_parameters()))
        before = [(name, now[name]) for name in parameters]
        self.model.update(tree_unflatten(list(parameters.items())))
        try:
            yield
        finally:
            self.model.update(tree_unflatten(before))

    def _agrees(self) -> bool:
        """Whether head(body(x)) is the model, row by row."""
        model: Any = self.model
        inputs = mx.arange(2 * TRIAL_TOKENS, dtype=mx.int32).reshape(2, TRIAL_TOKENS)
        expected = model(inputs)
        self.vocab_size = expected.shape[-1]
        if self._stack is None:
            return False
        self.whole = False
        hidden = self.body(inputs)
        rows = mx.array([TRIAL_TOKENS + 1, 2, 4])
        found = self.head(hidden.reshape(-1, hidden.shape[-1])[rows])
        expected = expected.reshape(-1, expected.shape[-1])[rows]
        if found.shape != expected.shape:
            return False
        finite = mx.isfinite(expected)
        off = mx.where(found == expected, 0.0, mx.abs(found - expected)).max()
        limit = TOLERANCE.get(expected.dtype, HALF_TOLERANCE) * mx.where(finite, mx.abs(expected), 0.0).max()
        self._hidden = hidden.shape[-1], hidden.dtype
        return bool((off <= limit).item())

    def _outside_layers(self) -> dict[str, mx.array]:
        """Trained parameters that belong to no layer of the stack."""
        layers = {id(layer) for layer in layers_of(self.model)}
        inside = tuple(f"{path}." for path, module in self.model.named_modules() if id(module) in layers)
        trained: Any = tree_flatten(self.model.trainable_parameters())
        return {name: array for name, array in trained if not name.startswith(inside)}

    def _find_owners(self, trained: dict[str, mx.array]) -> list[str]:
        """Modules of which any parameter moves the head's output: a new adapter's A does not, its B does."""
        if not trained:
            return []
        size, dtype = self._hidden
        hidden = mx.random.normal((2, size), key=mx.random.key(0)).astype(dtype)
        names = list(trained)

        def run(*arrays: mx.array) -> list[mx.array]:
            with self.using(dict(zip(names, arrays, strict=True))):
                logits = self.head(hidden)
            return [mx.where(mx.isfinite(logits), logits, 0.0)]

        values = [mx.stop_gradient(trained[name]) for name in names]
        shape = mx.ones_like(run(*values)[0])
        _, slopes = mx.vjp(run, values, [mx.cos(mx.arange(shape.size, dtype=mx.float32).reshape(shape.shape))])
        moved = [name for name, slope in zip(names, slopes, strict=True) if mx.any(slope != 0).item()]
        return sorted({_owner(name) for name in moved})


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
