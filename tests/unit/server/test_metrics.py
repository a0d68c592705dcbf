"""/metrics and the access log: what is counted, that labels stay few, and that a line holds no content."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.app import create_app
from mlxinfer.server.logs import CAPACITY, LineHandler, logging_to
from mlxinfer.server.options import ServerOptions
from mlxinfer.types import Timings, Usage
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import FakeLLM, wait_for

if TYPE_CHECKING:
    from pathlib import Path

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a secret wish"}]}


def samples(client: TestClient, **headers: str) -> dict[tuple[str, ...], float]:
    answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }


def test_requests_are_counted_by_route_and_status(client: TestClient) -> None:
    client.post("/v1/chat/completions", json=CHAT)
    client.post("/v1/chat/completions", json=CHAT | {"temperature": -1})
    client.get("/v1/models/tiny")
    found = samples(client)
    route = "route=/v1/chat/completions"
    assert found["mlxinfer_http_requests_total", "code=200", "method=POST", route] == 1
    assert found["mlxinfer_http_requests_total", "code=400", "method=POST", route] == 1
    assert found["mlxinfer_http_requests_total", "code=200", "method=GET", "route=/v1/models/{name:path}"] == 1
    assert found["mlxinfer_http_request_seconds_count", route] == 2
    assert found["mlxinfer_errors_total", "code=invalid_value"] == 1


def test_what_clients_make_up_is_no_label(client: TestClient) -> None:
    for i in range(30):
        client.request(f"ODD{i}", f"/made/up/{i}")
        client.get(f"/v1/models/made-up-{i}")
        client.get("/health", headers={"host": f"evil{i}.example"})
        client.post("/v1/chat/completions", json=CHAT | {"model": f"made-up-{i}"})
    assert len([key for key in samples(client) if key[0] == "mlxinfer_http_requests_total"]) < 8
    assert "up-" not in client.get("/metrics").text
    assert "evil" not in client.get("/metrics").text


def test_engines_memory_and_states_are_read_when_asked(client: TestClient, llm: FakeLLM) -> None:
    llm.stats = lambda: {"running": 3, "waiting": 4, "generated_tokens": 50, "steps": 10, "prefix_bytes": 77}
    found = samples(client)
    assert found["mlxinfer_requests_running", "model=tiny"] == 3
    assert found["mlxinfer_requests_waiting", "model=tiny"] == 4
    assert found["mlxinfer_generated_tokens_total", "model=tiny"] == 50
    assert found["mlxinfer_steps_total", "model=tiny"] == 10
    assert found["mlxinfer_prefix_bytes", "model=tiny"] == 77
    assert found["mlxinfer_model_state", "model=tiny", "state=loaded"] == 1
    assert found["mlxinfer_model_state", "model=tiny", "state=failed"] == 0
    assert found["mlxinfer_memory_bytes", "use=budget"] > 0


def test_a_choice_that_ended_is_in_the_histograms(client: TestClient) -> None:
    metrics = client.app.state.server.metrics  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    timings = Timings(queue_s=0.5, ttft_s=1.0, total_s=3.0)
    metrics.observe_request("tiny", Usage(completion_tokens=5), timings, "stop")
    metrics.observe_request("tiny", Usage(completion_tokens=1), timings, "length")
    metrics.observe_request("tiny", Usage(), None, "cancelled")
    found = samples(client)
    assert found["mlxinfer_time_to_first_token_seconds_sum", "model=tiny"] == 2.0
    assert found["mlxinfer_queue_seconds_sum", "model=tiny"] == 1.0
    assert found["mlxinfer_generation_seconds_count", "model=tiny"] == 2
    assert found["mlxinfer_inter_token_latency_seconds_sum", "model=tiny"] == 0.5
    assert found["mlxinfer_inter_token_latency_seconds_count", "model=tiny"] == 1
    assert found["mlxinfer_generations_total", "model=tiny", "reason=cancelled"] == 1


def test_refusals_are_counted_by_kind(client: TestClient) -> None:
    client.get("/health", headers={"host": "evil.example"})
    client.get("/health", headers={"origin": "null"})
    client.post("/v1/completions", content="{}", headers={"origin": BASE, "content-type": "text/plain"})
    found = samples(client)
    for kind in ("wrong_host", "foreign_origin", "content_type"):
        assert found["mlxinfer_refusals_total", f"kind={kind}"] == 1


def test_metrics_need_the_key_unless_they_are_open() -> None:
    app = create_app({"tiny": FakeLLM()}, ServerOptions(api_key="sesame"))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as closed:
        assert closed.get("/metrics").status_code == 401
        assert samples(closed, authorization="Bearer sesame")
    app = create_app({"tiny": FakeLLM()}, ServerOptions(api_key="sesame", metrics_open=True))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as opened:
        assert samples(opened)
        assert opened.get("/v1/models").status_code == 401


def test_two_servers_in_one_process_count_apart(client: TestClient) -> None:
    other = TestClient(create_app({"tiny": FakeLLM()}), base_url=BASE)  # pyright: ignore[reportArgumentType]
    client.get("/health")
    assert ("mlxinfer_http_requests_total", "code=200", "method=GET", "route=/health") not in samples(other)


# -- the access log --------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the access log wrote."""
    caplog.set_level(logging.INFO, logger="mlxinfer.access")

    class Lines(list[str]):
        def __getitem__(self, index: Any) -> Any:
            return [r.getMessage() for r in caplog.records if r.name == "mlxinfer.access"][index]

    return Lines()


