"""GET /v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.server.errors import json_response
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from mlxinfer.pool import ModelStatus
    from mlxinfer.server.state import ServerState

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """Every registered model, loaded or not."""
    state = state_of(request)
    cards = [card(state, name, status) for name, status in state.statuses().items()]
    return json_response({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One of them; a name is compared, never opened."""
    state = state_of(request)
    return json_response(card(state, name, state.statuses()[state.served_name(name)]))


def card(state: ServerState, name: str, status: ModelStatus) -> dict[str, object]:
    """OpenAI's model object, with what is known of it since it was first loaded."""
    found = {"id": name, "object": "model", "created": state.started, "owned_by": "mlxinfer", "state": status.state}
    if (info := status.info) is not None:
        found |= {
            "context_length": info.context_length,
            "model_type": info.model_type,
            "quantization": info.quantization,
            "has_chat_template": info.has_chat_template,
            "makes": info.makes,
        }
    return found
