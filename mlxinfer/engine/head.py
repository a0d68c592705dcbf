"""Keeps prompt tokens out of the model's head: their logits are of no use, and the head is a large product.

mlx-lm's models end in `head(stack(tokens))`. The stack, the module that owns the list of layers, gets a subclass of
its own class that can leave rows out of what it returns. Whether a model is built that way is tried, not assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class HeadRows:
    """While `keep` is set, the stack returns those rows [K] only of its output [R, …]."""

    def __init__(self) -> None:
        self.keep: mx.array | None = None
        self.installed = False

    def install(self, model: nn.Module, forward: Callable[[mx.array | None], mx.array]) -> Generator[None, None, None]:
        """Put it under `model`, if `forward(keep)` gives the same logits [K, 1, vocab] as `forward(None)[keep]`."""
        stack = stack_of(model)
        if stack is None:
            return
        original = type(stack)
        rows = self

        class Stack(original):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                out = super().__call__(*args, **kwargs)
                return out if rows.keep is None else out[rows.keep]

        Stack.__name__ = original.__name__
        stack.__class__ = Stack
        keep = mx.array([1])
        try:
            whole = forward(None)
            mx.eval(whole)
            yield
            part = forward(keep)
            mx.eval(part)
            yield
            self.installed = whole.shape[0] > 1 and bool(mx.allclose(whole[keep], part, rtol=1e-3, atol=1e-3).item())
        except (ValueError, TypeError, IndexError, AttributeError, RuntimeError):
            self.installed = False
        if not self.installed:
            stack.__class__ = original


def stack_of(model: Any) -> nn.Module | None:
    """The outermost module below `model` that holds a list of modules: the stack of layers."""
    level = [child for child in model.children().values() if isinstance(child, nn.Module)]
    while level:
        for module in level:
            if any(isinstance(v, list) and v and isinstance(v[0], nn.Module) for v in module.children().values()):
                return module
        level = [c for m in level for c in m.children().values() if isinstance(c, nn.Module)]
    return None


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of the stack; none where it cannot be found."""
    stack = stack_of(model)
    lists = [v for v in stack.children().values() if isinstance(v, list)] if stack is not None else []
    return [layer for held in lists for layer in held if isinstance(layer, nn.Module)]