def test_a_request_is_one_line_of_json_without_its_content(client: TestClient, lines: list[str]) -> None:
    client.post("/v1/chat/completions?token=hush", json=CHAT, headers={"authorization": "Bearer hush"})
    entry = json.loads(lines[-1])
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/chat/completions", 200)
    assert entry["bytes"] > 100
    assert entry["ms"] >= 0
    assert "hush" not in lines[-1]
    assert "secret" not in lines[-1]


def test_a_proper_request_id_is_taken_and_any_other_is_replaced(client: TestClient, lines: list[str]) -> None:
    answer = client.get("/health", headers={"x-request-id": "Run-7.a_b"})
    assert answer.headers["x-request-id"] == json.loads(lines[-1])["id"] == "Run-7.a_b"
    for odd in ("a b", "x" * 65, "é", '"}', ""):
        answer = client.get("/nothing", headers={"x-request-id": odd.encode()})
        assert answer.headers["x-request-id"] == json.loads(lines[-1])["id"] != odd
        assert len(answer.headers["x-request-id"]) == 16


@pytest.mark.parametrize("path", ["/%0d%0aINFO:%20forged", "/%1b[2J", "/%7f%c2%9b", "/%e2%80%a8x", "/" + "a" * 5000])
def test_no_path_can_end_a_line_or_steer_a_terminal(client: TestClient, lines: list[str], path: str) -> None:
    client.get(path)
    assert lines[-1].isascii()
    assert lines[-1].isprintable()
    assert len(lines[-1]) < 700
    assert json.loads(lines[-1])["status"] == 404


def test_a_refusal_names_the_flag_that_would_allow_it(
    client: TestClient, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for headers, flag in (
        ({"host": "box.local:8080"}, "--allow-host box.local"),
        ({"origin": "http://localhost:3000"}, "--allow-origin http://localhost:3000"),
    ):
        client.get("/health", headers=headers)
        entry = json.loads(lines[-1])
        assert entry["allow"] == flag
        assert entry["error"] in ("wrong_host", "foreign_origin")
        warning = next(r for r in reversed(caplog.records) if r.levelno == logging.WARNING).getMessage()
        assert flag in warning
        assert entry["id"] in warning


def test_what_nobody_foresaw_is_a_500_with_the_id_that_the_log_has(
    client: TestClient, llm: FakeLLM, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    llm.submit = broken  # pyright: ignore[reportAttributeAccessIssue]
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "r1"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "r1"
    assert "a bug" not in answer.text
    assert json.loads(lines[-1])["error"] == "internal_error"
    assert any(r.getMessage() == "request r1: unexpected error" and r.exc_info for r in caplog.records)


def test_an_error_in_the_middle_of_a_stream_is_in_the_log(client: TestClient, llm: FakeLLM, lines: list[str]) -> None:
    llm.fail_after = 2
    assert client.post("/v1/chat/completions", json=CHAT | {"stream": True}).status_code == 200
    entry = json.loads(lines[-1])
    assert (entry["status"], entry["error"]) == (200, "internal_error")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
        ("/api/chat", {}),
    ],
)
def test_what_breaks_a_stream_is_in_the_log_by_its_requests_id(
    client: TestClient, llm: FakeLLM, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    llm.fail_after, llm.failure = 2, ZeroDivisionError("a bug")
    sent = body | {"model": "tiny", "stream": True} | ({} if "input" in body else {"messages": CHAT["messages"]})
    answer = client.post(path, json=sent, headers={"x-request-id": "r7"})
    assert answer.status_code == 200
    assert "internal error" in answer.text
    assert [r.getMessage() for r in caplog.records if r.exc_info] == ["request r7: unexpected error"]


def test_a_reader_that_stalls_costs_lines_and_holds_nobody_up() -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    handler = LineHandler(stream, level=logging.INFO)
    logger = logging.Logger("stalled")
    logger.addHandler(handler)
    done = threading.Event()

    def write() -> None:
        for _ in range(CAPACITY + 5000):
            logger.info("x" * 100)
        done.set()

    threading.Thread(target=write, daemon=True).start()
    try:
        assert done.wait(20)
        assert handler.dropped > 0
    finally:
        os.close(reader)  # lets the handler's thread go
        handler.close()
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def test_a_log_file_is_for_its_owner_and_is_followed_when_it_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    with logging_to(str(path)):
        log = logging.getLogger("mlxinfer.access")
        log.info("one")
        assert wait_for(lambda: path.read_text() == "one\n")
        assert path.stat().st_mode & 0o777 == 0o600
        path.rename(tmp_path / "access.log.1")
        log.info("two")
        assert wait_for(lambda: path.exists() and path.read_text() == "two\n")
    log.info("three")
    assert path.read_text() == "two\n"
    assert not log.handlers


def test_a_dash_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with logging_to("-"):
        logging.getLogger("mlxinfer.access").info("one")
    assert capfd.readouterr().err == "one\n"
    assert not list(tmp_path.iterdir())


def test_a_log_file_that_cannot_be_written_is_said_before_the_server_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="access log"), logging_to(str(tmp_path / "no" / "access.log")):
        pass
    assert not logging.getLogger("mlxinfer").handlers
