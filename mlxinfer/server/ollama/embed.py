"""Ollama's embeddings, in the newer and the older form."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.inflight import until_disconnect
from mlxinfer.server.ollama.lines import NS
from mlxinfer.server.ollama.models import registered_name
from mlxinfer.server.ollama.options import keep_seconds
from mlxinfer.types import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from mlxinfer.server.ollama.schemas import EmbeddingsRequest, EmbedRequest
    from mlxinfer.server.state import ServerState


async def embed(request: Request, state: ServerState, body: EmbedRequest) -> dict[str, Any]:
    """The answer of /api/embed."""
    texts = body.texts()
    return await _embed(request, state, body, texts, body.dimensions, body.truncate is not False)


async def embed_one(request: Request, state: ServerState, body: EmbeddingsRequest) -> dict[str, Any]:
    """The answer of /api/embeddings: one vector, none for no text."""
    if body.prompt is None:
        raise InvalidRequestError("prompt is missing; it is the text to embed", param="prompt")
    made = await _embed(request, state, body, [body.prompt] if body.prompt else [], None, True)
    return {"embedding": made["embeddings"][0] if made.get("embeddings") else []}


async def _embed(
    request: Request,
    state: ServerState,
    body: EmbedRequest | EmbeddingsRequest,
    texts: Sequence[str],
    dimensions: int | None,
    truncate: bool,
) -> dict[str, Any]:
    begun = time.monotonic()
    keep_s = keep_seconds(body.keep_alive)
    name = registered_name(state, body.model)
    vectors: list[list[float]] = []
    tokens = 0
    with await state.lease(name, request.receive) as lease:
        ready = time.monotonic()
        encoder = lease.encoder
        if keep_s is not None:
            state.models.keep(name, keep_s)
        state.check_open()
        if texts:
            work = state.inflight.ended(encoder.aembed(texts, dimensions=dimensions, truncate=truncate))
            found = await until_disconnect(request.receive, work)
            if found is None:
                return {}  # nobody reads the answer to a client that left
            tokens = found.prompt_tokens
            vectors = await asyncio.to_thread(lambda: [[float(x) for x in vector] for vector in found.vectors])
    state.ended(name, Usage(prompt_tokens=tokens), None, "stop")
    return {
        "model": body.model or name,
        "embeddings": vectors,
        "total_duration": max(1, round((time.monotonic() - begun) * NS)),
        "load_duration": max(1, round((ready - begun) * NS)),
        "prompt_eval_count": tokens,
    }
