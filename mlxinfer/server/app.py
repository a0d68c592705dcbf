"""The ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from mlxinfer import __version__
from mlxinfer.pool import ModelPool
from mlxinfer.server import errors
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.routes import router
from mlxinfer.server.security import Guard
from mlxinfer.server.state import ServerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.llm import LLM


def create_app(models: Mapping[str, LLM] | ModelPool, options: ServerOptions | None = None) -> FastAPI:
    """An application that serves a pool, or `models` (served name to loaded model), which are never unloaded.

    `app.state.server` is its ServerState.
    """
    assert models, "a server needs a model"
    pool = models if isinstance(models, ModelPool) else ModelPool.of(models)
    options = options or ServerOptions()
    # FastAPI's own pages load scripts from elsewhere, and the routes parse their bodies themselves.
    app = FastAPI(title="mlxinfer", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = ServerState(pool, options)
    app.include_router(router)
    errors.install(app)
    app.add_middleware(Guard, options=options)
    return app
