"""Log probabilities of replies and of echoed prompts, in the shapes of both completions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.server.openai import text
from mlxinfer.server.openai.logprobs import TokenTexts, finite
from mlxinfer.server.openai.textanswer import offsets
from mlxinfer.server.reader import LogprobsPart, Reader
from mlxinfer.tokenizer.replies import TextPart
from mlxinfer.types import Delta, TokenLogprob
from tests.unit.server.fake import logprob_of
from tests.unit.server.test_completions import CHAT, HELLO, TEXT, events, post

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from tests.unit.server.fake import FakeLLM
    from tests.unit.server.fake_format import FakeFormat


def ids_of(llm: FakeLLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("top", [None, 0, 3])
def test_a_chat_reports_each_token_with_its_bytes_and_alternatives(
    client: TestClient, llm: FakeLLM, top: int | None
) -> None:
    llm.says = ["a", "b", "c"]
    choice = post(client, CHAT, messages=HELLO, logprobs=True, top_logprobs=top)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [t["token"] for t in content] == ["a", "b", "c"]
    assert [bytes(t["bytes"]) for t in content] == [b"a", b"b", b"c"]
    assert [t["logprob"] for t in content] == [logprob_of(ids_of(llm, c)[0], 0).logprob for c in "abc"]
    assert [len(t["top_logprobs"]) for t in content] == [top or 0] * 3
    assert llm.made[-1].params.logprobs == (top or 0)


def test_a_streamed_chat_has_the_same_log_probabilities_beside_their_text(client: TestClient, llm: FakeLLM) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    whole = post(client, CHAT, **fields)["choices"][0]
    chunks = [c["choices"][0] for c in events(client.post(CHAT, json=fields | {"stream": True}).text)[:-1]]
    with_text = [c for c in chunks if c["delta"].get("content")]
    assert all(c["logprobs"] for c in with_text)
    found = [t for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]]
    assert found == whole["logprobs"]["content"]
    assert [t["token"] for c in with_text for t in c["logprobs"]["content"]] == [
        c["delta"]["content"] for c in with_text
    ]


def test_reasoning_and_calls_have_no_log_probabilities(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = ["r:hm", "-:", "answer", "-:"]
    choice = post(client, CHAT, messages=HELLO, logprobs=True)["choices"][0]
    # The tokens that gave no text of their own go with the text beside them.
    assert [t["token"] for t in choice["logprobs"]["content"]] == ["-", "an", "-"]
    llm.says = ["r:hm", "-:"]
    assert post(client, CHAT, messages=HELLO, logprobs=True)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("says", "tokens"),
    [
        (["a", "x", "q", "b"], ["a", "x", "q", "b"]),  # "x" waits: it might have begun the stop string
        (["a", "b", "xyz", "q", "r"], ["a", "b", "x"]),  # the fake gives a piece's first token
        (["a", "x", "yz", "q", "r"], ["a", "x", "y"]),
        (["r:xyz", "a", "x"], ["a", "x"]),
    ],
)
def test_a_stop_string_loses_no_log_probability_before_it_and_none_comes_behind_it(
    client: TestClient, llm: FakeLLM, form: FakeFormat, says: list[str], tokens: list[str]
) -> None:
    llm.says = says
    fields: dict[str, Any] = {"messages": HELLO, "logprobs": True, "stop": "xyz"}
    whole = post(client, CHAT, **fields)["choices"][0]
    chunks = [c["choices"][0] for c in events(client.post(CHAT, json=fields | {"stream": True}).text)[:-1]]
    assert [t["token"] for t in whole["logprobs"]["content"]] == tokens
    assert [t["token"] for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]] == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_made_behind_a_stop_string_are_not_in_the_usage(
    client: TestClient, llm: FakeLLM, form: FakeFormat, stream: bool
) -> None:
    llm.says = ["a", "xyz", *["q"] * 20]
    body = {"messages": HELLO, "stop": "xyz", "stream": stream, "stream_options": {"include_usage": True}}
    answer = client.post(CHAT, json=body)
    usage = events(answer.text)[-2]["usage"] if stream else answer.json()["usage"]
    assert usage["completion_tokens"] == 2


class _Hoarder:
    """A parser that lets go of all its text at a "!"."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[TextPart]:
        self._text += text
        return [TextPart(self._text)] if text == "!" else []


def test_tokens_behind_a_stop_string_that_the_parser_held_back_with_it_are_left_out() -> None:
    prepared: Any = SimpleNamespace(parser=_Hoarder, one_call=False, only_calls=False, stop=("st",))
    reader = Reader(prepared)
    parts = [
        part
        for i, text in enumerate(["a", "s", "t", "b", "", "cd", "!"])
        for part in reader.read(Delta(text=text, token_ids=(i,), logprobs=(TokenLogprob(i, -1.0, ()),)))
    ]
    logprobs, text = parts
    assert text == TextPart("a")
    assert isinstance(logprobs, LogprobsPart)
    assert [token.token_id for token in logprobs.tokens] == [0, 1, 2]


