"""Structured output: grammars compiled by llguidance on the caller's thread, and a request's place in its grammar.

Compiling is bounded by the grammar's size and depth, by llguidance's own limits, and by time. Nothing here is an array:
a constraint gives the bits of the tokens that may come next (sampling.py applies them).
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from mlxinfer.engine.aside import Aside
from mlxinfer.errors import InvalidRequestError, QueueFullError, UnsupportedModelError
from mlxinfer.tokenizer.schemas import for_grammar

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
STEP_S = 0.3
"""What the constraints of a step may take together before one of them fails …"""
HURRY_S = 0.05
"""… and then those behind it, and all that come …"""
WARY_S = 10.0
"""… for so long."""
TOKEN_S = 0.02
SPARE_S = 1.0
"""What one may take in all: so much a token, and this."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 200_000,
    "max_lexer_states": 50_000,
    "step_max_items": 5_000,
}
"""Below llguidance's defaults where those would take seconds or hundreds of megabytes."""
MAX_MESSAGE = 400


class Constraint:
    """One request's place in its grammar: which tokens may come next."""

    __slots__ = ("_bits", "_matcher", "_spent", "_tokens", "complete", "error", "grammar")

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher | None, bits: bytes) -> None:
        self.grammar = grammar
        self._matcher = matcher
        self._bits = bits
        self._spent = 0.0
        self._tokens = 0
        self.complete = False
        """Nothing can follow."""
        self.error: str | None = None
        """Why the text so far cannot be continued; a limit was hit."""

    def allowed(self, words: int) -> bytes:
        """One bit per token that may come next, in `words` words of 32 bits, the lowest first."""
        if self.complete or self.error is not None:
            # What is sampled is thrown away: the request has ended, or fails.
            return b"\xff" * (4 * words)
        return self._bits[: 4 * words].ljust(4 * words, b"\0")

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that were sampled, and find what may follow. How long that takes nobody knows before."""
        if self.complete or self.error is not None:
            return
        if self._matcher is None or self.grammar.stuck:
            # All of a grammar's matchers wait for each other.
            self.abandon()
            return
        start = time.perf_counter()
        if not self._matcher.consume_tokens(list(tokens)):
            self._fail(self._matcher)
        elif self._matcher.is_stopped():
            self.complete = True
        else:
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._fail(self._matcher)
            self._bits = bits
        self._tokens += len(tokens)
        self._spent += time.perf_counter() - start
        if self._spent > SPARE_S + TOKEN_S * self._tokens:
            self.abandon()

    def abandon(self) -> None:
        """It takes too long for the others."""
        self.error = f"it takes longer than {1000 * TOKEN_S:g} ms a token"

    def give_way(self) -> None:
        """Others take too long already; one that has only begun is not followed."""
        if not self._tokens:
            self.error = "other grammars take all the time there is; try again later"

    def _fail(self, matcher: LLMatcher) -> None:
        self.error = _one_line(matcher.get_error()) or "no token can follow"


Moves = list[tuple[Constraint, "Sequence[int]"]]
"""Constraints, and the tokens to take each of them on by."""


class Pacer:
    """Takes the constraints of a step on, aside: one that takes too long fails its own request and holds nobody up."""

    def __init__(self) -> None:
        self._aside = Aside()
        self._walk: _Walk | None = None
        self._done = threading.Event()
        self._until = 0.0
        self._wary_until = 0.0

    def start(self, moves: Moves) -> None:
        """Begin to take each on by its tokens; nothing may ask them before `finish`. From the MLX thread."""
        self.finish()
        if self._aside.full:
            for constraint, _ in moves:
                constraint.give_way()
        self._begin(moves, HURRY_S if time.perf_counter() < self._wary_until else STEP_S)

    def finish(self) -> None:
        """Wait for what was started, as long as that may take."""
        while self._walk is not None:
            walk, self._walk = self._walk, None
            if not self._aside.wait(self._done, max(0.0, self._until - time.perf_counter())):
                # The one it stands at is left to that thread.
                self._wary_until = time.perf_counter() + WARY_S
                self._begin(walk.cut(self._done), HURRY_S)

    def advance(self, moves: Moves) -> None:
        """`start` and `finish`."""
        self.start(moves)
        self.finish()

    def _begin(self, moves: Moves, seconds: float) -> None:
        if moves:
            self._walk = _Walk(moves)
            self._until = time.perf_counter() + seconds
            self._done = self._aside.start(self._walk.run)

    def close(self) -> None:
        """Let its thread go."""
        self._aside.close()


class _Walk:
    """One after the other, until it is cut off by another thread."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._lock = threading.Lock()
        self._begun = 0
        self._ended = 0
        self._cut = False

    def run(self) -> None:
        for constraint, tokens in self._moves:
            with self._lock:
                if self._cut:
                    return
                self._begun += 1
            constraint.advance(tokens)
            with self._lock:
                self._ended += 1

    def cut(self, end: threading.Event) -> Moves:
        """Give up the one that is under way until `end` is set; those that haven't begun."""
        with self._lock:
            self._cut = True
            if self._begun > self._ended:
                constraint = self._moves[self._ended][0]
                constraint.grammar.stands_until(end)
                constraint.abandon()
            return self._moves[self._begun :]


