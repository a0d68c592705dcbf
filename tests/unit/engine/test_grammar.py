"""Structured output: what a grammar lets through, alone and in a batch, and what is refused."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import TYPE_CHECKING

import jsonschema
import pytest

import mlxinfer
from mlxinfer import InvalidRequestError
from mlxinfer.engine import grammar as module
from mlxinfer.engine.grammar import Constraint, Grammars
from mlxinfer.types import Grammar, SamplingParams
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlxinfer import LLM

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}
PERSON = Grammar("json_schema", json.dumps(SCHEMA))
CODE = Grammar("regex", "[a-c]{3}-[0-9]{2}")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")
    with mlxinfer.load(str(folder), max_num_seqs=8) as model:
        yield model


@pytest.mark.parametrize("seed", range(8))
def test_what_a_random_model_writes_obeys_the_schema(llm: LLM, seed: int) -> None:
    reply = llm.chat("hello", grammar=PERSON, max_tokens=300, temperature=1.5, seed=seed)
    assert reply.finish_reason == "stop"
    jsonschema.validate(json.loads(reply), SCHEMA)


def test_each_kind_of_grammar_holds(llm: LLM) -> None:
    def one(kind: str, text: str) -> str:
        reply = llm.chat("hello", grammar=Grammar(kind, text), max_tokens=400, temperature=1, seed=1)  # pyright: ignore[reportArgumentType]
        assert reply.finish_reason == "stop"
        return reply

    assert re.fullmatch(CODE.text, one("regex", CODE.text))
    assert re.fullmatch("a[0-9]{1,4}!", one("lark", 'start: "a" number "!"\nnumber: /[0-9]{1,4}/'))
    odd = ['say "yes"', "back\\slash", "ümlaut", "a"]
    assert one("choice", json.dumps(odd)) in odd
    assert isinstance(json.loads(one("json_schema", "true")), str | int | float | bool | list | dict | None)


def test_a_reply_that_is_cut_by_its_length_says_so(llm: LLM) -> None:
    reply = llm.chat("hello", grammar=PERSON, max_tokens=2, temperature=1, seed=1)
    assert reply.finish_reason == "length"


def test_the_same_reply_alone_and_beside_others_who_do_not_notice(llm: LLM) -> None:
    def start(seed: int, grammar: Grammar | None) -> mlxinfer.llm.Generation:
        params = SamplingParams(max_tokens=60, temperature=1, seed=seed, grammar=grammar, ignore_eos=True)
        return llm.submit(llm.prompt_ids(f"hello {seed}"), params)

    kinds = [(s, (None, PERSON, CODE)[s % 3]) for s in range(6)]
    alone = [str(start(*kind).result()) for kind in kinds]
    together = [g.result() for g in [start(*kind) for kind in kinds]]
    assert [str(r) for r in together] == alone
    assert together[0].usage.completion_tokens == 60
    assert re.fullmatch(CODE.text, together[2])


def test_a_grammar_ends_the_reply_even_where_end_tokens_are_ignored(llm: LLM) -> None:
    assert re.fullmatch(CODE.text, llm.chat("hello", grammar=CODE, max_tokens=50, ignore_eos=True, temperature=0))


def test_bias_and_penalties_do_not_lead_out_of_a_grammar(llm: LLM) -> None:
    bias = dict.fromkeys(range(0, llm.info.vocab_size, 2), 100.0)
    bias = dict(list(bias.items())[:1000])
    reply = llm.chat("hello", grammar=CODE, max_tokens=50, temperature=0, logit_bias=bias, repetition_penalty=5)
    assert re.fullmatch(CODE.text, reply)


def test_a_request_that_lost_its_row_goes_on_in_its_grammar(llm: LLM) -> None:
    long = Grammar("regex", "[ab]{40}c")
    params = SamplingParams(max_tokens=80, temperature=1, seed=5, grammar=long)
    ids = llm.prompt_ids("hello")
    expected = str(llm.submit(ids, params).result())
    engine, seen = llm._engine, threading.Event()
    generation = llm.submit(ids, params)

    def take_away() -> None:
        for name in list(engine.state.started):
            engine.state.preempt(name)
        seen.set()

    text = ""
    for delta in generation:
        text += delta.text
        if len(text) > 5 and not seen.is_set():
            engine.thread.call(take_away)
    assert seen.is_set()
    assert text == expected
    assert re.fullmatch(long.text, text)


def test_a_step_that_fails_leaves_the_grammar_where_it_was(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=80, temperature=1, seed=6, grammar=Grammar("regex", "[ab]{30}c"))
    expected = str(llm.submit(llm.prompt_ids("hello"), params).result())
    launch, left = llm._engine.runner.launch, [12]

    def failing(step):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("planted")
        return launch(step)

    monkeypatch.setattr(llm._engine.runner, "launch", failing)
    assert str(llm.submit(llm.prompt_ids("hello"), params).result()) == expected
    assert left[0] < 0


def test_a_grammar_that_breaks_on_the_way_fails_its_own_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """What llguidance does when a limit is hit: an error state that it never leaves."""

        def __init__(self, matcher) -> None:
            self.matcher, self.left = matcher, 3

        def consume_tokens(self, tokens: list[int]) -> bool:
            self.left -= 1
            return self.left > 0 and self.matcher.consume_tokens(tokens)

        def get_error(self) -> str:
            return "LexerTooComplex\n<state> internals"

        def __getattr__(self, name: str):
            return getattr(self.matcher, name)

    compiled = llm.compile(CODE)
    monkeypatch.setattr(
        compiled, "begin", lambda: Constraint(compiled, Failing(compiled._matcher.deep_copy()), compiled._bits)
    )  # pyright: ignore[reportArgumentType]
    greedy = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    expected = llm.submit(llm.prompt_ids("hello"), greedy).result()
    other = llm.submit(llm.prompt_ids("hello"), greedy)
    with pytest.raises(InvalidRequestError, match=r"followed any further: LexerTooComplex$") as caught:
        llm.chat("hello", grammar=CODE, max_tokens=40, temperature=1)
    assert caught.value.param == "grammar"
    assert other.result() == expected
    monkeypatch.undo()
    assert re.fullmatch(CODE.text, llm.chat("hello", grammar=CODE, max_tokens=50, temperature=0))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "([", "regex parse error"),
        ("regex", "(?=x)y", "look-around"),
        ("lark", "start: nope", "nope"),
        ("json_schema", '{"type": "nope"}', "nope"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "false", "satisfy"),
        ("json_schema", "[]", "object"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"allOf": [' * 70 + "{}" + "]}" * 70, "64 deep"),
        ("json_schema", "[" * 60_000, "not JSON"),
        ("choice", "[]", "list of strings"),
        ("choice", '[""]', "empty"),
        ("choice", json.dumps(["x"] * 2000), "2000 choices"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_before_any_work(llm: LLM, kind: str, text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        llm.chat("hello", grammar=Grammar(kind, text), max_tokens=4)  # pyright: ignore[reportArgumentType]
    assert caught.value.param == "grammar"


def test_a_grammar_has_a_limit_of_size_and_a_known_kind() -> None:
    with pytest.raises(InvalidRequestError, match="65,537 bytes"):
        Grammar("regex", "a" * 65_537)
    with pytest.raises(InvalidRequestError, match="'xml'"):
        Grammar("xml")  # pyright: ignore[reportArgumentType]


def test_a_good_grammar_is_not_harmed_by_a_bad_one_between(llm: LLM) -> None:
    for grammar, good in ((CODE, True), (Grammar("regex", "(["), False), (CODE, True)):
        if good:
            assert re.fullmatch(CODE.text, llm.chat("hello", grammar=grammar, max_tokens=50, temperature=0))
        else:
            with pytest.raises(InvalidRequestError):
                llm.chat("hello", grammar=grammar, max_tokens=5)


def test_one_that_takes_too_long_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 0.05)
    started = threading.Event()

    class Slow:
        def __init__(self, *_: object, **__: object) -> None:
            started.set()
            time.sleep(1)

        def deep_copy(self) -> Slow:
            return self

        def is_error(self) -> bool:
            return True

    grammars = Grammars(llm.tokenizer, llm.info.vocab_size)
    grammars.compile(CODE)
    monkeypatch.setattr(module, "_matcher", Slow)
    with pytest.raises(InvalidRequestError, match="longer than"):
        grammars.compile(Grammar("regex", "slow"))
    assert started.is_set()


def slow(n: int) -> Grammar:
    """Ambiguous to the utmost: llguidance's work for one token is seconds."""
    parts = " | ".join(f"/[a-z]{{1,{i + 20}}}/ x" for i in range(n))
    return Grammar("lark", f'start: "go" x\nx: {parts} | "z"')


