"""A model over the nodes of a cluster, as an LLM: planned, cut, brought to its places, run, and begun again on what is
left when a node or a rank is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer.distributed import adapter_parts, shards
from mlxinfer.distributed.cluster_file import Cluster
from mlxinfer.distributed.facts import facts_of
from mlxinfer.distributed.planning import WORKSPACE_BYTES, Objective, Plan, plan
from mlxinfer.distributed.ranks import Here, RankSet, RanksLostError, Seat
from mlxinfer.distributed.remote import RemoteRunner
from mlxinfer.distributed.shell import reached
from mlxinfer.distributed.there import PROMPT_S, AgentError, There
from mlxinfer.engine.engine import Engine
from mlxinfer.engine.governor import governor
from mlxinfer.engine.loading import context_length, describe_quantization, prepare
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import UnsupportedModelError, WontFitError
from mlxinfer.llm import LLM
from mlxinfer.types import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlxinfer.config import Settings
    from mlxinfer.distributed.cluster_file import Link
    from mlxinfer.distributed.ranks import Place
    from mlxinfer.engine.adapter_files import AdapterFiles

log = logging.getLogger(__name__)

RUN = ("one", "tensor", "pipeline")
"""Kinds of plans that are run unless others are asked for: those that aren't experimental."""


class Spread:
    """One model over a cluster. The first node is this machine and keeps the whole checkpoint; the others have agents.

    `start` is what a RemoteRunner is made with. `reserved` are bytes that each rank keeps for adapters.
    """

    def __init__(
        self,
        cluster: Cluster,
        source: Path,
        parts: Path,
        *,
        context: int,
        objective: Objective = "latency",
        kinds: frozenset[str] = frozenset(RUN),
        dtype: str = "auto",
        wifi: bool = False,
        reserved: int = 0,
        backend: Literal["ring", "jaccl"] = "ring",
        say: Callable[[str], None] = log.info,
        planned: Callable[[Plan, str], None] = lambda plan, why: None,
    ) -> None:
        self.cluster, self.source, self.parts = cluster, source, parts
        self._how: dict[str, Any] = {"context": context, "objective": objective, "wifi": wifi}
        self._kinds, self._dtype, self._say, self._planned = kinds, dtype, say, planned
        self._backend, self._reserved = backend, reserved
        self._places: dict[str, There] = {}
        self._lock = threading.Lock()
        self._ranks: RankSet | None = None
        self._cut: set[Link] = set()
        """Links that carried nothing any more."""
        self._vain: set[tuple[str, tuple[str, ...]]] = set()
        """Kinds and nodes of plans whose ranks didn't start."""
        self._barred: set[str] = set()
        """Kinds of plans that an adapter doesn't go with."""
        self.plan: Plan | None = None
        """What runs now."""
        from mlxinfer.formats.files import read_json_object

        self.config: dict[str, Any] = read_json_object(source / "config.json") or {}

    def start(self, why: str) -> RankSet:
        """Plan for the nodes that answer, bring the parts there and start the ranks.

        Raises WontFitError where no plan is left, RanksLostError where the ranks don't start.
        """
        with self._lock:
            if why:
                self._say(f"Beginning again: {why}")
            self._leave_out_cut()
            here = self._reachable(again=bool(why))
            found = plan(here, self.config, name=self.source.name, **self._how)
            runs = [made for made in found.plans if made.kind in {*RUN, *self._kinds} - self._barred]
            runs = [made for made in runs if (made.kind, made.nodes) not in self._vain] or runs
            chosen = next((made for made in runs if made.kind in self._kinds), None)
            if chosen is None and (not why or not runs):
                raise WontFitError(f"there is no plan of the kinds {', '.join(sorted(self._kinds))}")
            # What was asked for can't be had any more; open streams matter more.
            chosen = chosen or runs[0]
            self._say(f"Plan: {chosen.kind} over {', '.join(chosen.nodes)}")
            seats = [self._seat(chosen, here, rank) for rank in range(chosen.size)]
            try:
                ranks = RankSet(seats, self.cluster.secret, listen=self.cluster.nodes[0].host, dtype=self._dtype)
            except RanksLostError:
                self._vain.add((chosen.kind, chosen.nodes))
                raise
            ranks.spare_bytes = max(0, _spare(chosen, here) - self._reserved)
            self.plan, self._ranks = chosen, ranks
            self._planned(chosen, why)
            return ranks

    def bring_adapter(self, files: AdapterFiles) -> list[str]:
        """Cut an adapter for the ranks that run; the folder of each part where its rank is, "" where a
        rank needs nothing of it.

        Raises UnsupportedModelError for one that can't be cut for the plan, EngineError where it can't be brought.
        """
        chosen = self.plan
        assert chosen is not None, "an adapter comes after the ranks"
        folders: list[str] = []
        for rank, name in enumerate(chosen.nodes):
            part = _part(chosen, rank)
            folder = adapter_parts.cut_adapter(self.config, files, part, self.parts)
            there = self._places.get(name)
            if folder is None:
                folders.append("")
            elif there is None:
                folders.append(str(folder))
            else:
                folders.append(there.bring(f"{_plain(self.source.name)}/{folder.name}", folder))
        try:
            adapter_parts.refuse_uncut(self.config, files, shards.Part("tensor", 0, 2))
        except UnsupportedModelError:
            self._barred |= {"tensor", "both"}
        return folders

    def close(self) -> None:
        """Let the agents go; ranks that they run end."""
        for place in self._places.values():
            place.close()
        self._places.clear()

    def _reachable(self, *, again: bool) -> Cluster:
        """The cluster without the nodes whose agents don't answer. While streams wait, none is started over ssh."""
        left = [self.cluster.nodes[0]]
        for node in self.cluster.nodes[1:]:
            try:
                if node.name not in self._places:
                    found = There(node, self.cluster.secret) if again else reached(node, self.cluster, self._say)
                    self._places[node.name] = found
                self._places[node.name].ask("port", timeout=PROMPT_S)
            except AgentError as error:
                self._say(f"Without {node.name}: {error}")
                gone = self._places.pop(node.name, None)
                if gone is not None:
                    gone.close()
                continue
            left.append(node)
        names = {node.name for node in left}
        links = tuple(link for link in self.cluster.links if set(link.between) <= names and link not in self._cut)
        return Cluster(tuple(left), links, self.cluster.secret)

    def _leave_out_cut(self) -> None:
        """The link that the ranks of before found to carry nothing. It counts again when this is started again."""
        if self._ranks is None or self._ranks.cut is None or self.plan is None:
            return
        one, other = (self.plan.nodes[rank] for rank in self._ranks.cut)
        links = [link for link in self.cluster.links_between(one, other) if link not in self._cut]
        if links:
            self._cut.add(links[0])
            self._say(f"Without the link between {one} and {other} ({links[0].kind}) until the next start")

    def _seat(self, chosen: Plan, here: Cluster, rank: int) -> Seat:
        part = _part(chosen, rank)
        folder = shards.cut(self.source, part, self.parts)
        name = chosen.nodes[rank]
        there = self._places.get(name)
        host = self._address(chosen, here, rank)
        devices = here.devices(name, chosen.nodes) if self._backend == "jaccl" and chosen.size > 1 else ()
        if there is None:
            place: Place = Here(self.cluster.nodes[0].host)
            return Seat(place, str(folder), host, devices)
        try:
            return Seat(there, there.bring(f"{_plain(self.source.name)}/{part.name}", folder), host, devices)
        except AgentError as error:
            raise RanksLostError(str(error)) from error

    def _address(self, chosen: Plan, here: Cluster, rank: int) -> str:
        """Where the rank before this one reaches it: this end of the link that the plan has between the two.

        In mlx's ring a rank listens for the one before it, and the first for the last.
        """
        if chosen.size == 1:
            return ""
        # The ends of a pipeline needn't be joined; then it is the machine's own address.
        return here.end(chosen.nodes[rank], chosen.nodes[rank - 1], wifi=self._how["wifi"])


