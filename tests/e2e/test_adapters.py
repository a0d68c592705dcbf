"""Adapters through `mlxinfer serve` and `mlxinfer run`, on a tiny model."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import mlxinfer
from tests import tiny
from tests.adapters import MLP, mlx_lm_tokens, write_adapter
from tests.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = "the quick brown fox"
COUNT = 20
KEYS = """
[[key]]
name = "all"
key = "key-of-all-0123456789"
[[key]]
name = "one"
key = "key-of-one-0123456789"
models = ["tiny:a"]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("adapters")
    base = tiny.write_folder(home / "tiny")
    write_adapter(home / "a", base, seed=1)
    write_adapter(home / "b", base, seed=2, kind="dora", keys=MLP)
    keys = home / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    return home


@pytest.fixture(scope="module")
def texts(home: Path) -> dict[str, str]:
    """mlx-lm's own, by the name that a request asks for."""
    with mlxinfer.load(home / "tiny") as llm:
        ids = llm.tokenizer.encode(PROMPT)
        folders = {"tiny": None, "tiny:a": home / "a", "tiny:b": home / "b"}
        made = {name: mlx_lm_tokens(home / "tiny", folder, ids, COUNT) for name, folder in folders.items()}
        return {name: llm.tokenizer.decode(tokens) for name, tokens in made.items()}


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    options = ["--adapter", f"a={home / 'a'}", "--adapter", f"tiny:b={home / 'b'}", "--keys", str(home / "keys.toml")]
    with served([f"tiny={home / 'tiny'}"], home, *options) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any], key: str = "all") -> httpx.Response:
    headers = {"authorization": f"Bearer key-of-{key}-0123456789"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60)


def complete(url: str, model: str, key: str = "all") -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    return post(url, "/v1/completions", body, key)


def listed(url: str, key: str) -> list[str]:
    headers = {"authorization": f"Bearer key-of-{key}-0123456789"}
    return [card["id"] for card in httpx.get(f"{url}/v1/models", headers=headers).json()["data"]]


def test_each_name_gives_mlx_lms_text_also_all_at_once(url: str, texts: dict[str, str]) -> None:
    assert len(set(texts.values())) == 3
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        names = [*texts] * 4
        for name, reply in zip(names, pool.map(lambda name: complete(url, name), names), strict=True):
            assert reply.json()["model"] == name
            assert reply.json()["choices"][0]["text"] == texts[name]


def test_every_api_takes_the_name_of_a_model_with_an_adapter(url: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    same: dict[str, Any] = {"messages": messages, "model": "tiny:a"}
    openai = post(url, "/v1/chat/completions", same | {"max_tokens": 8, "temperature": 0}).json()
    anthropic = post(url, "/v1/messages", same | {"max_tokens": 8, "temperature": 0}).json()
    options = {"num_predict": 8, "temperature": 0}
    ollama = post(url, "/api/chat", same | {"stream": False, "options": options}).json()
    body = {"model": "tiny:a", "input": "hello", "max_output_tokens": 16, "temperature": 0}
    responses = post(url, "/v1/responses", body).json()
    assert {openai["model"], anthropic["model"], ollama["model"], responses["model"]} == {"tiny:a"}
    text = openai["choices"][0]["message"]["content"]
    assert text
    assert anthropic["content"][0]["text"] == ollama["message"]["content"] == text


def test_names_are_listed_for_whom_they_exist(url: str, texts: dict[str, str]) -> None:
    assert listed(url, "all") == ["tiny", "tiny:a", "tiny:b"]
    assert listed(url, "one") == ["tiny:a"]
    assert complete(url, "tiny:a", "one").json()["choices"][0]["text"] == texts["tiny:a"]
    for name in ("tiny", "tiny:b"):
        assert complete(url, name, "one").status_code == 404


def test_an_unknown_adapter_is_a_404_and_a_path_is_none(url: str, home: Path) -> None:
    for name in ("tiny:c", f"tiny:{home / 'a'}", "tiny:a:b", "tiny:"):
        reply = complete(url, name)
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"


def test_run_takes_a_folder(home: Path, texts: dict[str, str]) -> None:
    command = [sys.executable, "-m", "mlxinfer", "run", str(home / "tiny"), PROMPT, "--raw", "--json"]
    options = ["--max-tokens", str(COUNT), "--temperature", "0", "--adapter", str(home / "a")]
    environment = os.environ | {"MLXINFER_CONFIG": os.devnull}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=True)
    text = json.loads(done.stdout)["text"]
    assert text
    assert texts["tiny:a"].startswith(text)
    assert not texts["tiny"].startswith(text)


@pytest.mark.parametrize(
    ("option", "says"), [("x", "NAME=FOLDER"), ("x=nowhere", "adapter_config"), ("other:x=.", "no model is served")]
)
def test_serve_refuses_an_adapter_that_is_none_before_it_loads(home: Path, option: str, says: str) -> None:
    command = [sys.executable, "-m", "mlxinfer", "serve", str(home / "tiny"), "--adapter", option]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"MLXINFER_CONFIG": os.devnull})
    assert done.returncode != 0
    assert says in done.stderr
