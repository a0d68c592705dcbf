"""Finds out how a model can be batched, by trying it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.engine.kv import SeqKV, UnbatchableError, sequence_like
from mlxinfer.engine.ragged import Batch
from mlxinfer.upstream import make_cache

if TYPE_CHECKING:
    from collections.abc import Generator

    from mlxinfer.engine.ragged import RaggedAttention


def probe_tier(model: nn.Module, attention: RaggedAttention) -> Generator[None, None, tuple[str, str]]:
    """(tier, reason), in pieces of one forward: build the caches, then run two rows with handles that nobody should
    look into.

    The handles hold NaN, and in a second run they are longer too. NaN in the logits, logits that follow the handles'
    length, a handle that attention never looked up, or an error means that the model uses its keys, mask or positions
    in a way that a ragged batch can't serve; it then runs row by row over mlx-lm's own caches.
    """
    try:
        leaves = list(sequence_like(make_cache(model)).leaves())
    except UnbatchableError as error:
        return "sequential", str(error)
    try:
        logits = yield from _probe(model, attention, 0)
        longer = yield from _probe(model, attention, 5)
        if mx.any(mx.isnan(logits)).item():
            return "sequential", "keys are used outside of attention as well"
        if not mx.array_equal(logits, longer).item():
            return "sequential", "positions are taken from the shape of the keys"
    except (UnbatchableError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        return "sequential", f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        attention.handles.clear()
    recurrent = any(not isinstance(leaf, SeqKV) for leaf in leaves)
    return ("batched-state", "recurrent state by row") if recurrent else ("ragged", "keys and values only")


def _probe(model: Any, attention: RaggedAttention, extra: int) -> Generator[None, None, mx.array]:
    """Logits of one batched step of two short rows, with poisoned handles `extra` positions too long."""
    sequences = [sequence_like(make_cache(model)) for _ in range(2)]
    for sequence, prompt in zip(sequences, ([0, 1], [1]), strict=True):
        batch = Batch([sequence], attention)
        batch.begin(len(prompt))
        model(mx.array([prompt]), cache=batch.caches)
        batch.end()
        mx.eval(sequence.arrays())
        yield
    batch = Batch(sequences, attention)
    batch.poison(extra)
    batch.begin(1)
    logits = model(mx.array([[1], [0]]), cache=batch.caches)
    if unused := attention.handles.unused():
        raise UnbatchableError(f"{unused} layers use their keys outside of attention")
    batch.end()
    mx.eval(logits)
    attention.handles.clear()
    yield
    return logits
