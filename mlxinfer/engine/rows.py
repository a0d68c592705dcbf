"""What the runner keeps of each request, and of the batch that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.engine.logprobs import Logprobs
from mlxinfer.engine.sampling import RowSampling, RowState, Sampler, uniform

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.engine.grammar import CompiledGrammar, Constraint, Pacer
    from mlxinfer.engine.kv import Sequence
    from mlxinfer.engine.padded import SplitBatch
    from mlxinfer.engine.ragged import Batch
    from mlxinfer.engine.steps import DecodeRow, Step
    from mlxinfer.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the runner needs to know of a request before its first step; plain data like Step."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: RowSampling
    seed: int
    cache_key: str = ""
    """Requests share prefixes with others of the same key only: adapter and tenant."""
    logprobs: int | None = None
    """Report how likely each token was, and that many of the likeliest."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, all of which are computed then."""
    adapter: str = ""
    """The name of a registered adapter; empty: the model as it is."""


@dataclass(slots=True)
class Row:
    spec: RowSpec
    state: RowState
    tokens: tuple[int, ...]
    """The prompt, and after a rebuild what had been generated."""
    sequence: Sequence | None = None
    token: mx.array | None = None
    """The token to feed next, [1], not yet read; None means the last of `tokens`."""
    grammar: CompiledGrammar | None = None
    constraint: Constraint | None = None

    @property
    def held(self) -> Sequence:
        assert self.sequence is not None, f"{self.spec.request_id} has not started"
        return self.sequence


@dataclass(slots=True)
class Choice:
    """How logits [B, vocab] of decoding rows become tokens. Where a row has a grammar, the tokens before must have been
    read first: they say what may come."""

    rows: list[Row]
    sampler: Sampler
    uniforms: list[float]
    logits: mx.array
    keep: Callable[[mx.array], None]
    """Takes the tokens [B] to where the next step finds them."""
    constraints: dict[int, Constraint] = field(init=False)

    def __post_init__(self) -> None:
        # These, whatever becomes of the rows until the tokens are read.
        self.constraints = {i: row.constraint for i, row in enumerate(self.rows) if row.constraint is not None}

    def make(self) -> mx.array:
        """The tokens [B], not evaluated."""
        words = -(-self.logits.shape[-1] // 32)
        allowed = {i: constraint.allowed(words) for i, constraint in self.constraints.items()}
        tokens = self.sampler(self.logits, self.uniforms, allowed)
        self.keep(tokens)
        return tokens

    def report(self, tokens: mx.array) -> tuple[list[int], Logprobs] | None:
        """Logprobs of the rows that asked for them, with their indices."""
        rows = [i for i, row in enumerate(self.rows) if row.spec.logprobs is not None]
        if not rows:
            return None
        index = mx.array(rows)
        wanted = [self.rows[i].spec.logprobs or 0 for i in rows]
        return rows, Logprobs.of(self.logits[index], tokens[index], wanted)


@dataclass(slots=True)
class Outputs:
    """What a step gave."""

    tokens: list[int] = field(default_factory=list[int])
    """One per decode row."""
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set[str])
    """Requests whose grammar lets nothing follow."""
    errors: dict[str, str] = field(default_factory=dict[str, str])
    """Requests whose grammar can't be followed any further, and why."""
    prompts: dict[str, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)
    """Of prompts, the position of the first and the tokens' logprobs."""


@dataclass(slots=True)
class Launched:
    """A step whose graph is built. `tokens` [rows] may still be computing; `marker` is ready when a chunk is."""

    step: Step
    choice: Choice | None = None
    marker: mx.array | None = None
    unsubmitted: list[list[mx.array]] = field(default_factory=list)
    """What the step has to compute, in the order in which it is of use, until that is submitted."""
    prompts: list[tuple[str, int, Logprobs]] = field(default_factory=list)
    pacer: Pacer | None = None
    """Takes the grammars on by the tokens that were read."""
    tokens: mx.array | None = None
    logprobs: tuple[list[int], Logprobs] | None = None
    _chosen: list[int] | None = None

    @property
    def guided(self) -> bool:
        """Whether grammars have to follow its tokens, which takes a while."""
        return self.choice is not None and bool(self.choice.constraints)

    def choose(self) -> None:
        """Build the sampling, once what it depends on is known."""
        if self.choice is None or self.tokens is not None:
            return
        self.tokens = self.choice.make()
        self.unsubmitted.append([self.tokens])
        self.logprobs = self.choice.report(self.tokens)
        if self.logprobs is not None:
            self.unsubmitted.append(self.logprobs[1].arrays())

    def submit(self) -> None:
        """Let it compute."""
        groups, self.unsubmitted = self.unsubmitted, []
        for arrays in groups:
            mx.async_eval(arrays)

    def wait(self) -> None:
        """Until it has been computed. A prompt's last chunk too: submitted whole, no cancel or arrival could come
        between."""
        self.submit()
        ready = self.marker if self.tokens is None else self.tokens
        if ready is not None:
            mx.eval(ready)

    def follow(self) -> None:
        """Wait for the step, and let the grammars begin to follow its tokens."""
        self.choose()
        self.wait()
        if self._chosen is not None or self.tokens is None or self.choice is None:
            return
        chosen: list[int] = self.tokens.tolist()  # pyright: ignore[reportAssignmentType]
        self._chosen = chosen
        if self.choice.constraints and self.pacer is not None:
            self.pacer.start([(constraint, [chosen[i]]) for i, constraint in self.choice.constraints.items()])

    def read(self) -> Outputs:
        """Wait for the step. Rows with a grammar are a token further in it then."""
        self.follow()
        out = Outputs()
        for name, start, logprobs in self.prompts:
            out.prompts[name] = start, logprobs.read()
        if self._chosen is None or self.choice is None:
            return out
        out.tokens = self._chosen
        constraints = self.choice.constraints
        if constraints and self.pacer is not None:
            self.pacer.finish()
        for i, constraint in constraints.items():
            name = self.step.decode[i].request_id
            if constraint.error is not None:
                out.errors[name] = constraint.error
            elif constraint.complete:
                out.complete.add(name)
        if self.logprobs is not None:
            names = [self.step.decode[i].request_id for i in self.logprobs[0]]
            out.logprobs = dict(zip(names, self.logprobs[1].read(), strict=True))
        return out


@dataclass(slots=True)
class Decoding:
    """The batch of the last decode step, kept while the same rows decode."""

    ids: tuple[str, ...]
    rows: list[Row]
    sampler: Sampler
    batch: Batch | SplitBatch | None = None
    tokens: mx.array | None = field(default=None)


def uniforms(rows: list[Row], decode: tuple[DecodeRow, ...]) -> list[float]:
    """One random number per row; greedy rows need none."""
    return [
        0.0 if row.state.sampling.greedy else uniform(row.spec.seed, r.position)
        for row, r in zip(rows, decode, strict=True)
    ]
