"""Finds out how a model can be batched, by trying it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.engine.kv import SeqKV, UnbatchableError, sequence_like
from mlxinfer.engine.padded_probe import probe_padded
from mlxinfer.engine.ragged import Batch
from mlxinfer.upstream import make_cache

if TYPE_CHECKING:
    from collections.abc import Generator

    from mlxinfer.engine.padded import PaddedView
    from mlxinfer.engine.ragged import RaggedAttention


@dataclass(frozen=True, slots=True)
class Tier:
    """How a model is batched. `view` is set where its rows are shown as padded views; `reason` is for people."""

    name: str
    reason: str
    view: PaddedView | None = None


def probe_tier(model: nn.Module, attention: RaggedAttention, vocab_size: int) -> Generator[None, None, Tier]:
    """Try handles, then padded views; what neither serves runs row by row over mlx-lm's own caches.

    In pieces of a forward or a few, so that other engines go on meanwhile.
    """
    try:
        leaves = list(sequence_like(make_cache(model)).leaves())
    except UnbatchableError as error:
        return Tier("sequential", str(error))
    recurrent = any(not isinstance(leaf, SeqKV) for leaf in leaves)
    name = "batched-state" if recurrent else "ragged"
    problem = yield from _problem_with_handles(model, attention)
    if problem is None:
        return Tier(name, "recurrent state by row" if recurrent else "keys and values only")
    view, refusal = yield from probe_padded(model, attention, vocab_size)
    attention.handles.clear()
    if view is None:
        return Tier("sequential", problem if refusal == problem else f"{problem}; padded view: {refusal}")
    return Tier(name, f"padded view: {problem}", view)


def _problem_with_handles(model: nn.Module, attention: RaggedAttention) -> Generator[None, None, str | None]:
    """Why handles can't serve `model`; None if they can. Runs two rows with handles nobody should look into.

    The handles hold NaN, and in a second run they are longer too. NaN in the logits, logits that follow the handles'
    length, a handle that attention never looked up, or an error means that the model uses its keys, mask or positions
    in a way that a batch without padding can't serve.
    """
    try:
        logits = yield from _probe(model, attention, 0)
        longer = yield from _probe(model, attention, 5)
        if mx.any(mx.isnan(logits)).item():
            return "keys are used outside of attention as well"
        if not mx.array_equal(logits, longer).item():
            return "positions are taken from the shape of the keys"
    except UnbatchableError as error:
        return str(error)
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        attention.handles.clear()
    return None


def _probe(model: Any, attention: RaggedAttention, extra: int) -> Generator[None, None, mx.array]:
    """Logits of one batched step of two short rows, with poisoned handles `extra` positions too long."""
    sequences = [sequence_like(make_cache(model)) for _ in range(2)]
    # Longer than a state of the last few tokens, which would have another size in each row.
    for sequence, prompt in zip(sequences, ([0, 1] * 4, [1, 0, 1, 1, 0, 0, 1]), strict=True):
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
