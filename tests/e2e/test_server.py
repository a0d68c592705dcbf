"""`mlxinfer serve` on the demo model, spoken to by the openai client and by plain HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.model

DEMO = "smollm2-135m"
FRANCE = "What is the capital of France?"
QUESTIONS = [
    FRANCE,
    "Name three colours.",
    "Count from one to ten.",
    "Write one sentence about the sea. " * 5,
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Say hello in French, in German and in Spanish, and say which of them is the oldest language.",
    "List two fruits.",
]


class Served:
    """The process and what speaks to it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """(status, answer) of raw JSON text, or of an object."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        try:
            text = body if isinstance(body, str) else json.dumps(body)
            connection.request("POST", path, text.encode(), {"content-type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def complete(self, **fields: Any) -> dict[str, Any]:
        status, answer = self.post("/v1/completions", {"temperature": 0, "max_tokens": 12, **fields})
        assert status == 200, answer
        return answer

    def ask(self, question: str, **fields: Any) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        fields = {"temperature": 0, "max_tokens": 12, **fields}
        reply = self.client.chat.completions.create(model=DEMO, messages=messages, **fields)
        return reply.choices[0].message.content or ""

    def health(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        try:
            connection.request("GET", "/health")
            return json.loads(connection.getresponse().read())["models"][DEMO]
        finally:
            connection.close()


def launch() -> Served:
    process = subprocess.Popen(
        [sys.executable, "-m", "mlxinfer", "serve", DEMO, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"MLXINFER_CONFIG": os.devnull, "MLXINFER_PREFIX_DISK_MB": "0"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"serve ended with {process.wait()}"
    return Served(process, json.loads(line)["url"])


def stop(served: Served) -> int:
    served.client.close()
    served.process.send_signal(signal.SIGTERM)
    served.process.communicate(timeout=60)
    return served.process.returncode


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = launch()
    yield server
    assert stop(server) == 0


def test_the_openai_client_streams_a_chat_with_usage(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model=DEMO,
        messages=[{"role": "user", "content": FRANCE}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 2
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens >= len(pieces)
    assert "".join(pieces) == served.ask(FRANCE, max_tokens=None)


def test_eight_at_once_each_get_the_text_they_get_alone(served: Served) -> None:
    alone = [served.ask(q) for q in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(served.ask, QUESTIONS))
    assert together == alone
    assert len(set(alone)) > 6


def test_a_seeded_and_a_biased_request_change_nobody_elses_text(served: Served) -> None:
    jobs: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"logit_bias": {str(i): -100 for i in range(300, 900)}},
        {"temperature": 1.0, "seed": 8, "top_k": 10**9, "top_p": 0.9},
        {"repetition_penalty": 3.0},
    ]

    def run(fields: dict[str, Any]) -> str:
        return served.complete(prompt="Once upon a time", **fields)["choices"][0]["text"]

    alone = [run(job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(run, jobs)) == alone
    assert len(set(alone)) == len(jobs)


def test_models_can_be_listed_and_retrieved(served: Served) -> None:
    assert [m.id for m in served.client.models.list()] == [DEMO]
    assert served.client.models.retrieve(DEMO).id == DEMO
    with pytest.raises(openai.NotFoundError, match=DEMO):
        served.client.models.retrieve("other")


def test_a_prompt_that_is_an_earlier_prompt_and_its_output_goes_on(served: Served) -> None:
    prompt = "Once upon a time"
    first = served.complete(prompt=prompt)["choices"][0]["text"]
    for _ in range(2):
        more = served.complete(prompt=prompt + first)["choices"][0]
        assert more["text"]
    both = served.complete(prompt=prompt, max_tokens=24)["choices"][0]["text"]
    assert both.startswith(first)


def test_a_stop_string_that_spans_tokens_is_cut_exactly(served: Served) -> None:
    full = served.complete(prompt="Once upon a time", max_tokens=20)["choices"][0]["text"]
    middle = full[len(full) // 2 - 3 : len(full) // 2 + 3]
    cut = served.complete(prompt="Once upon a time", max_tokens=20, stop=[middle, "never there"])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (full[: full.index(middle)], "stop")


def test_prompts_of_every_shape_have_their_choices(served: Served) -> None:
    assert len(served.complete(prompt=["The sun", "The moon"])["choices"]) == 2
    assert len(served.complete(prompt=[[504, 3457], [504]], n=2)["choices"]) == 4
    pair = served.complete(prompt=["The sun", "The moon"])["choices"]
    assert [c["text"] for c in pair] == [
        served.complete(prompt=p)["choices"][0]["text"] for p in ("The sun", "The moon")
    ]


KILLERS: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": "a", "stop": [1]}),
    ("/v1/completions", {"prompt": [10**8]}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"49152": 100}}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"100000000": 1}}),
    ("/v1/completions", '{"prompt": "a", "logit_bias": {"1": NaN}}'),
    ("/v1/completions", '{"prompt": "a", "temperature": 1e400}'),
    ("/v1/completions", {"prompt": "a", "seed": 2**70}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**12}),
    ("/v1/completions", {"prompt": "word " * 20_000}),
    ("/v1/completions", '{"prompt": "\\ud800"}'),
    ("/v1/completions", "[" * 100_000),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 1000}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "{{1}}"}}),
]


def test_after_every_bad_request_a_good_one_gets_the_same_tokens(served: Served) -> None:
    before = served.complete(prompt="Once upon a time", max_tokens=4)["choices"]
    for path, body in KILLERS:
        status, answer = served.post(path, body)
        assert status == 400, (body, answer)
        assert answer["error"]["message"]
        assert served.complete(prompt="Once upon a time", max_tokens=4)["choices"] == before


def test_extreme_but_legal_values_are_served(served: Served) -> None:
    for fields in ({"top_k": 49152}, {"top_k": 2**40}, {"top_p": 0}, {"top_k": 0}, {"temperature": 100}, {"seed": -1}):
        assert (
            served.complete(prompt="Once", **{"temperature": 1, "max_tokens": 3, **fields})["usage"][
                "completion_tokens"
            ]
            > 0
        )
    greedy = served.complete(prompt="Once")["choices"][0]["text"]
    assert served.complete(prompt="Once", temperature=1, top_p=0)["choices"][0]["text"] == greedy


@contextlib.contextmanager
def opened(served: Served, body: dict[str, Any]) -> Iterator[None]:
    """A completion that was asked for and is not waited for; leaving the block hangs up."""
    address, text = urlsplit(served.url), json.dumps(body)
    with socket.create_connection((address.hostname, address.port), 30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall((head + text).encode())
        assert eventually(lambda: served.health()["running"] + served.health()["waiting"] == 1)
        yield
    assert eventually(lambda: served.health()["running"] == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(served: Served, stream: bool) -> None:
    with opened(served, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}):
        assert eventually(lambda: served.health()["running"] == 1)


def test_a_short_request_is_not_late_beside_a_long_prompt(served: Served) -> None:
    with opened(served, {"prompt": "word " * 6000, "max_tokens": 1}):
        served.ask("hi", max_tokens=2)
        assert served.health()["running"] == 1, "the long prompt was done first"


def test_sigterm_ends_an_open_stream_and_exits_with_0() -> None:
    server = launch()
    stream = server.client.completions.create(
        model=DEMO, prompt="Once", max_tokens=30, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert stop(server) == 0


def eventually(condition: Any, timeout_s: float = 20) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
