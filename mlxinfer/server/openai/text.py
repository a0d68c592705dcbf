"""POST /v1/completions: texts, or token ids, continued as they are."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, WithJsonSchema
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.errors import ContextLengthError, InvalidRequestError
from mlxinfer.server.inflight import seeded, submit_all
from mlxinfer.server.openai.fields import TEXTS_OR_IDS, CompletionFields
from mlxinfer.server.openai.respond import read, streamed, whole
from mlxinfer.server.openai.structured import StructuredFields
from mlxinfer.server.openai.textanswer import TextAnswer
from mlxinfer.server.openapi import reads
from mlxinfer.server.prompting import check_grammar
from mlxinfer.server.state import priority_of, state_of
from mlxinfer.types import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.llm import LLM
    from mlxinfer.types import SamplingParams

router = APIRouter()
MAX_CHOICES = 128
"""Prompts times n."""
MAX_SCORES = 1 << 20
"""Log probabilities of prompts in one answer, alternatives included; about 100 MB."""


class CompletionRequest(CompletionFields, StructuredFields):
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
            "service_tier", "store", "user",
        }
    )  # fmt: skip
    off: ClassVar[dict[str, tuple[Any, ...]]] = {"best_of": (1,), "suffix": ("",)}

    prompt: Annotated[Any, WithJsonSchema(TEXTS_OR_IDS)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def task(self) -> TextTask:
        """Raises InvalidRequestError."""
        limit = self.max_tokens
        if limit == 0 and self.echo:
            # Only the prompt is wanted; the engine gives at least one token, which is left out.
            self.max_tokens = 1
        field, grammar = self.form()
        params = self.sampling(logprobs=self.logprobs, grammar=grammar)
        return TextTask(self.prompts(), params, field, self.n or 1, bool(self.echo), limit == 0)

    def prompts(self) -> Sequence[str | list[int]]:
        """One entry per prompt: text, or token ids. Raises InvalidRequestError."""
        value = self.prompt
        if isinstance(value, str) or is_ids(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise InvalidRequestError(
                "prompt must be a string, a list of strings, a list of token ids or a list of such lists; not empty",
                param="prompt",
            )
        if not (all(isinstance(p, str) for p in value) or all(is_ids(p) for p in value)):
            raise InvalidRequestError(
                "prompt mixes kinds, or holds something else than strings or token ids", param="prompt"
            )
        if any(not p for p in value):
            raise InvalidRequestError("prompt is empty; at least one token is needed", param="prompt")
        if len(value) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(value)} prompts times n = {self.n or 1} are more than {MAX_CHOICES} choices", param="prompt"
            )
        return value


@dataclass(frozen=True, slots=True)
class TextTask:
    """A request of which everything was checked that can be without its model."""

    prompts: Sequence[str | list[int]]
    params: SamplingParams
    grammar_field: str
    n: int
    echo: bool
    prompt_only: bool


@router.post("/v1/completions", openapi_extra=reads(CompletionRequest))
async def completions(request: Request) -> Response:
    """Each prompt continued `n` times; with echo and logprobs, the prompt's own log probabilities too."""
    state = state_of(request)
    body, task, ignored = await read(request, state, CompletionRequest, CompletionRequest.task)
    priority = priority_of(request) if body.priority is None else body.priority
    lease = await state.lease(state.served_name(body.model), request.receive)
    try:
        ids = await state.in_pool(functools.partial(encode, task, lease.llm))
        state.check_open()
        options: dict[str, Any] = {"priority": priority, "tenant": state.tenant}
        if task.echo and task.params.logprobs is not None:
            options["prompt_logprobs"] = task.params.logprobs
        generations = submit_all(lease.llm, ids, seeded(task.params, task.n), **options)
    except BaseException:
        lease.release()
        raise
    answer = TextAnswer(state, lease, generations, task, ids)
    if body.stream:
        return streamed(answer.chunks(body.include_usage()), ignored, answer.end)
    return await whole(request, answer.whole(), ignored, answer.end, is_large=body.logprobs is not None)


def encode(task: TextTask, llm: LLM) -> list[list[int]]:
    """Token ids of all prompts, checked against the model's limits. Raises what `LLM.check` raises."""
    context = llm.info.context_length
    check_grammar(llm, task.params.grammar, task.grammar_field)
    for prompt in task.prompts:
        # All of them before any is encoded: one that cannot fit costs nothing.
        if isinstance(prompt, str):
            llm.tokenizer.check_length(prompt, context)
        elif len(prompt) >= context:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and the context is {context}; shorten the prompt", param="prompt"
            )
    made: list[list[int]] = []
    for prompt in task.prompts:
        made.append(llm.tokenizer.encode(prompt, max_tokens=context) if isinstance(prompt, str) else prompt)
        llm.check(made[-1], task.params)
    if task.echo and task.params.logprobs is not None:
        _check_scores(sum(map(len, made)) * task.n * (1 + task.params.logprobs))
    return made


def _check_scores(count: int) -> None:
    if count > MAX_SCORES:
        raise InvalidRequestError(
            f"the prompts' tokens, times n, times 1 + logprobs, are {count:,} log probabilities; at most "
            f"{MAX_SCORES:,} are given at once: send fewer prompts",
            param="prompt",
        )


def is_ids(value: Any) -> bool:
    """Whether it is a list of integers, and not empty."""
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
