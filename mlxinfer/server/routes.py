"""The endpoints. Each validates everything, renders and tokenizes off the event loop, and only then queues work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.server.answer import CHAT, TEXT, Answer, respond, seeded
from mlxinfer.server.body import read_json
from mlxinfer.server.errors import json_response
from mlxinfer.server.inflight import submit_all
from mlxinfer.server.schemas import ChatRequest, CompletionRequest, parse
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.llm import LLM
    from mlxinfer.server.state import ServerState

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    state.check_open()
    body, ignored = parse(ChatRequest, await read_json(request, state.options))
    name, llm = state.model(body.model)
    params, kwargs = body.sampling(), body.template_kwargs()
    messages = [message.for_template(i) for i, message in enumerate(body.messages)]
    ids = await asyncio.to_thread(llm.prompt_ids, messages, **kwargs)
    state.check_open()
    n = body.n or 1
    answer = Answer(CHAT, name, submit_all(llm, [ids], seeded(params, n)), n, state)
    return await respond(request, body, ignored, answer)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    state = state_of(request)
    state.check_open()
    body, ignored = parse(CompletionRequest, await read_json(request, state.options))
    name, llm = state.model(body.model)
    params, prompts = body.sampling(), body.prompts()
    ids = await asyncio.to_thread(_encode, llm, prompts)
    state.check_open()
    n = body.n or 1
    answer = Answer(TEXT, name, submit_all(llm, ids, seeded(params, n)), n, state)
    return await respond(request, body, ignored, answer)


def _encode(llm: LLM, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    return [llm.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


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
