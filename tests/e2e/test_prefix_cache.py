"""The prefix cache of a real server: within a conversation, across a restart, and after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest

from mlxinfer.config import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.model

DEMO = "smollm2-135m"
SYSTEM = "You keep a lighthouse and answer in one short sentence. " * 30


@pytest.fixture
def cache(tmp_path: Path, demo_gguf: Path) -> Path:
    """A cache folder of its own that has the demo model in it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "packages").symlink_to(load_settings().cache_dir / "packages")
    return folder


class Server:
    def __init__(self, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxinfer", "serve", DEMO, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "MLXINFER_CONFIG": os.devnull,
                "MLXINFER_CACHE_DIR": str(cache),
                "MLXINFER_PREFIX_DISK_MB": "512",
            },
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"serve ended with {self.process.wait()}"
        self.client = openai.OpenAI(base_url=json.loads(line)["url"] + "/v1", api_key="none", max_retries=0)

    def chat(self, messages: list[Any]) -> tuple[str, int, int]:
        """(text, prompt tokens, cached tokens)."""
        reply = self.client.chat.completions.create(model=DEMO, messages=messages, temperature=0, max_tokens=10)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return (
            reply.choices[0].message.content or "",
            reply.usage.prompt_tokens,
            reply.usage.prompt_tokens_details.cached_tokens or 0,
        )

    def end(self, sig: int) -> int:
        self.client.close()
        self.process.send_signal(sig)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def servers(cache: Path) -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def ask(question: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def entries(cache: Path) -> list[Path]:
    return [path for path in (cache / "prefixes").rglob("*.kv") if path.is_file()]


def test_an_agents_turns_compute_only_what_is_new_and_a_killed_server_goes_on_from_disk(cache, servers):
    servers.append(first := Server(cache))
    messages = ask("What do you see tonight?")
    texts: list[str] = []
    computed = again = known = 0
    for turn in range(4):
        text, prompt, cached = first.chat(messages)
        texts.append(text)
        if turn:
            computed += prompt - cached
            again += max(0, known - cached)
        known = prompt + 9
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And at {turn} o'clock?"}]
    assert again <= 0.05 * known, "tokens that earlier turns had computed"
    assert computed < 0.5 * known
    # Written when there has been nothing to do for a while.
    deadline = time.monotonic() + 60
    while not entries(cache) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert entries(cache)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    servers.append(second := Server(cache))
    text, prompt, cached = second.chat(ask("What do you see tonight?"))
    assert text == texts[0]
    assert cached >= prompt - 5
    assert second.chat([{"role": "user", "content": "Hi"}])[2] < 64, "another conversation finds nothing of it"


def test_a_server_that_is_stopped_writes_what_is_idle_and_only_its_owner_can_read_it(cache, servers):
    servers.append(first := Server(cache))
    text, _, cached = first.chat(ask("Who goes there?"))
    assert cached == 0
    assert first.end(signal.SIGTERM) == 0
    (entry,) = entries(cache)
    assert entry.stat().st_mode & 0o077 == 0
    assert (cache / "prefixes").stat().st_mode & 0o077 == 0
    servers.append(second := Server(cache))
    assert second.chat(ask("Who goes there?"))[0] == text
    assert second.end(signal.SIGTERM) == 0
