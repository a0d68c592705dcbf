"""Where a run stands, and what makes it the same run when it is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxinfer.errors import ModelFileError
from mlxinfer.lora.types import Judged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.nn as nn

    from mlxinfer.lora.config import TrainConfig
    from mlxinfer.lora.types import Example

SAMPLED = 64
"""Values of each array."""


@dataclasses.dataclass(slots=True)
class State:
    """Saved with every checkpoint. What is random is a function of the seed and the update: no RNG is needed."""

    fingerprint: str
    update: int = 0
    """Updates that are done."""
    epoch: int = 0
    position: int = 0
    """Updates of this epoch that are done."""
    tokens: int = 0
    best_loss: float | None = None
    best_update: int = 0
    evaluations_since_best: int = 0
    evaluated: int = 0
    """The last update after which held-out rows were looked at."""
    held_out: str = ""
    """Digest of those rows."""

    @classmethod
    def restored(cls, held: Mapping[str, Any], source: str) -> State:
        """From a checkpoint's JSON. Raises ModelFileError for a field that is missing or can't be."""
        values: dict[str, Any] = {one.name: held.get(one.name) for one in dataclasses.fields(cls)}
        state = cls(**values)
        for one in dataclasses.fields(cls):
            value = getattr(state, one.name)
            if one.name == "best_loss":
                good = value is None or (isinstance(value, float) and math.isfinite(value))
            else:
                text = one.name in ("fingerprint", "held_out")
                good = isinstance(value, str) if text else type(value) is int and value >= 0
            if not good:
                raise ModelFileError(
                    f"{source}: state.json: {one.name} is {value!r:.80}; the checkpoint is damaged. Delete its folder "
                    "to resume from an earlier one"
                )
        return state

    def with_held_out(self, held_out: str) -> State:
        """To go on with these rows; what was best on others says nothing about them."""
        if held_out in ("", self.held_out):
            return self
        fresh = {"best_loss": None, "best_update": 0, "evaluations_since_best": 0, "evaluated": 0}
        return dataclasses.replace(self, held_out=held_out, **fresh)


def fingerprint_of(
    config: TrainConfig,
    items: Sequence[Any],
    units: Sequence[tuple[Example, ...]],
    ranks: int,
    model: nn.Module,
    teacher: nn.Module | None,
    *,
    packed: bool,
) -> str:
    """Of the options, the rows, the ranks, and the base and the teacher: what a resumed run shares with the one
    before."""
    digest = hashlib.sha256(f"{config.fingerprint()} {ranks} {packed} ".encode())
    _add_weights(digest, model, without=set(dict(tree_flatten(model.trainable_parameters()))))
    if teacher is not None:
        _add_weights(digest, teacher, without=set())
    _add_rows(digest, items, units)
    return digest.hexdigest()


def digest_of_rows(items: Sequence[Any], units: Sequence[tuple[Example, ...]]) -> str:
    """Of rows alone."""
    digest = hashlib.sha256()
    _add_rows(digest, items, units)
    return digest.hexdigest()


def _add_rows(digest: hashlib._Hash, items: Sequence[Any], units: Sequence[tuple[Example, ...]]) -> None:
    for item, unit in zip(items, units, strict=True):
        digest.update(f"{len(unit)}{item.wanted if isinstance(item, Judged) else ''}".encode())
        for example in unit:
            digest.update(np.array(example.token_ids, np.int64).tobytes())
            digest.update(np.array(example.supervised, np.bool_).tobytes())


def _add_weights(digest: hashlib._Hash, model: nn.Module, without: set[str]) -> None:
    """Some values of every array: of another fine-tuning all would be others."""
    flat: dict[str, Any] = dict(tree_flatten(model.parameters()))
    for name, value in sorted(flat.items()):
        if name not in without:
            some = value.reshape(-1)[:: max(1, value.size // SAMPLED)]
            digest.update(f"{name} {value.shape} {value.dtype}".encode())
            digest.update(np.array(mx.contiguous(some).view(mx.uint8)).tobytes())


def seed_of(seed: int, update: int, rank: int) -> int:
    """The RNG's seed of one update on one rank, 64 bits."""
    digest = hashlib.sha256(f"{seed} {update} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
