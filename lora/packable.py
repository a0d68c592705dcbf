"""Finds out whether a model can be trained on packed rows, by comparing it with itself.

Three segments are run alone and in one row. Their logits must agree, near the front of a row and far down it, and what
the neighbours hold must not move a single bit. Refuses when in doubt.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.lora.modes import evaluating
from mlxinfer.lora.segments import Layout, SegmentCache, isolated_by, segment_caches

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.nn as nn

LENGTHS = (11, 20, 14)
PADDING = 3
FEW = 100
"""Token ids that every model has."""
WIDTH = 4096
"""How far down a row the segments are tried, unless told."""
HALF_TOLERANCE = 0.04
"""In half precision, where a row rounds differently from a segment by itself and single tokens may go another way."""
TOLERANCE = 1e-4
"""Of the largest logit."""
FAR_TOLERANCE = 5e-3
"""Far down a row the angles of rotary embeddings have fewer digits."""

FAILURES = (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError, AssertionError)


def refusal(model: nn.Module, config: Mapping[str, Any], width: int = WIDTH) -> str:
    """Why rows of up to `width` tokens may not hold several segments of this model; "" if they may."""
    try:
        with evaluating(model):
            return _try(model, config, width)
    except UnsupportedModelError as error:
        return str(error)
    except FAILURES as error:
        return f"it needs a cache of its own: {type(error).__name__}: {str(error)[:200]}"


def _try(model: nn.Module, config: Mapping[str, Any], width: int) -> str:
    facts = {**config, **(config.get("text_config") or {})}
    rng = np.random.default_rng(0)
    numbers = np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, PADDING]).astype(np.int32)
    ids = rng.integers(0, facts.get("vocab_size", FEW), len(numbers)).astype(np.int32)
    held = numbers > 0
    bounds = np.cumsum(LENGTHS)[:-1]
    layout = Layout(numbers)
    near = segment_caches(model, layout)
    half = _run(model, ids[:2]).dtype != mx.float32
    alone = np.concatenate([_logits(model, part) for part in np.split(ids[held], bounds)])
    packed = _logits(model, ids, near)
    if not _close(packed[held], alone, half, TOLERANCE):
        return "a segment gets other logits in a row than alone: positions count from the start of the row"
    # The middle one has neighbours on both sides.
    kept = numbers == 2
    moved = _logits(model, np.where(kept, ids, np.roll(ids, 1)), near)
    if not np.array_equal(moved[kept], packed[kept], equal_nan=True):
        return "what a segment holds shows in the logits of another"
    longest = facts.get("max_position_embeddings") or width
    far = min(width, longest) - len(numbers)
    # A table of positions has been refused above: past its end there may be anything.
    if far > 0:
        shifted = _logits(model, ids, segment_caches(model, layout, offset=far))[held]
        if not _close(shifted, alone, half, FAR_TOLERANCE):
            return f"a segment gets other logits {far:,} tokens down a row than at its start"
    return ""


def _logits(model: nn.Module, ids: np.ndarray, caches: list[SegmentCache] | None = None) -> np.ndarray:
    scope = isolated_by(model, [caches]) if caches else contextlib.nullcontext()
    with scope:
        return np.array(_run(model, ids).astype(mx.float32))


def _run(model: Any, ids: np.ndarray) -> mx.array:
    return model(mx.array(ids[None]))[0]


def _close(ours: np.ndarray, theirs: np.ndarray, half: bool, limit: float) -> bool:
    """Finite where the other is, and off by at most `limit` of the largest; in half precision at most positions."""
    finite = np.isfinite(theirs)
    if not np.array_equal(np.isfinite(ours), finite) or not finite.any():
        return False
    # Written so that NaN fails.
    off = np.abs(np.subtract(ours, theirs, where=finite, out=np.zeros_like(ours))).max(axis=-1)
    off /= np.abs(theirs[finite]).max()
    return bool(np.median(off) <= HALF_TOLERANCE if half else off.max() <= limit)