def _part(chosen: Plan, rank: int) -> shards.Part:
    # One machine alone is all of its heads.
    kind = "tensor" if chosen.kind == "one" else chosen.kind
    return shards.Part(kind, rank, chosen.size, () if kind == "tensor" else chosen.split)


def _spare(chosen: Plan, cluster: Cluster) -> int:
    """Bytes that the plan leaves on the node where it leaves the fewest."""
    memory = {node.name: int(node.memory_gb * 1e9) for node in cluster.nodes}
    taken = zip(chosen.nodes, chosen.bytes_per_rank, strict=True)
    return max(0, min(memory[name] - WORKSPACE_BYTES - need for name, need in taken))


def _plain(name: str) -> str:
    """A folder's name as agents take one."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("._-")[:100] or "model"


def load_over(spread: Spread, name: str, settings: Settings) -> LLM:
    """The model as an LLM, its engine here and its ranks where the plan has them. Raises what loading raises."""
    prepared = prepare("folder", spread.source, dtype=settings.dtype)
    facts = facts_of(spread.config, name)
    runner = RemoteRunner(spread.start, spread.config, spread.bring_adapter)
    thread = mlx_thread()

    def make() -> Engine:
        made: Any = runner
        engine = Engine(
            thread,
            made,
            max_num_seqs=settings.max_num_seqs,
            max_queue=settings.max_queue,
            prefill_chunk=settings.prefill_chunk,
            weight_bytes=runner.weight_bytes,
            prefix_bytes=None if settings.prefix_cache_mb is None else settings.prefix_cache_mb << 20,
            memory=governor(),
        )
        thread.attach(engine)
        return engine

    with contextlib.ExitStack() as undo:
        undo.callback(runner.close)
        engine = thread.call(make)
        undo.pop_all()
    limit = settings.context_length
    own = context_length(spread.config)
    info = ModelInfo(
        name=name,
        model_type=str(spread.config["model_type"]),
        source=str(spread.source),
        context_length=own if limit is None else min(limit, own),
        vocab_size=int((spread.config.get("text_config") or spread.config)["vocab_size"]),
        num_parameters=facts.parameters,
        weight_bytes=facts.weight_bytes,
        dtype=settings.dtype,
        quantization=describe_quantization(spread.config),
        tier=runner.tier,
        has_chat_template=prepared.tokenizer.has_chat_template,
    )
    return LLM(info, prepared.tokenizer, prepared.defaults, engine, settings)
