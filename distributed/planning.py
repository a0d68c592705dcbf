"""Which ways there are to spread a model over the nodes of a cluster, and what each would do: tokens/s, TTFT, memory.

A token costs the time to read the weights that it needs, from the memory of the node that holds them, and what goes
between nodes: two all-reduces a layer where heads are split, one hand-off a stage where layers are. A collective over a
ring of N costs 2 (N - 1) (latency + bytes / (N bandwidth)). Figures are predictions for one stream, or for as many
streams as there are stages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer.distributed.facts import facts_of, tensor_shards
from mlxinfer.distributed.groups import AT_ONCE
from mlxinfer.distributed.splitting import split_layers
from mlxinfer.errors import InvalidRequestError, WontFitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlxinfer.distributed.cluster_file import Cluster, Link, Node
    from mlxinfer.distributed.facts import ModelFacts

Objective = Literal["latency", "throughput"]
WORKSPACE_BYTES = 512 << 20
"""Of each rank, for what a step computes."""
READ_SHARE = 0.8
"""Of the memory's bandwidth that decoding reaches."""
COMPUTE_SHARE = 0.5
"""Of the peak that prefill reaches."""
FLOPS_PER_BYTE = 20.0
"""Prefill rate of a node whose tflops aren't known, in operations per byte of its memory's bandwidth."""
TOKEN_BYTES = 4
PROMPT = 1024
"""Tokens of the prompt whose TTFT is told."""
MAX_ORDERED = 6
"""Nodes of a pipeline that are tried in every order; more keep the file's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way. Ranks are numbered as the engine numbers them: 0 coordinates and has the last layers."""

    kind: Literal["one", "tensor", "pipeline", "both"]
    nodes: tuple[str, ...]
    """By rank."""
    tensor: int
    """Ranks that share each layer."""
    split: tuple[int, ...]
    """Layers of each stage, in the order of the stages' ranks: the last layers first."""
    bytes_per_rank: tuple[int, ...]
    """Weights and the context's keys and values."""
    tok_s: float
    """Of one stream, as long as the context is short."""
    throughput_tok_s: float
    """Of as many streams as there are stages."""
    ttft_s: float
    """Of a prompt of PROMPT tokens."""
    links: tuple[str, ...]
    """What it sends over, in words."""
    wifi: bool
    experimental: bool = False

    @property
    def size(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way that there isn't, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The best first; all that were looked at."""

    plans: tuple[Plan, ...]
    refusals: tuple[Refusal, ...]


def plan(
    cluster: Cluster,
    config: Mapping[str, Any],
    *,
    name: str = "",
    context: int = 4096,
    objective: Objective = "latency",
    wifi: bool = False,
) -> Planned:
    """All ways over all subsets of nodes. Raises WontFitError where there is none, with the reasons.

    Without `wifi` nothing is planned over it. Nothing is loaded.
    """
    if context < 1:
        raise InvalidRequestError(f"context is {context}; at least one token is needed", param="ctx")
    planner = _Planner(cluster, config, facts_of(config, name), context, objective, wifi=wifi)
    found = list(planner.all())
    if not found:
        reasons = "\n".join(f"  {refusal.what}: {refusal.why}" for refusal in planner.refusals)
        raise WontFitError(f"{planner.facts.name} can't be spread over this cluster:\n{reasons}")
    key = _stream if objective == "latency" else _streams
    # Fewer machines where more gain less than a hundredth.
    best = sorted(found, key=lambda p: (-round(key(p), 2), p.experimental, p.size))
    return Planned(tuple(best), tuple(planner.refusals))


class _Planner:
    def __init__(
        self,
        cluster: Cluster,
        config: Mapping[str, Any],
        facts: ModelFacts,
        context: int,
        objective: Objective,
        *,
        wifi: bool,
    ) -> None:
        self.cluster, self.config, self.facts, self.context, self.wifi = cluster, config, facts, context, wifi
        self.level = objective == "throughput"
        self.refusals: list[Refusal] = []
        self._shards: dict[int, list[int] | str] = {}

    def all(self) -> Iterator[Plan]:
        nodes = self.cluster.nodes
        for node in nodes:
            yield from self._tried(f"one: {node.name}", self._one, node)
        for count in range(2, len(nodes) + 1):
            for chosen in itertools.combinations(nodes, count):
                names = " + ".join(node.name for node in chosen)
                yield from self._tried(f"tensor: {names}", self._tensor, chosen)
                yield from self._tried(f"pipeline: {names}", self._pipeline, chosen)
            if count >= 4 and count % 2 == 0:
                for chosen in itertools.combinations(nodes, count):
                    names = " + ".join(node.name for node in chosen)
                    yield from self._tried(f"tensor of 2 in a pipeline: {names}", self._both, chosen)

    def _tried(self, what: str, make: Any, nodes: Any) -> Iterator[Plan]:
        try:
            yield make(nodes)
        except (InvalidRequestError, WontFitError) as error:
            self.refusals.append(Refusal(what, str(error)))

    # Ways

    def _one(self, node: Node) -> Plan:
        need = self.facts.weight_bytes + self._kv(self.facts.num_layers)
        _check_room(node, need)
        step = self.facts.weight_bytes / _read_rate(node)
        ttft = self._flops() / _compute_rate(node)
        rate = 1 / step
        return Plan("one", (node.name,), 1, (self.facts.num_layers,), (need,), rate, rate, ttft, (), wifi=False)

    def _tensor(self, nodes: Sequence[Node]) -> Plan:
        size = len(nodes)
        shards = self._shard_bytes(size)
        needs = [shard + self._kv(self.facts.num_layers) // size for shard in shards]
        for node, need in zip(nodes, needs, strict=True):
            _check_room(node, need)
        ring = self._ring(nodes)
        read = max(shard / _read_rate(node) for node, shard in zip(nodes, shards, strict=True))
        sums = 2 * self.facts.num_layers
        one = self.facts.hidden_size * self.facts.activation_bytes
        step = read + sums * _all_reduce(ring, one) + _all_reduce(ring, TOKEN_BYTES)
        compute = max(self._flops() / size / _compute_rate(node) for node in nodes)
        rate = 1 / step
        ttft = compute + sums * _all_reduce(ring, one * PROMPT)
        names = tuple(node.name for node in nodes)
        split = (self.facts.num_layers,)
        return Plan("tensor", names, size, split, tuple(needs), rate, rate, ttft, *_told(ring))

    def _pipeline(self, nodes: Sequence[Node]) -> Plan:
        if self.facts.no_pipeline:
            raise InvalidRequestError(self.facts.no_pipeline)
        coordinator = self.cluster.nodes[0]
        orders = itertools.permutations(nodes) if len(nodes) <= MAX_ORDERED else iter([tuple(nodes)])
        made: list[Plan] = []
        error: Exception | None = None
        for order in orders:
            # Rank 0 has the last layers and coordinates; the coordinator's node does that where it takes part.
            if coordinator in nodes and order[0] is not coordinator:
                continue
            try:
                made.append(self._staged(order))
            except (InvalidRequestError, WontFitError) as failed:
                error = failed
        if not made:
            assert error is not None
            raise error
        return max(made, key=lambda p: (p.throughput_tok_s, p.tok_s) if self.level else (p.tok_s, p.throughput_tok_s))

    def _staged(self, ranks: Sequence[Node]) -> Plan:
        """Rank 0 first: the last layers."""
        links = [self._link(a, b) for a, b in itertools.pairwise(ranks)]
        layers = list(reversed(self.facts.layer_bytes))
        cost = [layer + self._kv(1) for layer in layers]
        extra = [self.facts.rest_bytes] + [0] * (len(ranks) - 2) + [self.facts.rest_bytes]
        room = [int(node.memory_gb * 1e9) - WORKSPACE_BYTES - more for node, more in zip(ranks, extra, strict=True)]
        split = split_layers(cost, room, [_read_rate(node) for node in ranks], level=self.level)
        if split is None:
            need = sum(cost) + sum(extra)
            there = sum(max(0, one) for one in room) + sum(extra)
            raise WontFitError(f"{need / 1e9:.1f} GB don't fit into {there / 1e9:.1f} GB in whole layers")
        times, needs, at = [], [], 0
        for node, count, more in zip(ranks, split, extra, strict=True):
            held = sum(layers[at : at + count])
            times.append((held + (more if node is ranks[0] else 0)) / _read_rate(node))
            needs.append(sum(cost[at : at + count]) + more)
            at += count
        hand = self.facts.hidden_size * self.facts.activation_bytes
        hops = [_hop(link, hand) for link in links]
        # Tokens go from the last stage to the first, rank 0 to the last: neighbours in the ring.
        step = sum(times) + sum(hops) + _hop(self._link(ranks[0], ranks[-1]), TOKEN_BYTES)
        slowest = max([*times, *hops])
        share = [count / self.facts.num_layers for count in split]
        compute = sum(self._flops() * part / _compute_rate(node) for node, part in zip(ranks, share, strict=True))
        ttft = compute + sum(_hop(link, hand * PROMPT) for link in links)
        names = tuple(node.name for node in ranks)
        whole = max(1 / step, min(1 / slowest, len(ranks) / step))
        return Plan("pipeline", names, 1, split, tuple(needs), 1 / step, whole, ttft, *_told(links))

    def _both(self, nodes: Sequence[Node]) -> Plan:
        """Pairs that share layers, one pair after the other. The nodes' order is the file's."""
        if self.facts.no_pipeline:
            raise InvalidRequestError(self.facts.no_pipeline)
        shards = self._shard_bytes(2)
        pairs = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes), 2)]
        half = shards[0] / self.facts.weight_bytes
        layers = [int(layer * half) + self._kv(1) // 2 for layer in reversed(self.facts.layer_bytes)]
        rest = int(self.facts.rest_bytes)
        extra = [rest] + [0] * (len(pairs) - 2) + [rest]
        room = [
            int(min(node.memory_gb for node in pair) * 1e9) - WORKSPACE_BYTES - more
            for pair, more in zip(pairs, extra, strict=True)
        ]
        rates = [min(_read_rate(node) for node in pair) for pair in pairs]
        split = split_layers(layers, room, rates, level=self.level)
        if split is None:
            raise WontFitError(f"{2 * sum(layers) / 1e9:.1f} GB don't fit in whole layers")
        one = self.facts.hidden_size * self.facts.activation_bytes
        within = [self._link(*pair) for pair in pairs]
        # A stage's first rank hands over to the second of the next, which passes it on: neighbours in the ring.
        between = [self._link(a[1], b[0]) for a, b in itertools.pairwise(pairs)]
        back = self._link(pairs[0][0], pairs[-1][1])
        times, needs, at = [], [], 0
        for rate, link, count, more in zip(rates, within, split, extra, strict=True):
            held = sum(layers[at : at + count])
            read = held + (more if at == 0 else 0)
            times.append(read / rate + 2 * count * _swap(link, one))
            needs += [held + more] * 2
            at += count
        hops = [_hop(link, one) + _hop(pair, one) for link, pair in zip(between, within[:-1], strict=True)]
        step = sum(times) + sum(hops) + _hop(back, TOKEN_BYTES) + _hop(within[-1], TOKEN_BYTES)
        ttft = self._flops() / 2 / min(_compute_rate(node) for node in nodes)
        ttft += sum(_hop(link, one * PROMPT) for link in (*between, *within[:-1]))
        ttft += sum(2 * count * _swap(link, one * PROMPT) for link, count in zip(within, split, strict=True))
        used = [*within, *between, back]
        names, rate = tuple(node.name for node in nodes), 1 / step
        whole = max(rate, min(1 / max(times), len(pairs) / step))
        return Plan("both", names, 2, split, tuple(needs), rate, whole, ttft, *_told(used), experimental=True)

    # Parts

    def _kv(self, layers: int) -> int:
        return layers * self.facts.kv_bytes_per_token * self.context

    def _flops(self) -> float:
        return 2.0 * self.facts.parameters * PROMPT

    def _shard_bytes(self, size: int) -> list[int]:
        if size not in self._shards:
            try:
                self._shards[size] = tensor_shards(self.config, self.facts, size)
            except InvalidRequestError as error:
                self._shards[size] = str(error)
        found = self._shards[size]
        if isinstance(found, str):
            raise InvalidRequestError(found)
        return found

    def _ring(self, nodes: Sequence[Node]) -> list[Link]:
        if len(nodes) == 2:
            return [self._link(nodes[0], nodes[1])]
        return [self._link(a, b) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]

    def _link(self, one: Node, other: Node) -> Link:
        links = self.cluster.links_between(one.name, other.name)
        if not self.wifi:
            links = tuple(link for link in links if link.kind != "wifi")
            if not links and self.cluster.links_between(one.name, other.name):
                raise InvalidRequestError(f"{one.name} and {other.name} are joined by Wi-Fi only (--wifi takes it)")
        if not links:
            raise InvalidRequestError(f"nothing joins {one.name} and {other.name}")
        return links[0]


def _stream(made: Plan) -> float:
    return made.tok_s


def _streams(made: Plan) -> float:
    return made.throughput_tok_s


def _check_room(node: Node, need: int) -> None:
    room = int(node.memory_gb * 1e9) - WORKSPACE_BYTES
    if need > room:
        raise WontFitError(f"{node.name} would need {need / 1e9:.1f} GB and has {max(0, room) / 1e9:.1f} GB")


def _read_rate(node: Node) -> float:
    return node.bandwidth_gb_s * 1e9 * READ_SHARE


def _compute_rate(node: Node) -> float:
    if node.tflops:
        return node.tflops * 1e12 * COMPUTE_SHARE
    return node.bandwidth_gb_s * 1e9 * FLOPS_PER_BYTE


def _hop(link: Link, size: int) -> float:
    return link.latency_us * 1e-6 + size / (link.bandwidth_gb_s * 1e9)


def _swap(link: Link, size: int) -> float:
    """Seconds until both of a pair have the other's; what is large goes one way and then the other."""
    return _hop(link, size) * (1 if size <= AT_ONCE else 2)


def _all_reduce(ring: Sequence[Link], size: int) -> float:
    """Seconds, over as many nodes as the ring has links, or two. The slowest link sets the pace."""
    count = max(2, len(ring))
    return 2 * (count - 1) * max(_hop(link, -(-size // count)) for link in ring)


def _told(links: Sequence[Link]) -> tuple[tuple[str, ...], bool]:
    words = tuple(
        f"{' - '.join(link.between)}: {link.kind}, {link.latency_us:.0f} us, {link.bandwidth_gb_s:.2g} GB/s"
        f"{'' if link.measured else ' (not measured)'}"
        for link in dict.fromkeys(links)
    )
    return words, any(link.kind == "wifi" for link in links)
