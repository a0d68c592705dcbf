"""`mlxinfer serve` with two tiny models: one is loaded while the other streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    base = tmp_path_factory.mktemp("several")
    names = [f"{n}={tiny.write_folder(base / n, seed=i, max_position_embeddings=65536)}" for i, n in enumerate("ab")]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlxinfer", "serve", *names, "--lazy", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"MLXINFER_CONFIG": os.devnull},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"serve ended with {process.wait()}"
    yield json.loads(line)["url"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def get(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def states(url: str) -> dict[str, str]:
    return {card["id"]: card["state"] for card in get(f"{url}/v1/models")[1]["data"]}


def test_a_second_model_is_loaded_while_the_first_streams_on(url: str) -> None:
    assert states(url) == {"a": "registered", "b": "registered"}
    assert get(f"{url}/health")[0] == get(f"{url}/ready")[0] == 200
    options: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = client.completions.create(model="a", prompt="the quick", max_tokens=60000, stream=True, **options)
        chunks = iter(stream)
        for _ in range(20):
            next(chunks)
        assert states(url) == {"a": "loaded", "b": "registered"}
        answer = client.completions.create(model="b", prompt="the quick", max_tokens=8, **options)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        assert states(url) == {"a": "loaded", "b": "loaded"}
        for _ in range(20):
            next(chunks)
        assert get(f"{url}/health")[1]["models"]["a"]["running"] == 1, "the stream goes on"
        stream.close()
    end = time.monotonic() + 20
    while get(f"{url}/health")[1]["models"]["a"]["running"]:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_unknown_model_is_a_404_that_lists_the_registered_ones(url: str) -> None:
    status, body = get(f"{url}/v1/models/c")
    assert status == 404
    assert "a, b" in body["error"]["message"]
