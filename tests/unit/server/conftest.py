"""A client over ASGI, and a real server on a socket, both in front of a fake model."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from starlette.testclient import TestClient

from mlxinfer.server import prompting
from mlxinfer.server.app import create_app
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.run import Server, bind
from tests.unit.server.fake import FakeLLM, wait_for
from tests.unit.server.fake_format import FakeFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE = "http://127.0.0.1:8080"


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> FakeFormat:
    """Replies are read by a format whose pieces say what they are."""
    made = FakeFormat()
    monkeypatch.setattr(prompting, "reply_format", lambda tokenizer, model_type: made)
    return made


@pytest.fixture
def client(llm: FakeLLM) -> Iterator[TestClient]:
    with TestClient(create_app({"tiny": llm}), base_url=BASE, raise_server_exceptions=False) as made:  # pyright: ignore[reportArgumentType]
        yield made


@pytest.fixture
def address(llm: FakeLLM) -> Iterator[tuple[str, int]]:
    """A served fake model on a free port."""
    options = ServerOptions(body_timeout_s=5, grace_s=1)
    listener = bind("127.0.0.1", 0)
    server = Server(create_app({"tiny": llm}, options), options)  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    assert wait_for(lambda: server.started)
    yield listener.getsockname()[:2]
    server.should_exit = True
    thread.join(20)
    listener.close()
    assert not thread.is_alive()
