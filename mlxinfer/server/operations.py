"""What runs the server rather than uses it: the figures for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client.exposition import generate_latest
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import PlainTextResponse, Response

from mlxinfer.server.state import state_of

router = APIRouter()

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """The figures of this server in Prometheus' text format."""
    state = state_of(request)
    return Response(generate_latest(state.metrics.registry), media_type=TEXT_FORMAT)