def test_a_grammar_that_takes_seconds_a_token_holds_nobody_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.1)
    monkeypatch.setitem(module.LIMITS, "step_max_items", 50_000)
    ids = llm.prompt_ids("hello")
    others = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    alone = llm.submit(ids, others).result()
    heavy = llm.submit(ids, SamplingParams(max_tokens=12, temperature=1, seed=1, grammar=slow(300)))
    light = llm.submit(ids, SamplingParams(max_tokens=60, temperature=1, seed=1, grammar=CODE))
    gaps, last = [], time.monotonic()
    for _ in llm.submit(ids, others):
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    with pytest.raises(InvalidRequestError, match="longer than"):
        heavy.result()
    assert max(gaps) < 2.0  # the grammar alone would take minutes
    assert re.fullmatch(CODE.text, light.result())
    assert llm.submit(ids, others).result() == alone


def test_one_after_the_other_until_it_is_cut_off() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Constraint:
        def __init__(self, wait: bool = False) -> None:
            self.wait, self.moved, self.given_up = wait, 0, False
            self.grammar = module.CompiledGrammar(None, b"", Grammar("json_object"))  # pyright: ignore[reportArgumentType]

        def advance(self, tokens: list[int]) -> None:
            self.moved += 1
            if self.wait:
                begun.set()
                go_on.wait(10)

        def abandon(self) -> None:
            self.given_up = True

    moves = [(Constraint(wait=i == 1), [i]) for i in range(4)]
    walk = module._Walk(moves)  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=walk.run)
    thread.start()
    assert begun.wait(10)
    end = threading.Event()
    assert walk.cut(end) == moves[2:]
    assert [m.grammar.stuck for m, _ in moves] == [False, True, False, False]
    # Nothing else touches it meanwhile.
    assert moves[1][0].grammar.begin().grammar is moves[1][0].grammar
    end.set()
    assert not moves[1][0].grammar.stuck
    go_on.set()
    thread.join()
    assert [m.moved for m, _ in moves] == [1, 1, 0, 0]
    assert [m.given_up for m, _ in moves] == [False, True, False, False]


def test_after_one_that_took_too_long_the_next_get_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.5)
    go_on = threading.Event()

    class Endless(module.Constraint):
        def advance(self, tokens: Sequence[int]) -> None:
            go_on.wait(30)

    def taken() -> float:
        constraint = Endless(module.CompiledGrammar(None, b"", Grammar("json_object")), None, b"")  # pyright: ignore[reportArgumentType]
        begun = time.monotonic()
        pacer.advance([(constraint, [1])])
        assert constraint.error is not None
        return time.monotonic() - begun

    pacer = module.Pacer()
    first, second = taken(), taken()
    go_on.set()
    pacer.close()
    assert first >= 0.5 > second


def test_compiled_grammars_are_kept_but_not_without_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED", 2)
    grammars = Grammars(llm.tokenizer, llm.info.vocab_size)
    made = [grammars.compile(Grammar("regex", f"x{{{n}}}")) for n in (1, 2)]
    assert grammars.compile(Grammar("regex", "x{1}")) is made[0]
    grammars.compile(Grammar("regex", "x{3}"))
    assert grammars.compile(Grammar("regex", "x{1}")) is made[0]
    assert grammars.compile(Grammar("regex", "x{2}")) is not made[1]
