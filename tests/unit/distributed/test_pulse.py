"""A link that carries answers, one that doesn't, and answers that are none."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from mlxinfer.distributed import pulse
from mlxinfer.distributed.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = b"a secret of sixteen and more"


def until(true: Callable[[], bool], seconds: float = 10) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if true():
            return True
        time.sleep(0.02)
    return true()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "ASK_S", 0.05)


def test_two_that_share_a_secret_hear_each_other_and_one_that_falls_silent_is_noticed() -> None:
    one, two = Pulse("127.0.0.1"), Pulse("127.0.0.1")
    assert one.deaf_s() == 0
    one.begin(SECRET, "s", "127.0.0.1", two.port)
    time.sleep(0.3)
    assert one.deaf_s() == 0, "nobody has answered yet"
    two.begin(SECRET, "s", "127.0.0.1", one.port)
    assert until(lambda: 0 < one.deaf_s() < 0.4)
    assert until(lambda: 0 < two.deaf_s() < 0.4)
    two._socket.close()
    assert until(lambda: one.deaf_s() > 1)


@pytest.mark.parametrize(("secret", "session"), [(SECRET, "another"), (b"another secret of that size", "s")])
def test_who_has_another_secret_or_session_is_not_heard(secret: bytes, session: str) -> None:
    one, two = Pulse("127.0.0.1"), Pulse("127.0.0.1")
    one.begin(SECRET, "s", "127.0.0.1", two.port)
    two.begin(secret, session, "127.0.0.1", one.port)
    time.sleep(1)
    assert one.deaf_s() == two.deaf_s() == 0


def test_an_answer_that_is_sent_again_is_none() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as between:
        between.bind(("127.0.0.1", 0))
        between.settimeout(5)
        one, two = Pulse("127.0.0.1"), Pulse("127.0.0.1")
        one.begin(SECRET, "s", *between.getsockname())
        two.begin(SECRET, "s", "127.0.0.1", one.port)
        asked, sender = between.recvfrom(256)
        between.sendto(asked, ("127.0.0.1", two.port))
        answer = asked
        while answer[4] != 1:
            answer, _ = between.recvfrom(256)
        between.sendto(answer, sender)
        assert until(lambda: one.deaf_s() > 0), "the first time it is an answer"
        time.sleep(0.5)
        before = one.deaf_s()
        for _ in range(20):
            between.sendto(answer, sender)
            between.sendto(b"junk", sender)
            time.sleep(0.01)
        assert one.deaf_s() > before