def test_without_being_asked_for_there_are_none(client: TestClient, llm: FakeLLM) -> None:
    for fields in ({}, {"logprobs": None}, {"logprobs": False, "top_logprobs": 0}):
        assert post(client, CHAT, messages=HELLO, **fields)["choices"][0]["logprobs"] is None
        assert llm.made[-1].params.logprobs is None
    assert post(client, TEXT, prompt="ab")["choices"][0]["logprobs"] is None


def test_the_harness_gets_the_prompts_log_probabilities(client: TestClient, llm: FakeLLM) -> None:
    # As lm-evaluation-harness's local-completions asks: token ids, one token more, the likeliest beside each.
    prompts = [ids_of(llm, "qxzjk"), ids_of(llm, "hi 🙂")]
    answer = post(
        client, TEXT, prompt=prompts, echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234, model="tiny"
    )
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    for choice, ids, wanted in zip(answer["choices"], prompts, ["qxzjk", "hi 🙂"], strict=True):
        found = choice["logprobs"]
        assert choice["text"].startswith(wanted)
        assert len(choice["text"]) == len(wanted) + 1
        assert len(found["tokens"]) == len(ids) + 1
        assert found["token_logprobs"][: len(ids)] == [None, *(logprob_of(i, 0).logprob for i in ids[1:])]
        assert found["top_logprobs"][0] is None
        assert [max(top.values()) for top in found["top_logprobs"][1:]] == found["token_logprobs"][1:]
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert [g.options["prompt_logprobs"] for g in llm.made[-2:]] == [1, 1]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_streamed_echo_adds_up_to_the_whole(client: TestClient, llm: FakeLLM) -> None:
    fields: dict[str, Any] = {"prompt": ["hello", "you"], "echo": True, "logprobs": 2, "max_tokens": 3}
    whole = post(client, TEXT, **fields)["choices"]
    chunks = events(client.post(TEXT, json=fields | {"stream": True}).text)[:-1]
    for want in whole:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == want["index"]]
        assert "".join(c["text"] for c in own) == want["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [v for c in own for v in c["logprobs"][name]] == want["logprobs"][name]


def test_only_the_prompt_is_echoed_where_no_tokens_are_wanted(client: TestClient, llm: FakeLLM) -> None:
    answer = post(client, TEXT, prompt="qxzjk", echo=True, max_tokens=0, logprobs=1)
    assert answer["usage"]["completion_tokens"] == 0
    choice = answer["choices"][0]
    assert choice["text"] == "qxzjk"
    assert len(choice["logprobs"]["tokens"]) == 5
    assert llm.made[-1].params.max_tokens == 1
    assert client.post(TEXT, json={"prompt": "hello", "max_tokens": 0}).status_code == 400


def test_an_echo_without_log_probabilities_is_the_prompt_and_what_follows(client: TestClient, llm: FakeLLM) -> None:
    plain = post(client, TEXT, prompt="hello", seed=1)["choices"][0]["text"]
    choice = post(client, TEXT, prompt="hello", seed=1, echo=True)["choices"][0]
    assert choice["text"] == "hello" + plain
    assert "prompt_logprobs" not in llm.made[-1].options


def test_a_token_that_is_part_of_a_character_has_its_own_bytes(llm: FakeLLM) -> None:
    texts = TokenTexts(llm.tokenizer)
    found = [texts(token) for token in ids_of(llm, " é🙂")]
    assert b"".join(raw for _, raw in found) == " é🙂".encode()
    assert found[0] == (" ", b" ")
    assert texts(10**6) == ("", b"")


def test_an_impossible_token_has_a_number_that_json_can_write() -> None:
    assert finite(float("-inf")) == -9999.0
    assert finite(float("nan")) == -9999.0
    assert finite(-0.5) == -0.5


def test_offsets_count_characters_and_skip_what_is_not_in_the_text() -> None:
    raw = "é🙂".encode()
    assert offsets("aé🙂b", [b"<s>", b"a", raw[:1], raw[1:], b"b"]) == [0, 0, 1, 2, 3]


def test_more_log_probabilities_than_one_answer_holds_are_a_400(
    client: TestClient, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "MAX_SCORES", 30)
    body: dict[str, Any] = {"prompt": [[1] * 5, [2] * 5], "echo": True, "logprobs": 2, "max_tokens": 1}
    post(client, TEXT, **body)
    answer = client.post(TEXT, json=body | {"logprobs": 3})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    # Without the prompt's own there is no limit but the text's.
    post(client, TEXT, **body | {"logprobs": 3, "echo": False})
