"""`mlxinfer bench` on the command line: what is refused at once, a run against stand-ins, and the real thing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.tiny import write_folder
from tests.unit.bench.fake import RefusalError, echo, serving
from tests.unit.cli.conftest import error_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.cli.conftest import Invoke

QUICK = ("-w", "single", "--rounds", "1", "--warmup", "0", "--max-tokens", "3")


@pytest.fixture(autouse=True)
def _known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.bench.machine.bandwidth", lambda: {"gb_s": 10.0, "source": "a test"})
    monkeypatch.delenv("MLXINFER_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("args", "code", "wanted"),
    [
        ((), 2, "name a model, or a running server"),
        (("--url", "here"), 2, "--url 'here' is not"),
        (("m", "--against", "http://"), 2, "--against"),
        (("m", "--against", "mlxinfer=http://h"), 2, "two servers are called 'mlxinfer'"),
        (("m", "-w", "chatt"), 2, "'chatt' is no workload"),
        (("m", "--concurrency", "1,x"), 2, "1,2,4,8"),
        (("m", "--concurrency", "0"), 2, "1,2,4,8"),
        (("m", "--concurrency", "2", "--rate", "1"), 2, "choose one"),
        (("m", "--plot", "x.pdf"), 2, ".svg or .png"),
        (("m", "--json", "/no/such/folder/x.json"), 2, "can't be written"),
        (("./no-such-model",), 3, "no-such-model"),
    ],
)
def test_what_cannot_work_is_refused_before_a_server_is_started(
    args: tuple[str, ...], code: int, wanted: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxinfer.bench.process.OwnServer.start", lambda self: pytest.fail("started"))
    result = invoke("bench", *args)
    assert (result.exit_code, wanted in result.stderr + result.stdout) == (code, True), result.output


def test_a_server_that_does_not_answer_ends_with_3_in_words_or_json(invoke: Invoke) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        plain, as_json = invoke("bench", "--url", url), invoke("bench", "--url", url, "--json")
    assert plain.exit_code == as_json.exit_code == 3
    assert "nothing answers at" in plain.stderr
    assert plain.stdout == ""
    assert "start the server" in error_of(as_json)["message"]


def test_a_wrong_model_name_ends_with_3_and_says_how_to_name_another(invoke: Invoke) -> None:
    def only_one(body: dict[str, Any]) -> Iterator[bytes]:
        if body["model"] != "fake-model":
            raise RefusalError(404, {"error": {"message": "no such model"}})
        yield from echo(body)

    with serving(only_one) as server:
        result = invoke("bench", "--url", f"{server.url}#other", *QUICK)
    assert result.exit_code == 3
    assert "does not serve 'other'" in result.stderr
    assert "#MODEL" in result.stderr


def test_two_servers_are_measured_in_turn_and_compared(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with serving() as one, serving() as other:
        urls = ("--url", one.url, "--against", f"other={other.url}")
        result = invoke("bench", *urls, *QUICK[:2], "--rounds", "2", "--seed", "5", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    name = one.url.removeprefix("http://")
    assert [target["name"] for target in report["targets"]] == [name, "other"]
    (entry,) = report["results"]
    assert entry["targets"]["other"]["summary"]["requests"] == 2
    assert entry["ratios"]["other"]["ttft_p50"]["rounds"] == 2
    assert f"{name} / other" in result.stdout
    assert "Seed 5" in result.stderr
    # The probe, a round to warm up, two that count.
    assert one.asked[1:] == other.asked[1:]
    assert len({body["messages"][0]["content"] for body in one.asked[1:]}) == 3
    turns = [line.split(", ")[-1] for line in result.stderr.splitlines() if line.startswith("single:")]
    assert turns == ["other", name, name, "other", "other", name]


def test_json_alone_prints_one_object_and_a_model_after_it_is_no_file(invoke: Invoke) -> None:
    with serving() as server:
        result = invoke("bench", "--url", server.url, "--json", *QUICK)
        named = invoke("bench", "--json", "some-model", "--url", server.url, *QUICK)
        before = invoke("--json", "bench", "some-model", "--url", server.url, *QUICK)
    assert json.loads(result.stdout)["results"][0]["workload"] == "single"
    assert named.exit_code == before.exit_code == 0
    assert json.loads(named.stdout)["plan"]["prompt_tokens_by"].startswith("estimated")
    assert json.loads(before.stdout)["format"] == 1


def test_the_same_seed_asks_the_same(invoke: Invoke) -> None:
    with serving() as server:
        for seed in ("1", "1", "2"):
            assert invoke("bench", "--url", server.url, *QUICK, "--seed", seed).exit_code == 0
        first, again, another = server.asked[1::2]
    assert first == again != another


def test_failures_are_counted_and_shown_and_when_nothing_was_answered_it_ends_with_1(invoke: Invoke) -> None:
    def fails(body: dict[str, Any]) -> Iterator[bytes]:
        if len(server.asked) > after:
            raise RefusalError(500, {"error": "\x1b[31mbroken"})
        yield from echo(body)

    with serving(fails) as server:
        after = 2
        some = invoke("bench", "--url", server.url, "-w", "chat", "--requests", "3", "--rounds", "1", "--warmup", "0")
        after = len(server.asked) + 1
        none = invoke("bench", "--url", server.url, *QUICK)
    assert some.exit_code == 0
    assert "3, 2 failed" in some.stdout
    assert "2 x HTTP 500" in some.stdout
    assert "\x1b" not in some.stdout
    assert none.exit_code == 1
    assert "not one request was answered" in none.stderr


def test_the_key_goes_to_the_measured_server_and_to_no_other(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_API_KEY", "secret")
    with serving() as one, serving() as other:
        result = invoke("bench", "--url", one.url, "--against", other.url, *QUICK, "--json")
    assert all(headers["authorization"] == "Bearer secret" for headers in one.headers)
    assert not any("authorization" in headers for headers in other.headers)
    assert "secret" not in result.output


def test_the_real_program_starts_a_server_measures_it_and_stops_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (tmp_path / "config.toml").touch()
    env = os.environ | {"MLXINFER_CONFIG": str(tmp_path / "config.toml"), "MLXINFER_API_KEY": "for others"}
    command = [sys.executable, "-m", "mlxinfer", "bench", str(folder), *QUICK, "--ignore-eos", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (target,) = report["targets"]
    assert target["ours"]
    assert "serve" in target["command"]
    assert report["model"]["architecture"] == "llama"
    (entry,) = report["results"]
    measured = entry["targets"]["mlxinfer"]
    assert (measured["summary"]["requests"], measured["summary"]["errors"]) == (1, 0)
    assert measured["summary"]["output_tokens"] == 3
    assert not measured["summary"]["tokens_counted_from_chunks"]
    # This tokenizer takes most letters singly; the sentences around the words alone are more than 60 tokens.
    assert 60 <= measured["summary"]["prompt_tokens"] <= 120
    assert measured["peak_memory_bytes"] > 1_000_000
    assert measured["bandwidth_share"] > 0
    assert not [p for p in psutil.process_iter() if str(folder) in " ".join(_words(p))]


def test_sigterm_ends_it_as_ctrl_c_does_and_stops_the_server(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (tmp_path / "config.toml").touch()
    env = os.environ | {"MLXINFER_CONFIG": str(tmp_path / "config.toml")}
    command = [sys.executable, "-m", "mlxinfer", "bench", str(folder), *QUICK[:2], "--rounds", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        while line := process.stderr.readline():
            if line.startswith("single: round 1 "):
                break
        (server,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not server.is_running()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
