"""What is asked, by whom and when: pure functions of a seed, so that every target gets the same requests.

A workload is a sequence of phases; the clients of a phase run at the same time. Prompts have about the stated number
of tokens of content, to which the model's chat template adds its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mlxinfer.bench.words import Sizer, nonce
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

Chat: TypeAlias = tuple[dict[str, str], ...]
LONG = 1100
"""Tokens of the long prompt of `arrival`, `overtake` and `restart`."""
SHARED = 730
"""Tokens of the system prompt of `shared`."""
TURNS = 10


@dataclass(frozen=True, slots=True)
class Call:
    """One request: what it adds to its conversation, and how much it may answer."""

    label: str
    messages: Chat
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Client:
    """Calls one after the other; each is sent when the one before has ended."""

    calls: tuple[Call, ...]
    after_s: float = 0.0
    """Seconds after the phase began."""
    when_live: int = 0
    """Begin when each earlier client of the phase has got this many chunks, or has ended."""
    conversation: bool = False
    """Each call's messages are added to those before, with the answers in between."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Clients that run at the same time."""

    name: str
    clients: tuple[Client, ...]
    counted: bool = True
    """Whether the general figures are made of it; the others only give named figures."""
    restart_before: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What the command line may change in a workload; None is the workload's own."""

    concurrency: int | None = None
    rate: float | None = None
    """Open loop: requests per second, at random moments."""
    requests: int | None = None
    max_tokens: int | None = None
    """An upper limit for every answer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A name, what it is for, and the phases of one round."""

    name: str
    about: str
    build: Callable[[random.Random, Sizer, Load], tuple[Phase, ...]]
    clients: int = 1
    scales: bool = False
    """Whether --concurrency, --rate and --requests mean something."""


