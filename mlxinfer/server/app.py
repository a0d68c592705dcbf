"""The ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from mlxinfer import __version__
from mlxinfer.errors import InvalidRequestError
from mlxinfer.pool import ModelPool
from mlxinfer.server import errors, operations
from mlxinfer.server.access import AccessLog
from mlxinfer.server.anthropic.routes import router as anthropic
from mlxinfer.server.metrics import ServerMetrics
from mlxinfer.server.ollama.routes import router as ollama
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.routes import router
from mlxinfer.server.security import Guard
from mlxinfer.server.state import ServerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.llm import LLM


def create_app(models: Mapping[str, LLM] | ModelPool, options: ServerOptions | None = None) -> FastAPI:
    """An application that serves a pool, or `models` (served name to loaded model), which are never unloaded.

    A pool may be empty and get its models later. `app.state.server` is its ServerState. Raises InvalidRequestError when
    a key is limited to models that aren't here.
    """
    assert models or isinstance(models, ModelPool), "a server needs a model"
    pool = models if isinstance(models, ModelPool) else ModelPool.of(models)
    options = options or ServerOptions()
    # FastAPI's own pages load scripts from elsewhere, and the routes parse their bodies themselves.
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="mlxinfer", version=__version__, redirect_slashes=False, **pages)
    metrics = ServerMetrics(pool)
    for key in options.keys:
        if unknown := sorted(name for name in key.models or () if name not in pool):
            raise InvalidRequestError(
                f"the key {key.name!r} may use {', '.join(unknown)}, which is not served here: {', '.join(pool)}",
                param="keys_file",
            )
    app.state.server = ServerState(pool, options, metrics)
    app.include_router(anthropic)  # before OpenAI's: where both have a path, it takes what is meant for it only
    app.include_router(ollama)
    app.include_router(router)
    app.include_router(operations.router)
    errors.install(app)
    app.add_middleware(Guard, options=options, metrics=metrics)
    app.add_middleware(AccessLog, metrics=metrics)
    return app
