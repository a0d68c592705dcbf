"""`mlxinfer serve` up to the server: names, addresses, order of work, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.cli.serve import name_models, served_name, url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlxinfer.pool import ModelPool
    from tests.unit.cli.conftest import FakeLLM, Invoke


class FakeServer:
    """Starts, says so, and ends by the signal it was told to."""

    def __init__(self) -> None:
        self.ended_by: int = signal.SIGTERM
        self.calls: list[dict[str, Any]] = []
        self.fetched: list[str] = []
        self.states: list[dict[str, str]] = []

    def serve(self, models: ModelPool, *, on_started: Callable[[str, int], None], **rest: Any) -> int:
        self.calls.append({"models": models, **rest})
        self.states.append({name: status.state for name, status in models.status().items()})
        on_started(rest["host"], rest["port"] or 4567)
        return self.ended_by


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """In place of uvicorn, and a machine where all fits; the address is checked for real."""
    fake = FakeServer()
    monkeypatch.setattr("mlxinfer.pool.Machine.predict", lambda self, source, cancel: 1)
    monkeypatch.setattr("mlxinfer.cli.serve._fetch", lambda machine, source: fake.fetched.append(source))
    monkeypatch.setattr("mlxinfer.server.run.serve", fake.serve)
    monkeypatch.setenv("MLXINFER_PORT", "0")
    monkeypatch.delenv("MLXINFER_API_KEY", raising=False)
    return fake


def test_names_and_sources(tmp_path: Path) -> None:
    folder = tmp_path / "My model=1"
    folder.mkdir()
    assert name_models(("smollm2-135m", "org/name@main", "a=./x", "b/c=org/name", str(folder), "../m.gguf")) == {
        "smollm2-135m": "smollm2-135m",
        "org/name@main": "org/name@main",
        "a": "./x",
        "b/c": "org/name",
        "My-model-1": str(folder),
        "m": "../m.gguf",
    }


def test_a_path_is_served_under_its_last_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert served_name(".") == tmp_path.name
    assert served_name("sub/x.gguf") == "x"
    assert served_name("/") == "model"


@pytest.mark.parametrize(
    "models", [("a", "a"), ("a=x", "a=y"), ("/p/m", "/q/m"), ("=x",), ("a=",), ("a b=c",), ("a\0=c",), ("-=x",)]
)
def test_names_that_clash_or_are_none_end_with_2(
    models: tuple[str, ...], invoke: Invoke, llm: FakeLLM, server: FakeServer
) -> None:
    assert invoke("serve", *models).exit_code == 2
    assert not server.calls


def test_everything_is_loaded_then_one_line_names_the_url(invoke: Invoke, llm: FakeLLM, server: FakeServer) -> None:
    result = invoke("serve", "m", "tuned=./x", "--ctx", "32", "--allow-host", "mac.local")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Serving m, tuned at http://127.0.0.1:4567/v1   (Ctrl-C stops)\n"
    assert [(name, settings.context_length) for name, settings in llm.loaded_with] == [("m", 32), ("./x", 32)]
    assert list(server.calls[0]["models"]) == ["m", "tuned"]
    assert server.calls[0]["allowed_hosts"] == {"mac.local"}
    assert llm.unloaded.is_set()


def test_what_does_not_fit_beside_the_others_is_only_registered_which_is_said(
    invoke: Invoke, llm: FakeLLM, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"a": 9, "b": 60, "c": 5}
    monkeypatch.setattr("mlxinfer.pool.Machine.predict", lambda self, source, cancel: sizes[source])
    monkeypatch.setattr("mlxinfer.pool.Machine.budget", lambda self: 60)
    monkeypatch.setattr("mlxinfer.pool.Machine.held", lambda self: 9)
    result = invoke("serve", "a", "b", "c", "--pin", "b")
    assert "b is not loaded yet: it doesn't fit beside the others." in result.stderr
    assert server.states == [{"a": "loaded", "b": "registered", "c": "loaded"}]
    assert [name for name, _ in llm.loaded_with] == ["a", "c"]
    assert server.fetched == ["a", "b", "c"], "what is only registered is fetched too: a request downloads nothing"
    assert server.calls[0]["models"].status()["b"].pinned
    sizes["b"] = 61
    assert invoke("serve", "a", "b").exit_code == 4, "one that doesn't even fit alone is an error at once"


def test_kv_bits_reach_the_load(invoke: Invoke, llm: FakeLLM, server: FakeServer) -> None:
    invoke("serve", "a", "--kv-bits", "8")
    assert [s.kv_bits for _, s in llm.loaded_with] == [8]


def test_lazy_fetches_and_loads_nothing(invoke: Invoke, llm: FakeLLM, server: FakeServer) -> None:
    result = invoke("serve", "a", "b", "--lazy", "--keep-alive", "60")
    assert result.exit_code == 0
    assert "a is not loaded yet. The first request for it loads it." in result.stderr
    assert server.states == [{"a": "registered", "b": "registered"}]
    assert server.fetched == ["a", "b"]
    assert not llm.loaded_with
    assert server.calls[0]["models"].keep_alive == 60


def test_a_pin_of_what_is_not_served_ends_with_2(invoke: Invoke, llm: FakeLLM, server: FakeServer) -> None:
    result = invoke("serve", "org/a", "b=org/c", "--pin", "org/c")
    assert result.exit_code == 2
    assert "--pin org/c: no model is served under that name; served are org/a, b" in result.stderr
    assert not llm.loaded_with


def test_json_prints_url_and_models_on_stdout(invoke: Invoke, llm: FakeLLM, server: FakeServer) -> None:
    assert json.loads(invoke("serve", "m", "--json").stdout) == {"url": "http://127.0.0.1:4567", "models": ["m"]}


def test_ctrl_c_ends_with_130_and_sigterm_with_0(invoke: Invoke, llm: FakeLLM, server: FakeServer) -> None:
    assert invoke("serve", "m").exit_code == 0
    server.ended_by = signal.SIGINT
    assert invoke("serve", "m").exit_code == 130
    assert llm.unloaded.is_set()


def test_sigterm_while_loading_ends_with_0_and_the_handler_is_put_back(
    invoke: Invoke, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, settings: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("mlxinfer.cli.loading.load_served", load)
    before = signal.getsignal(signal.SIGTERM)
    assert invoke("serve", "m").exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert not server.calls


def test_without_a_model_the_configured_one_is_served_else_2(
    invoke: Invoke, llm: FakeLLM, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("serve").exit_code == 2
    monkeypatch.setenv("MLXINFER_MODEL", "from-variable")
    assert invoke("serve").exit_code == 0
    assert [name for name, _ in llm.loaded_with] == ["from-variable"]


def test_host_and_port_come_from_flag_variable_and_file_in_this_order(
    invoke: Invoke, llm: FakeLLM, server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mlxinfer.cli.serve.check_address", lambda settings, access: None)
    (tmp_path / "config.toml").write_text("host = '127.0.0.3'\nport = 9001")
    monkeypatch.setenv("MLXINFER_PORT", "9002")
    invoke("serve", "m")
    invoke("serve", "m", "--port", "9003", "--host", "127.0.0.4")
    assert [(call["host"], call["port"]) for call in server.calls] == [("127.0.0.3", 9002), ("127.0.0.4", 9003)]


def test_a_taken_port_is_refused_before_anything_is_loaded(invoke: Invoke, llm: FakeLLM, server: FakeServer) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = invoke("serve", "m", "--port", str(port))
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 is taken" in result.stderr
    assert not llm.loaded_with


def test_a_public_address_without_a_key_is_refused_before_anything_is_loaded(
    invoke: Invoke, llm: FakeLLM, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = invoke("serve", "m", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "MLXINFER_API_KEY" in result.stderr
    assert not llm.loaded_with
    monkeypatch.setenv("MLXINFER_API_KEY", "k")
    assert "http://127.0.0.1:4567" in invoke("serve", "m", "--host", "0.0.0.0").stderr


def test_urls_of_ipv6_have_brackets_and_wildcards_become_local() -> None:
    assert url("::1", 80) == url("::", 80) == "http://[::1]:80"
    assert url("0.0.0.0", 80) == "http://127.0.0.1:80"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_called_empty(invoke: Invoke, llm: FakeLLM, server: FakeServer, name: str) -> None:
    result = invoke("serve", name)
    assert result.exit_code == 2
    assert "a model's name is empty" in result.stderr


def test_help_shows_that_a_model_may_be_left_out(invoke: Invoke) -> None:
    assert "[MODEL]..." in invoke("serve", "--help").stdout