def phases(workload: Workload, *, seed: int, round_index: int, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    """The phases of one round. The same arguments give the same text; another round or seed shares no first word."""
    rng = random.Random(f"{seed}/{workload.name}/{load.concurrency}/{load.rate}/{round_index}")
    return workload.build(rng, sizer, load)


def _limit(wanted: int, load: Load) -> int:
    return wanted if load.max_tokens is None else min(wanted, load.max_tokens)


def _prompt(rng: random.Random, sizer: Sizer, tokens: int) -> Chat:
    """A system message that begins with a nonce, and a question; `tokens` in all."""
    system = f"{nonce(rng)} is the number of this talk. Answer at length."
    task = "Write a long story that has these words in it:"
    room = max(0, tokens - sizer.tokens(system))
    return (
        {"role": "system", "content": system},
        {"role": "user", "content": sizer.filler(room, rng, before=task)},
    )


def _single(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    call = Call("chat", _prompt(rng, sizer, 60), _limit(128, load))
    return (Phase("single", (Client((call,)),)),)


def _long(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    call = Call("long", _prompt(rng, sizer, 1500), _limit(32, load))
    return (Phase("long", (Client((call,)),)),)


def _chat(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    count = _requests(load, 4)
    calls = [Call("chat", _prompt(rng, sizer, n), _limit(64, load)) for n in _even(rng, 25, 80, count)]
    return (Phase("chat", _clients(rng, calls, load, 4)),)


def _mixed(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    count = _requests(load, 8)
    sizes = zip(_even(rng, 30, 900, count), _even(rng, 24, 96, count), strict=True)
    calls = [Call("chat", _prompt(rng, sizer, n), _limit(out, load)) for n, out in sizes]
    return (Phase("mixed", _clients(rng, calls, load, 8)),)


def _shared(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    system = sizer.filler(SHARED, rng, before=f"{nonce(rng)} is the number of this talk. What you should know:")
    clients: list[Client] = []
    for _ in range(load.concurrency or 8):
        question = sizer.filler(20, rng, before="Write a story about")
        messages = ({"role": "system", "content": system}, {"role": "user", "content": question})
        clients.append(Client((Call("chat", messages, _limit(32, load)),)))
    return (Phase("shared", tuple(clients)),)


def _arrival(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    streams = [Client((Call("stream", _prompt(rng, sizer, 40), _limit(160, load)),)) for _ in range(4)]
    late = Client((Call("long", _prompt(rng, sizer, LONG), _limit(16, load)),), when_live=4)
    alone = Client((Call("long", _prompt(rng, sizer, LONG), _limit(16, load)),))
    return (Phase("alone", (alone,), counted=False), Phase("load", (*streams, late)))


def _overtake(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    alone = Client((Call("long", _prompt(rng, sizer, LONG), _limit(16, load)),))
    first = Client((Call("long", _prompt(rng, sizer, LONG), _limit(16, load)),))
    hi = ({"role": "system", "content": nonce(rng)}, {"role": "user", "content": "hi"})
    short = Client((Call("hi", hi, _limit(16, load)),), after_s=1.0)
    return (Phase("alone", (alone,), counted=False), Phase("load", (first, short)))


def _agent(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    rules = sizer.filler(300, rng, before=f"{nonce(rng)} is the number of this talk. You use tools. What they do:")
    task = sizer.filler(40, rng, before="Find out, step by step, what is known of:")
    first = Call("turn", ({"role": "system", "content": rules}, {"role": "user", "content": task}), _limit(32, load))
    rest = [
        Call("turn", ({"role": "user", "content": sizer.filler(70, rng, before="Tool result:")},), _limit(32, load))
        for _ in range(TURNS)
    ]
    return (Phase("agent", (Client((first, *rest), conversation=True),)),)


def _restart(rng: random.Random, sizer: Sizer, load: Load) -> tuple[Phase, ...]:
    client = Client((Call("long", _prompt(rng, sizer, LONG), _limit(16, load)),))
    return (Phase("before", (client,), counted=False), Phase("after", (client,), restart_before=True))


def _requests(load: Load, clients: int) -> int:
    return load.requests or 2 * (load.concurrency or clients)


def _even(rng: random.Random, low: int, high: int, count: int) -> list[int]:
    """Evenly spread whole numbers in random order, so that every round has the same mix."""
    values = [round(low + (high - low) * (i + 0.5) / count) for i in range(count)]
    rng.shuffle(values)
    return values


def _clients(rng: random.Random, calls: list[Call], load: Load, clients: int) -> tuple[Client, ...]:
    """Closed loop: the calls dealt to the clients in turn. Open loop: each call a client that comes when it comes."""
    if load.rate is not None:
        moments = arrivals(rng, load.rate, len(calls))
        return tuple(Client((call,), after_s=at) for call, at in zip(calls, moments, strict=True))
    count = load.concurrency or clients
    return tuple(Client(tuple(calls[i::count])) for i in range(count) if calls[i::count])


def arrivals(rng: random.Random, rate: float, count: int) -> list[float]:
    """`count` moments in seconds of a Poisson process of `rate` per second; the first is 0."""
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + rng.expovariate(rate))
    return moments[:count]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("single", "one client, 60 tokens in, 128 out: TTFT and decode speed", _single),
        Workload("chat", "25-80 tokens in, 64 out", _chat, 4, scales=True),
        Workload("long", "one prompt of 1500 tokens, 32 out", _long),
        Workload("mixed", "30-900 tokens in, 24-96 out", _mixed, 8, scales=True),
        Workload("shared", "8 at once: one system prompt of 730 tokens, different questions, 32 out", _shared, 8),
        Workload("arrival", "a prompt of 1100 tokens arrives during 4 live streams of 160 tokens", _arrival, 5),
        Workload("overtake", '"hi" one second after a prompt of 1100 tokens', _overtake, 2),
        Workload("agent", "a task and 10 tool results on a growing context, 32 out each", _agent),
        Workload("restart", "the same 1100 tokens before and after a restart of the server", _restart),
    )
}


def workload(name: str) -> Workload:
    """Raises InvalidRequestError for a name that is none."""
    if name not in WORKLOADS:
        raise InvalidRequestError(
            f"{name!r:.80} is no workload; there are {', '.join(WORKLOADS)}, and all", param="workload"
        )
    return WORKLOADS[name]
