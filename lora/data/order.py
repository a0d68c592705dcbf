"""In which order rows are seen: a seeded permutation each epoch."""

from __future__ import annotations

import numpy as np


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count), int64, that depends on nothing but the arguments."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)
