"""A stream begins with its first token: before, what fails is an answer with a status, which a proxy may act upon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from mlxinfer.errors import EngineClosedError, EngineError, MlxinferError
from mlxinfer.server.app import create_app
from mlxinfer.server.options import ServerOptions
from tests.unit.server.conftest import BASE

if TYPE_CHECKING:
    from tests.unit.server.fake import FakeLLM

HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "n": 2},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 8},
    "/api/chat": {"model": "tiny", "messages": HELLO},
    "/api/generate": {"model": "tiny", "prompt": "hello"},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("failure", "status"), [(EngineError("broke"), 500), (EngineClosedError("gone"), 503)])
def test_what_fails_before_the_first_token_has_its_status(
    client: TestClient, llm: FakeLLM, path: str, failure: MlxinferError, status: int
) -> None:
    llm.fail_after, llm.failure = 0, failure
    reply = client.post(path, json=ASKED[path] | {"stream": True})
    assert reply.status_code == status, reply.text
    assert str(failure) in str(reply.json()["error"])
    llm.fail_after = 2
    reply = client.post(path, json=ASKED[path] | {"stream": True})
    assert reply.status_code == 200
    assert str(failure) in reply.text.strip().rpartition("\n")[2]


@pytest.mark.parametrize("path", ASKED)
def test_a_silence_begins_it_too(llm: FakeLLM, path: str) -> None:
    llm.fail_after, llm.delay_s = 0, 0.2
    app = create_app({"tiny": llm}, ServerOptions(keepalive_s=0.05))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as client:
        assert client.post(path, json=ASKED[path] | {"stream": True}).status_code == 200
