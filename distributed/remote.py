"""The engine's runner where the model is elsewhere: steps go to the ranks, tokens come back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed import wire
from mlxinfer.distributed.ranks import RanksLostError
from mlxinfer.distributed.remote_adapters import RemoteAdapters
from mlxinfer.distributed.remote_prefixes import RemotePrefixes
from mlxinfer.distributed.wire import PrefixOps
from mlxinfer.engine.events import RowsLostError
from mlxinfer.engine.memory import KVCost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlxinfer.distributed.ranks import RankSet
    from mlxinfer.engine.adapter_files import AdapterFiles
    from mlxinfer.engine.grammar import CompiledGrammar
    from mlxinfer.engine.prefix_disk import PrefixDisk
    from mlxinfer.engine.rows import Outputs, RowSpec
    from mlxinfer.engine.steps import Step


TRIES = 2
"""Times that ranks are started again where none of them gives anything."""


@dataclass(slots=True)
class _Known:
    """A request that the ranks know."""

    spec: RowSpec
    plain: dict[str, Any]
    whole: dict[str, Any]
    """For rank 0, which samples."""
    output: tuple[int, ...] = ()
    """Tokens that its row was begun with, behind the prompt."""
    length: int | None = None
    """Tokens that its row holds; None: it has no row."""

    def tokens(self, end: int) -> tuple[int, ...]:
        return (*self.spec.prompt_token_ids, *self.output)[:end]


class RemoteRunner:
    """What Engine asks of a Runner. `start` makes ranks; it is called again, with why, when they are lost."""

    def __init__(
        self,
        start: Callable[[str], RankSet],
        config: Mapping[str, Any] | None = None,
        bring: Callable[[AdapterFiles], Sequence[str]] | None = None,
    ) -> None:
        """`config` and `bring` are for adapters, as RemoteAdapters has them. Raises what `start` raises."""
        self._start = start
        self._ranks = start("")
        self._known: dict[str, _Known] = {}
        self.prefixes: RemotePrefixes | None = None
        self.adapters = RemoteAdapters(config or {}, bring, self._tell_adapter)
        self.sent = -1
        """The last step's number that the ranks were told."""
        self._in_vain = 0
        """How often ranks were lost before they gave anything."""
        self._asked = 0

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
    def restores(self) -> bool:
        """A row goes on the same from what another left, on every rank."""
        return all(told["restores"] for told in self._ranks.told.values())

    @property
    def kv_cost(self) -> KVCost:
        """Of one rank's part."""
        return _cost_in(self._ranks.facts)

    @property
    def weight_bytes(self) -> int:
        """Of rank 0's part."""
        return int(self._ranks.facts["weight_bytes"])

    def remember(self, disk: PrefixDisk | None = None) -> None:
        """As Runner.remember; nothing goes to disk."""
        if self.restores:
            self.prefixes = RemotePrefixes(
                self._dearest, needs_state=self.needs_checkpoints, exact=self._exact, room=self._ranks.spare_bytes
            )

    def admit(self, spec: RowSpec, grammar: CompiledGrammar | None = None) -> None:
        """Tell the ranks of a request; only rank 0 samples, and has to know its grammar."""
        source = None if grammar is None else grammar.source
        plain, whole = wire.spec_out(spec, None), wire.spec_out(spec, source)
        plain["logprobs"] = None
        self._known[spec.request_id] = _Known(spec, plain, whole)
        self._told(spec.request_id)

    def launch(self, step: Step) -> RemoteLaunched:
        """Raises RowsLostError."""
        ops = self._ops(step)
        for release in step.release:
            if release.final:
                self._known.pop(release.request_id, None)
        message = {} if ops.empty else {"prefix": wire.prefixes_out(ops)}
        self._send(message | {"step": wire.step_out(step)})
        self.sent = step.number
        return RemoteLaunched(step, self)

    def forget(self, request_id: str) -> None:
        """A row that holds nothing."""
        if self._known.pop(request_id, None) is not None:
            self._tell([{"forget": request_id}] * self._ranks.size)

    def drop_all(self) -> None:
        """Nothing that the ranks hold can be trusted: end them, and wait until new ones have loaded."""
        why = self._ranks.lost or "a step failed"
        self._ranks.close()
        self._ranks = self._again(why)
        if self.prefixes is not None:
            # What the others held is gone.
            room = self._ranks.spare_bytes if self.restores else 0
            self.prefixes.begin(self._dearest, exact=self._exact, room=room)
        self.adapters.again()
        for request_id, known in self._known.items():
            known.length = None
            self._told(request_id)

    def _again(self, why: str) -> RankSet:
        while True:
            self._in_vain += 1
            if self._in_vain > TRIES:
                self._in_vain = 0
                raise RanksLostError(f"ranks were lost {TRIES + 1} times before they gave anything: {why}")
            try:
                return self._start(why)
            except RanksLostError as error:
                why = str(error)

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

    def digests(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the ranks should hold where no request waits or runs, and what each says that it holds.

        Raises RanksLostError.
        """
        ops = self.prefixes.ops() if self.prefixes is not None else PrefixOps()
        if self.prefixes is not None:
            ops.free = self.prefixes.freed()
        self._ranks.send_all({"prefix": wire.prefixes_out(ops)})
        held = {name: -1 if known.length is None else known.length for name, known in self._known.items()}
        prefixes = {"spans": {}, "states": []} if self.prefixes is None else self.prefixes.digest()
        wanted = {"step": self.sent, "rows": held, "prefixes": prefixes}
        self._asked += 1
        return wanted, self._ranks.digests(self._asked)

    @property
    def _exact(self) -> bool:
        return any(told["exact"] for told in self._ranks.told.values())

    @property
    def _dearest(self) -> KVCost:
        """What a sequence takes on the rank where it takes the most."""
        return max((_cost_in(told) for told in self._ranks.told.values()), key=lambda cost: cost.bytes(cost.step))

    def _ops(self, step: Step) -> PrefixOps:
        """What the step has to do with prefixes; and how long the rows are after it. In the order of Runner.launch."""
        cache = self.prefixes
        ops = PrefixOps() if cache is None else cache.ops()
        for release in step.release:
            known = self._known.get(release.request_id)
            if known is None or known.length is None:
                continue
            length, known.length = known.length, None
            if cache is not None:
                tokens = (*known.spec.prompt_token_ids, *release.output)[:length]
                if left := cache.leave(known.spec.cache_key, tokens, length):
                    ops.leave[release.request_id] = left
        for start in step.start:
            known = self._known[start.request_id]
            known.output, known.length = start.output, start.cached
            if start.cached and start.source is None:
                assert cache is not None
                ops.restore[start.request_id] = cache.restored(start.request_id)
        decoding = {row.request_id for row in step.decode}
        for chunk in step.prefill:
            known = self._known[chunk.request_id]
            known.length = chunk.end
            if chunk.checkpoint and cache is not None:
                # In one forward with its first token, the row is a token further by then.
                length = chunk.end + (self.fused and chunk.request_id in decoding)
                tokens = known.tokens(chunk.end)
                if kept := cache.checkpoint(known.spec.cache_key, tokens, length):
                    ops.checkpoint[chunk.request_id] = kept
        for row in step.decode:
            known = self._known[row.request_id]
            assert known.length is not None, f"{row.request_id} decodes without a row"
            known.length += 1
        if cache is not None:
            ops.free = cache.freed()
        return ops

    def _told(self, request_id: str) -> None:
        held = self._known[request_id]
        self._tell([{"admit": held.plain if rank else held.whole} for rank in range(self._ranks.size)])

    def _tell_adapter(self, name: str, folders: Sequence[str]) -> None:
        self._tell([{"adapter": {"name": name, "folder": folder}} for folder in folders])

    def _tell(self, messages: Sequence[Any]) -> None:
        """One to each rank. Where they are lost the next step says so, and the new ones are told all that is known."""
        with contextlib.suppress(RanksLostError):
            for rank, message in enumerate(messages):
                self._ranks.send(rank, message)

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

    @property
    def guided(self) -> bool:
        """Grammars are followed on the ranks."""
        return False

    def follow(self) -> None: ...

    def submit(self) -> None: ...

    def choose(self) -> None: ...

    def read(self) -> Outputs:
        return self.runner.read(self.step.number)


def _cost_in(told: dict[str, Any]) -> KVCost:
    per_token, windowed, fixed, step = told["kv"]
    return KVCost(per_token, tuple((int(most), int(size)) for most, size in windowed), fixed, step)
