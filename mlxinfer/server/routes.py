"""The endpoints. Each validates everything, renders and tokenizes off the event loop, and only then queues work."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.errors import ContextLengthError
from mlxinfer.server.answer import CHAT, TEXT, Answer, respond, seeded
from mlxinfer.server.body import read_json
from mlxinfer.server.errors import json_response
from mlxinfer.server.inflight import submit_all
from mlxinfer.server.schemas import ChatRequest, CompletionRequest, parse
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.llm import LLM
    from mlxinfer.server.answer import Kind
    from mlxinfer.server.schemas import SamplingFields
    from mlxinfer.server.state import ServerState
    from mlxinfer.types import SamplingParams

router = APIRouter()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that was checked, rendered and tokenized."""

    body: SamplingFields
    ignored: tuple[str, ...]
    name: str
    llm: LLM
    params: SamplingParams
    prompts: list[list[int]]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _complete(request, CHAT, _prepare_chat)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _complete(request, TEXT, _prepare_text)


async def _complete(
    request: Request, kind: Kind, prepare: Callable[[ServerState, dict[str, Any]], _Prepared]
) -> Response:
    state = state_of(request)
    state.check_open()
    body = await read_json(request, state)
    made = await state.in_pool(functools.partial(prepare, state, body))
    state.check_open()
    n = made.body.n or 1
    generations = submit_all(made.llm, made.prompts, seeded(made.params, n))
    answer = Answer(kind, made.name, generations, n, state)
    return await respond(request, made.body, made.ignored, answer)


def _prepare_chat(state: ServerState, sent: dict[str, Any]) -> _Prepared:
    body, ignored = parse(ChatRequest, sent)
    name, llm = state.model(body.model)
    params, kwargs = body.sampling(), body.template_kwargs()
    messages = [message.for_template(i) for i, message in enumerate(body.messages)]
    return _Prepared(body, ignored, name, llm, params, [llm.prompt_ids(messages, **kwargs)])


def _prepare_text(state: ServerState, sent: dict[str, Any]) -> _Prepared:
    body, ignored = parse(CompletionRequest, sent)
    name, llm = state.model(body.model)
    params, prompts = body.sampling(), body.prompts()
    context = llm.info.context_length
    for prompt in prompts:
        # All of them before any is encoded: one that cannot fit costs nothing.
        if isinstance(prompt, str):
            llm.tokenizer.check_length(prompt, context)
        elif len(prompt) >= context:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and the context is {context}; shorten the prompt", param="prompt"
            )
    made: list[list[int]] = []
    for prompt in prompts:
        made.append(llm.tokenizer.encode(prompt, max_tokens=context) if isinstance(prompt, str) else prompt)
        llm.check(made[-1], params)
    return _Prepared(body, ignored, name, llm, params, made)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    state = state_of(request)
    return json_response({"object": "list", "data": [_card(state, name) for name in state.models]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    state = state_of(request)
    state.model(name)
    return json_response(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, object]:
    info = state.models[name].info
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "mlxinfer",
        "context_length": info.context_length,
        "model_type": info.model_type,
        "quantization": info.quantization,
        "has_chat_template": info.has_chat_template,
    }


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when every model can serve, 503 when an engine is dead or the server is shutting down."""
    state = state_of(request)
    models = {name: _health(llm) for name, llm in state.models.items()}
    alive = all(model["status"] == "ok" for model in models.values())
    status = "shutting_down" if state.inflight.draining else "ok" if alive else "dead"
    return json_response({"status": status, "models": models}, status=200 if status == "ok" else 503)


def _health(llm: LLM) -> dict[str, object]:
    stats = llm.stats()
    return {"status": "ok" if llm.alive else "dead", "running": stats["running"], "waiting": stats["waiting"]}
