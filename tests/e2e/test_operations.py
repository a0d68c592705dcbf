"""A served tiny model as its owner sees it: `ps`, /metrics, the access log, keys, `stop`; and what it opens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = """
[[key]]
name = "anna"
key = "sesame"
[[key]]
name = "ben"
key = "open"
models = ["other"]
"""


def call(url: str, body: Any = None, key: str | None = None) -> tuple[int, str]:
    """(status, text) of a GET, or of a POST with a JSON body."""
    headers = {"content-type": "application/json", "x-request-id": "same"} | ({"x-api-key": key} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_server_is_listed_watched_limited_and_stopped(tmp_path: Path) -> None:
    models = [f"{name}={tiny.write_folder(tmp_path / name, seed=i)}" for i, name in enumerate(("tiny", "other"))]
    keys, log = tmp_path / "keys.toml", tmp_path / "access.log"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    env = os.environ | {"MLXINFER_CONFIG": os.devnull, "MLXINFER_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "mlxinfer"]
    flags = ["--keys", str(keys), "--access-log", str(log), "--lazy", "--port", "0", "--json"]
    process = subprocess.Popen([*command, "serve", *models, *flags], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 4}
        assert call(f"{url}/v1/completions", body)[0] == 401
        assert call(f"{url}/v1/completions", body, "open")[0] == 404
        assert call(f"{url}/v1/completions", body, "sesame")[0] == 200
        metrics = call(f"{url}/metrics", key="sesame")[1]
        assert 'mlxinfer_model_state{model="tiny",state="loaded"} 1.0' in metrics
        assert 'mlxinfer_refusals_total{kind="invalid_api_key"} 1.0' in metrics
        assert 'mlxinfer_prompt_tokens_total{model="tiny"}' in metrics
        listed = subprocess.run([*command, "ps", "--json"], env=env, capture_output=True, text=True, timeout=60)
        (shown,) = json.loads(listed.stdout)["servers"]
        assert (shown["pid"], shown["url"], shown["status"]) == (process.pid, url, "ok")
        assert shown["models"] == {"tiny": "ok", "other": "registered"}
        stopped = subprocess.run([*command, "stop", "tiny"], env=env, capture_output=True, text=True, timeout=60)
        assert stopped.returncode == 0, stopped.stderr
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate(timeout=20)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    asked = [(line["status"], line.get("key")) for line in lines if line["path"] == "/v1/completions"]
    assert asked == [(401, None), (404, "ben"), (200, "anna")]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_that_go_on_coming_change_neither_the_exit_code_nor_print_anything(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    env = os.environ | {"MLXINFER_CONFIG": os.devnull, "MLXINFER_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "mlxinfer", "serve", f"tiny={tiny.write_folder(tmp_path / 'tiny')}", "--lazy"]
    with subprocess.Popen(
        [*command, "--port", "0", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = json.loads(process.stdout.readline())["url"]
        assert call(f"{url}/v1/completions", {"prompt": "the quick", "max_tokens": 4})[0] == 200
        for _ in range(2000):
            process.send_signal(sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
                break
        assert process.wait(20) == code
        assert "Traceback" not in process.stderr.read()


# -- what requests make the server open --------------------------------------------------------------------------------

AUDITED = """
import os, sys
from mlxinfer import load
from mlxinfer.server.run import serve

llm = load(sys.argv[1], prefix_disk_mb=0)
events = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
WATCHED = {"open", "os.listdir",
            "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate",
           "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "subprocess.Popen",
           "os.system", "os.exec", "os.posix_spawn", "os.fork", "urllib.Request", "shutil.rmtree"}

def hook(event, args):
    if event in WATCHED:
        os.write(events, (event + " " + ascii(args[0] if event == "open" else args) + "\\n").encode())

def started(host, port):
    print(port, flush=True)
    sys.addaudithook(hook)

