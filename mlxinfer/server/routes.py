"""The endpoints. Each validates, has its model loaded, renders and tokenizes off the event loop, then queues work."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.engine.governor import governor
from mlxinfer.errors import ContextLengthError
from mlxinfer.server.answer import CHAT, TEXT, Answer, respond, seeded
from mlxinfer.server.body import read_json
from mlxinfer.server.errors import json_response
from mlxinfer.server.inflight import submit_all
from mlxinfer.server.schemas import ChatRequest, CompletionRequest, parse
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlxinfer.encoders import Encoder
    from mlxinfer.llm import LLM
    from mlxinfer.pool import ModelStatus
    from mlxinfer.server.answer import Kind
    from mlxinfer.server.schemas import SamplingFields
    from mlxinfer.server.state import ServerState
    from mlxinfer.types import SamplingParams

router = APIRouter()


@dataclass(frozen=True, slots=True)
class _Checked:
    """A request of which everything was checked that can be without its model."""

    body: SamplingFields
    ignored: tuple[str, ...]
    params: SamplingParams
    tokenize: Callable[[LLM], list[list[int]]]
    """The prompts' token ids, rendered first and checked against the model's limits."""


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _complete(request, CHAT, _check_chat)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _complete(request, TEXT, _check_text)


async def _complete(request: Request, kind: Kind, check: Callable[[dict[str, Any]], _Checked]) -> Response:
    state = state_of(request)
    state.check_open()
    sent = await read_json(request, state)
    made = await state.in_pool(functools.partial(check, sent))
    name = state.served_name(made.body.model)
    lease = await state.lease(name, request.receive)
    try:
        prompts = await state.in_pool(functools.partial(made.tokenize, lease.llm))
        state.check_open()
        n = made.body.n or 1
        generations = submit_all(lease.llm, prompts, seeded(made.params, n))
    except BaseException:
        lease.release()
        raise
    return await respond(request, made.body, made.ignored, Answer(kind, name, generations, n, state, lease))


def _check_chat(sent: dict[str, Any]) -> _Checked:
    body, ignored = parse(ChatRequest, sent)
    params, kwargs = body.sampling(), body.template_kwargs()
    messages = [message.for_template(i) for i, message in enumerate(body.messages)]
    return _Checked(body, ignored, params, lambda llm: [llm.prompt_ids(messages, **kwargs)])


def _check_text(sent: dict[str, Any]) -> _Checked:
    body, ignored = parse(CompletionRequest, sent)
    params = body.sampling()
    return _Checked(body, ignored, params, functools.partial(_encode, body.prompts(), params))


def _encode(prompts: Sequence[str | list[int]], params: SamplingParams, llm: LLM) -> list[list[int]]:
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
    return made


@router.get("/v1/models")
async def models(request: Request) -> Response:
    state = state_of(request)
    cards = [_card(state, name, status) for name, status in state.models.status().items()]
    return json_response({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    state = state_of(request)
    return json_response(_card(state, name, state.models.status()[state.served_name(name)]))


def _card(state: ServerState, name: str, status: ModelStatus) -> dict[str, object]:
    card = {"id": name, "object": "model", "created": state.started, "owned_by": "mlxinfer", "state": status.state}
    if (info := status.info) is not None:
        card |= {
            "context_length": info.context_length,
            "model_type": info.model_type,
            "makes": info.makes,
            "quantization": info.quantization,
            "has_chat_template": info.has_chat_template,
        }
    return card


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when every model that is loaded can serve, 503 when an engine is dead or the server is shutting down."""
    state = state_of(request)
    models = {name: _health(state.models.model(name), status) for name, status in state.models.status().items()}
    alive = all(model["status"] != "dead" for model in models.values())
    status = "shutting_down" if state.inflight.draining else "ok" if alive else "dead"
    # Figures of this moment, in bytes.
    memory = dataclasses.asdict(governor().figures())
    body = {"status": status, "models": models, "memory": memory}
    return json_response(body, status=200 if status == "ok" else 503)


def _health(model: LLM | Encoder | None, status: ModelStatus) -> dict[str, object]:
    word = status.state if model is None else "ok" if model.alive else "dead"
    return {"status": word, "running": status.running, "waiting": status.waiting}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when what is to be loaded at the start is loaded and nothing loads, else 503 with what is missing."""
    state = state_of(request)
    states = state.models.status()
    missing = {name: states[name].state for name in state.models.missing()}
    status = "shutting_down" if state.inflight.draining else "loading" if missing else "ready"
    return json_response({"status": status, "missing": missing}, status=200 if status == "ready" else 503)
