"""The packaged program, built by PyInstaller and started without a Python of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mlxinfer.cli.group import VERBS
from tests import tiny

pytest.importorskip("PyInstaller")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SECONDS = 90


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The executable. $PACKAGED_APP names a folder that was built before."""
    if built := os.environ.get("PACKAGED_APP"):
        yield Path(built).resolve() / "mlxinfer"
        return
    place = tmp_path_factory.mktemp("bundle")
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN"]
    command += ["--distpath", str(place / "dist"), "--workpath", str(place / "work")]
    subprocess.run([*command, str(ROOT / "app" / "packaging" / "mlxinfer.spec")], check=True, cwd=ROOT, timeout=840)
    shutil.rmtree(place / "work")
    yield place / "dist" / "mlxinfer" / "mlxinfer"
    shutil.rmtree(place)  # a gigabyte


@pytest.fixture
def home(tmp_path):
    tiny.write_folder(tmp_path / "tiny")
    return tmp_path


def surroundings(home):
    """Nothing of this Python, of its paths or of the checkout."""
    left = {"PATH": "/usr/bin:/bin", "HOME": str(home), "LC_ALL": "C.UTF-8"}
    names = ("data_dir", "cache_dir")
    return left | {f"MLXINFER_{name.upper()}": str(home / name) for name in names}


@contextmanager
def running(program, home, *arguments):
    """A server, ended by SIGINT, and what it wrote on stdout so far."""
    out, log = home / "out", home / "log"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            [program, *arguments], env=surroundings(home), cwd=home, stdout=stdout, stderr=stderr
        )
    try:
        yield process, out
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()


def waited_for(found, process, what):
    end = time.monotonic() + SECONDS
    while not (answer := found()):
        assert process.poll() is None, f"the program is gone: {process.returncode}"
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)
    return answer


def ready(url):
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_it_says_its_version_and_finds_all_it_needs(program, home):
    def said(*arguments):
        return subprocess.run(
            [program, *arguments], env=surroundings(home), cwd=home, capture_output=True, text=True, timeout=120
        )

    assert "mlxinfer, version" in said("--version").stdout
    report = json.loads(said("doctor", "--json").stdout)
    wrong = [found for found in report["findings"] if found["status"] == "error"]
    assert not wrong


def test_run_answers_a_question(program, home):
    command = [program, "run", "-m", str(home / "tiny"), "--max-tokens", "4", "--json", "hi"]
    ran = subprocess.run(command, env=surroundings(home), cwd=home, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["usage"]["completion_tokens"] == 4


def test_it_serves_a_model_and_answers(program, home):
    port = "18473"
    with running(program, home, "serve", str(home / "tiny"), "--port", port) as (process, _):
        url = f"http://127.0.0.1:{port}"
        waited_for(lambda: ready(url), process, "the server")
        question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        named = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        answer = httpx.post(f"{url}/v1/chat/completions", json=question | {"model": named}, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.skipif("app" not in VERBS, reason="needs the verb `app`")
def test_it_serves_the_page_behind_its_key(program, home):
    with running(program, home, "app", str(home / "tiny"), "--no-open", "--json") as (process, out):
        link = waited_for(lambda: out.read_text().strip(), process, "the link")
        link = json.loads(link)["url"]
        with httpx.Client(follow_redirects=True, timeout=60) as client:
            page = client.get(link)
            assert page.status_code == 200
            assert "gradio" in page.text.lower()
            assert client.get(f"{page.url}theme.css").status_code == 200
        assert httpx.get(link.partition("?")[0]).status_code == 401
        waited_for(lambda: ready(link.partition("/app")[0]), process, "the model")
    assert (home / "data_dir" / "chats.db").is_file()
