"""Every endpoint: the APIs' own, and how the server is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.engine.governor import governor
from mlxinfer.server import openapi
from mlxinfer.server.errors import json_response
from mlxinfer.server.openai import chat, embeddings, models, text
from mlxinfer.server.openai.responses import routes as responses
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from mlxinfer.encoders import Encoder
    from mlxinfer.llm import LLM
    from mlxinfer.pool import ModelStatus

router = APIRouter()
for _api in (chat, text, responses, embeddings, models, openapi):
    router.include_router(_api.router)


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
    """200 when what is to be loaded at the start is loaded, nothing loads and no engine is dead, else 503 with why."""
    state = state_of(request)
    states = state.models.status()
    missing: dict[str, str] = {name: states[name].state for name in state.models.missing()}
    dead = {name: "dead" for name in state.models if (one := state.models.model(name)) is not None and not one.alive}
    status = "shutting_down" if state.inflight.draining else "dead" if dead else "loading" if missing else "ready"
    missing |= dead
    return json_response({"status": status, "missing": missing}, status=200 if status == "ready" else 503)
