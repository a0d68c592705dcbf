"""The clients of a phase: who sends when, and what a conversation is made of."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.bench.client import Endpoint
from mlxinfer.bench.drive import drive
from mlxinfer.bench.workloads import Call, Client, Phase
from tests.unit.bench.fake import BOUND_S, DONE, STOP, RefusalError, chunk, echo, serving, usage

if TYPE_CHECKING:
    from collections.abc import Iterator


def call(text: str, max_tokens: int = 2) -> Call:
    return Call("chat", ({"role": "user", "content": text},), max_tokens)


def said(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def test_a_client_sends_its_next_call_when_the_one_before_has_ended() -> None:
    clients = tuple(Client(tuple(call(f"{c}{i}") for i in range(3))) for c in "ab")
    with serving() as server:
        records = drive(Endpoint(server.url, "m"), Phase("p", clients), timeout_s=BOUND_S)
    assert [(r.client, r.turn) for r in records] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for client in range(2):
        mine = [r for r in records if r.client == client]
        assert all(b.start >= a.end for a, b in itertools.pairwise(mine))
    for c in "ab":
        assert [said(body) for body in server.asked if said(body)[0] == c] == [f"{c}{i}" for i in range(3)]


def test_clients_run_at_the_same_time() -> None:
    together = threading.Barrier(4)

    def meet(body: dict[str, Any]) -> Iterator[bytes]:
        together.wait(BOUND_S)  # raises when the four don't come together
        yield from echo(body)

    with serving(meet) as server:
        phase = Phase("p", tuple(Client((call(str(i)),)) for i in range(4)))
        assert [r.error for r in drive(Endpoint(server.url, "m"), phase, timeout_s=BOUND_S)] == [None] * 4


def test_a_late_client_comes_when_every_earlier_one_has_its_chunks() -> None:
    """The streams go on only when the late request is there: were it sent later, or never, they would not end."""
    arrived = threading.Event()
    sent: list[int] = []

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        if said(body) == "late":
            sent.append(len(server.asked))
            arrived.set()
            yield from echo(body)
            return
        for i in range(6):
            if i == 3:
                arrived.wait(BOUND_S)
            yield chunk(f"w{i}")
        yield STOP + usage(1, 6) + DONE

    with serving(script) as server:
        streams = [Client((call(str(i)),)) for i in range(3)]
        phase = Phase("p", (*streams, Client((call("late"),), when_live=3)))
        records = drive(Endpoint(server.url, "m"), phase, timeout_s=BOUND_S)
    assert sent == [4]
    late = records[-1]
    assert all(r.events[2][0] <= late.start <= r.events[3][0] for r in records[:3])


def test_a_late_client_does_not_wait_for_one_that_failed() -> None:
    def script(body: dict[str, Any]) -> Iterator[bytes]:
        if said(body) == "fails":
            raise RefusalError(500, {"error": "no"})
        yield from echo(body)

    with serving(script) as server:
        phase = Phase("p", (Client((call("fails"),)), Client((call("late"),), when_live=4)))
        records = drive(Endpoint(server.url, "m"), phase, timeout_s=BOUND_S)
    assert [r.error for r in records] == ["HTTP 500: no", None]


def test_a_client_that_is_to_come_later_does(monkeypatch: Any) -> None:
    with serving() as server:
        phase = Phase("p", (Client((call("now"),)), Client((call("later"),), after_s=0.3)))
        began = time.perf_counter()
        now, later = drive(Endpoint(server.url, "m"), phase, timeout_s=BOUND_S)
    assert now.start < later.start
    assert later.start >= began + 0.3


def test_a_conversation_grows_by_the_answers_and_ends_where_one_fails() -> None:
    def script(body: dict[str, Any]) -> Iterator[bytes]:
        if said(body) == "third":
            raise RefusalError(500, {"error": "no"})
        yield chunk(f"re: {said(body)}") + STOP + DONE

    with serving(script) as server:
        talk = Client((call("first"), call("second"), call("third"), call("fourth")), conversation=True)
        records = drive(Endpoint(server.url, "m"), Phase("p", (talk,)), timeout_s=BOUND_S)
    assert [[m["content"] for m in body["messages"]] for body in server.asked] == [
        ["first"],
        ["first", "re: first", "second"],
        ["first", "re: first", "second", "re: second", "third"],
    ]
    assert [m["role"] for m in server.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert [r.error for r in records] == [None, None, "HTTP 500: no"]
