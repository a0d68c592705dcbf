"""mlx-lm's own loop: its caches, the whole prompt in one forward, then one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache


@dataclass(frozen=True)
class Trace:
    """What came out for one prompt: greedy `tokens` [steps] and the `logits` [steps, vocab] they were taken from."""

    tokens: list[int]
    logits: np.ndarray


def reference(model: nn.Module, prompt: list[int], steps: int, *, chunk: int | None = None) -> Trace:
    """Greedy decoding with mlx-lm's caches. `chunk` feeds all but the last prompt token in pieces of that size."""
    cache: list[Any] = make_prompt_cache(model)
    pieces = [prompt]
    if chunk is not None:
        body = prompt[:-1]
        pieces = [body[i : i + chunk] for i in range(0, len(body), chunk)] + [prompt[-1:]]
    for piece in pieces[:-1]:
        mx.eval(model(mx.array([piece]), cache=cache))
    out = model(mx.array([pieces[-1]]), cache=cache)[0, -1]
    tokens, logits = [], []
    for _ in range(steps):
        row = np.array(out.astype(mx.float32))
        logits.append(row)
        tokens.append(int(row.argmax()))
        out = model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]
    return Trace(tokens, np.stack(logits))


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """max |a - b| / max |b| over the finite values; infinite if shapes or the places of NaN and infinities differ."""
    finite = np.isfinite(theirs)
    if ours.shape != theirs.shape or not np.array_equal(np.isfinite(ours), finite) or not finite.any():
        return float("inf")
    ours, theirs = ours[finite], theirs[finite]
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