serve({"tiny": llm}, port=0, on_started=started)
"""


def hostile_names(folder: Path) -> list[str]:
    """200 strings that somebody might take for a path, a URL or a name to fetch."""
    targets = [
        "etc/passwd", "etc/shadow", "proc/self/environ", "root/.ssh/id_rsa", "dev/zero",
        f"{folder}/config.json".lstrip("/"),
        "tiny/../../etc/passwd", "no/such/file", "tmp", "",
    ]  # fmt: skip
    ways = [
        "/{}", "../{}", "../../../../../../{}", "./{}", "~/{}", "~root/{}", "//{}", "\\\\host\\{}", "file:///{}",
        "http://127.0.0.1:9/{}", "https://evil.example/{}", "hf://{}", "{}\0", "{}\0.safetensors", "%2e%2e%2f{}",
        "..%252f{}", "..\\{}", "tiny/../{}", "tiny\0/{}", "$(cat /{})",
    ]  # fmt: skip
    return [way.format(target) for way in ways for target in targets]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """(url, the folder of the model, what was opened since the server began)"""
    base = tmp_path_factory.mktemp("audited")
    folder, events = tiny.write_folder(base / "model"), base / "events"
    command = [sys.executable, "-c", AUDITED, str(folder), str(events)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}", folder, events
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0


def routes() -> list[str]:
    """Every path that takes a POST."""
    from mlxinfer.server.anthropic.routes import router as anthropic
    from mlxinfer.server.ollama.routes import router as ollama
    from mlxinfer.server.routes import router

    found = [route for one in (router, anthropic, ollama) for route in one.routes]
    return [route.path for route in found if "POST" in getattr(route, "methods", ())]  # pyright: ignore[reportAttributeAccessIssue]


def body_of(name: str) -> dict[str, Any]:
    """A request of any API whose model, adapter and files are `name`."""
    image = {"type": "image_url", "image_url": {"url": name}}
    content = [{"type": "text", "text": name}, image, {"type": "input_file", "file_id": name}]
    return {
        "model": name,
        "messages": [{"role": "user", "content": content}],
        "prompt": name,
        "input": name,
        "query": name,
        "documents": [name],
        "adapter": name,
        "max_tokens": 1,
    }


def test_200_paths_in_every_field_open_nothing_and_reach_nobody(audited: tuple[str, Path, Path]) -> None:
    url, folder, events = audited
    names = hostile_names(folder)
    assert len(names) == 200
    text = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "max_tokens": 1}
    for path in routes():
        call(url + path, text)  # what is imported or opened once, for good
    call(f"{url}/v1/models/nobody")
    before = events.read_text() if events.exists() else ""
    for name in names:
        for path in routes():
            assert 400 <= call(url + path, body_of(name))[0] < 500, (path, name)
            assert call(url + path, text | {"model": name})[0] in (400, 403, 404, 422), (path, name)
        assert call(f"{url}/v1/models/{urllib.parse.quote(name, safe='')}")[0] in (200, 400, 404)
        for field in ("adapter", "lora", "file", "template", "chat_template", "grammar_file", "cache"):
            call(url + routes()[0], text | {field: name})
    seen = events.read_text()[len(before) :].splitlines() if events.exists() else []
    assert [line for line in seen if not line.startswith("open ") or not _is_code(line)] == []
    status, reply = call(f"{url}/v1/completions", {"prompt": "hi", "max_tokens": 2})
    assert status == 200, reply


def _is_code(line: str) -> bool:
    """Python reading one of its own modules."""
    return line.rstrip("'\"").endswith((".py", ".pyc", ".so"))


def test_whether_a_path_exists_is_not_revealed(audited: tuple[str, Path, Path]) -> None:
    url, folder, _ = audited
    there, gone = str(folder / "config.json"), str(folder / "config.jsom")
    for path in routes():
        replies = [call(url + path, body_of("x") | {"model": name}) for name in (there, gone)]
        assert replies[0] == (replies[1][0], replies[1][1].replace(gone, there))
