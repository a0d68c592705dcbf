"""Structured output: grammars compiled by llguidance on the caller's thread, and a request's place in its grammar.

Compiling is bounded by the grammar's size and depth, by llguidance's own limits, and by time. Nothing here is an array:
a constraint gives the bits of the tokens that may come next (sampling.py applies them).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from mlxinfer.engine.unions import without_one_of
from mlxinfer.errors import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher, LLTokenizer

    from mlxinfer.tokenizer import Tokenizer
    from mlxinfer.types import Grammar

COMPILE_S = 5.0
COMPILERS = 4
"""Grammars that may be compiled at once; one that takes too long keeps its place until it is done."""
MAX_DEPTH = 64
MAX_CHOICES = 1024
CACHED = 64
"""Compiled grammars that are kept."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the parts of JSON: room for a line's indentation, and an end for models that would go on forever."""
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "max_grammar_size": 200_000, "max_lexer_states": 50_000}
"""Below llguidance's defaults where those would take seconds or hundreds of megabytes."""
MAX_MESSAGE = 400


class Constraint:
    """One request's place in its grammar. On the MLX thread."""

    __slots__ = ("_matcher", "complete", "error")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.complete = False
        """Nothing can follow."""
        self.error: str | None = None
        """Why the text so far cannot be continued; a limit was hit."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that were sampled."""
        if self.complete or self.error is not None:
            return
        if not self._matcher.consume_tokens(list(tokens)):
            self._fail()
        elif self._matcher.is_stopped():
            self.complete = True

    def allowed(self, words: int) -> bytes:
        """One bit per token that may come next, in `words` words of 32 bits, the lowest first."""
        bits = b""
        if not self.complete and self.error is None:
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._fail()
        if self.complete or self.error is not None:
            # What is sampled is thrown away: the request has ended, or fails.
            return b"\xff" * (4 * words)
        return bits[: 4 * words].ljust(4 * words, b"\0")

    def _fail(self) -> None:
        self.error = _one_line(self._matcher.get_error()) or "the grammar cannot be followed"


class CompiledGrammar:
    """A grammar that is ready for use by any number of requests."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def begin(self, output: Sequence[int] = ()) -> Constraint:
        """A constraint after the tokens `output` of it."""
        constraint = Constraint(self._matcher.deep_copy())
        if output:
            constraint.advance(output)
        return constraint


class Grammars:
    """Compiles the grammars of one model. Thread-safe; not for the MLX thread or an event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._places = threading.BoundedSemaphore(COMPILERS)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar, compiled or found. Raises InvalidRequestError for one that is wrong, or takes too long."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        vocabulary, source = self._words(), _source(grammar)
        matcher = self._bounded(vocabulary, source)
        if matcher.is_error():
            raise InvalidRequestError(
                f"the {grammar.kind} grammar cannot be used: {_one_line(matcher.get_error())}", param="grammar"
            )
        compiled = CompiledGrammar(matcher)
        first = compiled.begin()
        # Limits are hit here rather than on the MLX thread, and a grammar without a sentence is found out.
        if not any(first.allowed(-(-self._vocab_size // 32))) or first.error is not None:
            message = f"the {grammar.kind} grammar allows no text: {first.error or 'nothing can come first'}"
            raise InvalidRequestError(message, param="grammar")
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _words(self) -> LLTokenizer:
        """The vocabulary as llguidance wants it; about a second for 128k tokens, once."""
        with self._making:
            if self._vocabulary is None:
                from llguidance import LLTokenizer

                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer.to_json(),
                        n_vocab=self._vocab_size,
                        eos_token=sorted(t for t in self._tokenizer.eos_token_ids if t < self._vocab_size) or None,
                    )
                except ValueError as error:
                    message = f"this model's tokenizer allows no structured output: {_one_line(str(error))}"
                    raise UnsupportedModelError(message) from error
            return self._vocabulary

    def _bounded(self, vocabulary: LLTokenizer, source: str) -> LLMatcher:
        """Compile on a thread of its own, which nothing can stop, and stop waiting for it in time."""
        made: list[LLMatcher] = []
        done = threading.Event()

        def run() -> None:
            try:
                made.append(_matcher(vocabulary, source))
            finally:
                self._places.release()
                done.set()

        if not self._places.acquire(timeout=COMPILE_S):
            message = f"{COMPILERS} grammars are being compiled that take longer than {COMPILE_S:g} s; try again later"
            raise InvalidRequestError(message, param="grammar")
        threading.Thread(target=run, name="mlxinfer-grammar", daemon=True).start()
        if not done.wait(COMPILE_S):
            message = f"the grammar takes longer than {COMPILE_S:g} s to compile; make it simpler"
            raise InvalidRequestError(message, param="grammar")
        if not made:
            raise InvalidRequestError("the grammar cannot be compiled", param="grammar")
        return made[0]


def _matcher(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS))


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "regex" and not grammar.reasoning:
        return LLMatcher.grammar_from_regex(grammar.text)
    lark = grammar.text if grammar.kind == "lark" else f"start: body\n{_body(grammar)}"
    if grammar.reasoning:
        lark = f"start: reasoning body\n{grammar.reasoning}\n{_body(grammar)}"
    return LLMatcher.grammar_from_lark(lark)


def _body(grammar: Grammar) -> str:
    """The Lark rule of a reply."""
    if grammar.kind == "regex":
        # What is escaped stays so; a line's end would end the rule.
        text = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], grammar.text, flags=re.DOTALL)
        return f"body: /{text}/".replace("\n", "\\n")
    if grammar.kind == "choice":
        return "body: " + " | ".join(json.dumps(c) for c in _choices(grammar.text))
    schema = {"type": "object"} if grammar.kind == "json_object" else _json(grammar.text, "the JSON schema")
    if schema is False or not isinstance(schema, dict | bool):
        raise InvalidRequestError("the JSON schema must be an object that something can satisfy", param="grammar")
    schema = {} if schema is True else without_one_of(schema)
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return f"body: %json {json.dumps(schema)}"


def _choices(text: str) -> list[str]:
    choices = _json(text, "the list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise InvalidRequestError("choices must be a list of strings, none of them empty", param="grammar")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(f"there are {len(choices)} choices; at most {MAX_CHOICES}", param="grammar")
    return choices


def _json(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} is not JSON: {_one_line(str(error))}", param="grammar") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [c for v in level if isinstance(v, dict | list) for c in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return value
    raise InvalidRequestError(f"{what} is nested more than {MAX_DEPTH} deep", param="grammar")


def _one_line(text: str) -> str:
    return " ".join(text.split("<state>")[0].split())[:MAX_MESSAGE]
