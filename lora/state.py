"""Where a run stands, and what makes it the same run when it is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.lora.types import Judged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.lora.config import TrainConfig
    from mlxinfer.lora.types import Example


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

    @classmethod
    def restored(cls, held: Mapping[str, Any]) -> State:
        """From a checkpoint's JSON."""
        return cls(**{one.name: held[one.name] for one in dataclasses.fields(cls)})


def fingerprint_of(
    config: TrainConfig, items: Sequence[Any], units: Sequence[tuple[Example, ...]], ranks: int, *, packed: bool
) -> str:
    """Of the options, the rows and the number of ranks: what a resumed run shares with the one before."""
    digest = hashlib.sha256(f"{config.fingerprint()} {ranks} {packed} ".encode())
    for item, unit in zip(items, units, strict=True):
        digest.update(f"{len(unit)}{item.wanted if isinstance(item, Judged) else ''}".encode())
        for example in unit:
            digest.update(np.array(example.token_ids, np.int64).tobytes())
            digest.update(np.array(example.supervised, np.bool_).tobytes())
    return digest.hexdigest()


def seed_of(seed: int, update: int, rank: int) -> int:
    """The RNG's seed of one update on one rank, 64 bits."""
    digest = hashlib.sha256(f"{seed} {update} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