class CompiledGrammar:
    """A grammar that is ready for use by any number of requests."""

    def __init__(self, matcher: LLMatcher, bits: bytes, source: Grammar) -> None:
        self.source = source
        self._matcher = matcher
        self._bits = bits
        self._stands: threading.Event | None = None

    @property
    def stuck(self) -> bool:
        """A constraint of it was given up and still computes: whatever else is done with it would wait for that."""
        return self._stands is not None and not self._stands.is_set()

    def stands_until(self, end: threading.Event) -> None:
        """A constraint of it was given up, and computes until then."""
        self._stands = end

    def begin(self) -> Constraint:
        """A constraint at the beginning of it; one that fails at once where it is stuck."""
        return Constraint(self, None if self.stuck else self._matcher.deep_copy(), self._bits)


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
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                if found.stuck:
                    message = f"the {grammar.kind} grammar takes too long a token; make it simpler"
                    raise InvalidRequestError(message, param="grammar")
                return found
        vocabulary, source = self._words(), _source(grammar)
        matcher, bits = self._bounded(vocabulary, source)
        if bits is None:
            raise InvalidRequestError(
                f"the {grammar.kind} grammar cannot be used: {_one_line(matcher.get_error())}", param="grammar"
            )
        if not any(bits):
            raise InvalidRequestError(f"the {grammar.kind} grammar allows no text", param="grammar")
        compiled = CompiledGrammar(matcher, bits, grammar)
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

    def _bounded(self, vocabulary: LLTokenizer, source: str) -> tuple[LLMatcher, bytes | None]:
        """Compile on a thread of its own, which nothing can stop, and stop waiting for it in time.

        With the bits of the tokens that may come first; None: the matcher has the error.
        """
        made: list[tuple[LLMatcher, bytes | None]] = []
        done = threading.Event()

        def run() -> None:
            try:
                matcher = _matcher(vocabulary, source)
                first = matcher.deep_copy()
                bits = None if matcher.is_error() else first.compute_bitmask()
                made.append((first, None) if first.is_error() else (matcher, bits))
            finally:
                self._places.release()
                done.set()

        if not self._places.acquire(timeout=COMPILE_S):
            raise QueueFullError(
                f"{COMPILERS} grammars are being compiled that take longer than {COMPILE_S:g} s", retry_after=COMPILE_S
            )
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

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in _choices(grammar.text)))
    schema = {"type": "object"} if grammar.kind == "json_object" else _json(grammar.text, "the JSON schema")
    if schema is False or not isinstance(schema, dict | bool):
        raise InvalidRequestError("the JSON schema must be an object that something can satisfy", param="grammar")
    return LLMatcher.grammar_from_json_schema(json.dumps(for_grammar(schema)))


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
