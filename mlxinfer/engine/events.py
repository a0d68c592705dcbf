"""What goes into an engine and what comes out of it, and the record of a request that is open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxinfer.errors import EngineError
from mlxinfer.types import FinishReason, Timings, Usage

if TYPE_CHECKING:
    from mlxinfer.engine.grammar import CompiledGrammar
    from mlxinfer.engine.rows import RowSpec
    from mlxinfer.errors import MlxinferError
    from mlxinfer.types import TokenLogprob

log = logging.getLogger(__name__)


class RowsLostError(EngineError):
    """What the rows held is gone, and no request is to blame: all go on from their tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request."""

    spec: RowSpec
    max_tokens: int
    eos_token_ids: frozenset[int]
    priority: int = 0
    boundaries: tuple[int, ...] = ()
    """Positions in the prompt where a message begins; models with windows or states remember these."""
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What a sink receives. A request's last event, and only that, has `finished` or `error`."""

    token: int | None = None
    finished: FinishReason | None = None
    error: MlxinferError | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    logprob: TokenLogprob | None = None
    """Of `token`, when it was asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """With the first token, when asked for: of the prompt's tokens; None for the first, which follows none."""


Sink = Callable[[Event], None]


@dataclass(slots=True)
class Open:
    request: Request
    sink: Sink
    submitted: float
    started: float = 0.0
    first_token: float = 0.0
    tokens: int = 0
    cached: int = 0
    """Prompt tokens that another request had computed."""
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """By position, those that were computed."""

    def take_prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        """The prompt's logprobs, once, when they were asked for."""
        spec = self.request.spec
        if spec.prompt_logprobs is None or self.tokens > 1:
            return None
        found, self.prompt_logprobs = self.prompt_logprobs, {}
        return tuple(found.get(i) for i in range(len(spec.prompt_token_ids)))


def sent(opened: Open, event: Event) -> bool:
    """Hand an event over; False when the sink raised, whatever it was: one consumer must not harm the others."""
    try:
        opened.sink(event)
    except Exception as error:  # noqa: BLE001 - the worker's edge
        log.warning("the consumer of %s is gone: %s: %s", opened.request.spec.request_id, type(error).__name__, error)
        return False
    return True


def timings_of(o: Open) -> Timings:
    now = time.perf_counter()
    if not o.tokens:
        return Timings(queue_s=(o.started or now) - o.submitted, total_s=now - o.submitted)
    prefill = o.first_token - o.started
    decode = now - o.first_token
    return Timings(
        queue_s=o.started - o.submitted,
        ttft_s=o.first_token - o.submitted,
        total_s=now - o.submitted,
        prefill_tok_s=(len(o.request.spec.prompt_token_ids) - o.cached) / prefill if prefill > 0 else 0.0,
        decode_tok_s=(o.tokens - 1) / decode if decode > 0 and o.tokens > 1 else 0.0,
    )
