"""The engine's runner where the model is elsewhere: steps go to the ranks, tokens come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.nn as nn

from mlxinfer.distributed import wire
from mlxinfer.distributed.ranks import RanksLostError
from mlxinfer.engine.adapters import Adapters
from mlxinfer.engine.events import RowsLostError
from mlxinfer.engine.memory import KVCost
from mlxinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.distributed.ranks import RankSet
    from mlxinfer.engine.adapter_files import AdapterFiles
    from mlxinfer.engine.grammar import CompiledGrammar
    from mlxinfer.engine.rows import Outputs, RowSpec
    from mlxinfer.engine.steps import Step


TRIES = 2
"""Times that ranks are started again where none of them gives anything."""


class RemoteRunner:
    """What Engine asks of a Runner. `start` makes ranks; it is called again, with why, when they are lost."""

    def __init__(self, start: Callable[[str], RankSet]) -> None:
        """Raises what `start` raises."""
        self._start = start
        self._ranks = start("")
        self._known: dict[str, dict[str, Any]] = {}
        self.prefixes = None
        self.restores = False
        self.adapters = NoAdapters()
        self.sent = -1
        """The last step's number that the ranks were told."""
        self._in_vain = 0
        """How often ranks were lost before they gave anything."""

    @property
    def ranks(self) -> RankSet:
        return self._ranks

    @property
    def tier(self) -> str:
        return str(self._ranks.facts["tier"])

    @property
    def fused(self) -> bool:
        return bool(self._ranks.facts["fused"])

    @property
    def needs_checkpoints(self) -> bool:
        return bool(self._ranks.facts["needs_checkpoints"])

    @property
    def kv_cost(self) -> KVCost:
        """Of one rank's part."""
        per_token, windowed, fixed, step = self._ranks.facts["kv"]
        return KVCost(per_token, tuple((int(most), int(size)) for most, size in windowed), fixed, step)

    @property
    def weight_bytes(self) -> int:
        """Of rank 0's part."""
        return int(self._ranks.facts["weight_bytes"])

    def admit(self, spec: RowSpec, grammar: CompiledGrammar | None = None) -> None:
        """Tell the ranks of a request; only rank 0 samples, and has to know its grammar."""
        source = None if grammar is None else grammar.source
        plain, whole = wire.spec_out(spec, None), wire.spec_out(spec, source)
        plain["logprobs"] = None
        self._known[spec.request_id] = {"plain": plain, "whole": whole}
        if not self._ranks.lost:
            # Where they are lost, the next step says so, and all that is known is told to the new ones.
            self._told(spec.request_id)

    def launch(self, step: Step) -> RemoteLaunched:
        """Raises RowsLostError."""
        for release in step.release:
            if release.final:
                self._known.pop(release.request_id, None)
        self._send({"step": wire.step_out(step)})
        self.sent = step.number
        return RemoteLaunched(step, self)

    def forget(self, request_id: str) -> None:
        """A row that holds nothing."""
        if self._known.pop(request_id, None) is not None and not self._ranks.lost:
            self._send({"forget": request_id})

    def drop_all(self) -> None:
        """Nothing that the ranks hold can be trusted: end them, and wait until new ones have loaded."""
        why = self._ranks.lost or "a step failed"
        self._ranks.close()
        self._in_vain += 1
        if self._in_vain > TRIES:
            self._in_vain = 0
            raise RanksLostError(f"ranks were lost {TRIES + 1} times before they gave anything: {why}")
        self._ranks = self._start(why)
        for request_id in self._known:
            self._told(request_id)

    def read(self, number: int) -> Outputs:
        """What a step gave, waited for. Raises RowsLostError."""
        if self.sent == number:
            self._send({"read": number})
        while True:
            try:
                found, out = self._ranks.output()
            except RanksLostError as error:
                raise RowsLostError(str(error)) from error
            if found == number:
                self._in_vain = 0
                return out
            # A step that only let rows go is never read.
            assert found < number, f"the ranks gave step {found} where {number} is due"

    def close(self) -> None:
        """End the ranks."""
        self._known.clear()
        self._ranks.close()

    def kv_bytes(self) -> int:
        return 0

    def _told(self, request_id: str) -> None:
        held = self._known[request_id]
        try:
            for rank in range(self._ranks.size):
                self._ranks.send(rank, {"admit": held["plain"] if rank else held["whole"]})
        except RanksLostError as error:
            raise RowsLostError(str(error)) from error

    def _send(self, message: Any) -> None:
        try:
            self._ranks.send_all(message)
        except RanksLostError as error:
            raise RowsLostError(str(error)) from error


@dataclass(slots=True)
class RemoteLaunched:
    """A step that the ranks do; as Launched, where nothing is to be done here."""

    step: Step
    runner: RemoteRunner

    @property
    def choice(self) -> bool | None:
        """None where it gives no token."""
        return True if self.step.decode else None

    def follow(self) -> None: ...

    def submit(self) -> None: ...

    def choose(self) -> None: ...

    def read(self) -> Outputs:
        return self.runner.read(self.step.number)


class NoAdapters(Adapters):
    """Ranks have none yet."""

    def __init__(self) -> None:
        super().__init__(nn.Module())

    def add(self, files: AdapterFiles) -> None:
        raise UnsupportedModelError(f"the adapter {files.name}: a model over several machines takes no adapters yet")
