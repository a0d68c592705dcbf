"""POST /v1/embeddings, and /v1/rerank in the shape that Jina and Cohere share."""

from __future__ import annotations

import asyncio
import base64
import functools
import secrets
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field, WithJsonSchema, field_validator
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.errors import json_response
from mlxinfer.server.inflight import until_disconnect
from mlxinfer.server.openai.fields import TEXTS_OR_IDS, RequestFields, Strict
from mlxinfer.server.openai.respond import ignored_header, read
from mlxinfer.server.openai.text import is_ids
from mlxinfer.server.openapi import reads
from mlxinfer.server.state import state_of
from mlxinfer.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from mlxinfer.encoders import Encoder
    from mlxinfer.server.state import ServerState

router = APIRouter()
MAX_INPUTS = 2048
MAX_DOCUMENTS = 2048


class EmbeddingRequest(RequestFields):
    harmless: ClassVar[frozenset[str]] = frozenset({"user"})

    input: Annotated[Any, WithJsonSchema(TEXTS_OR_IDS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 16)] | None = None

    def inputs(self) -> list[str | list[int]]:
        """One entry per vector: text, or token ids. Raises InvalidRequestError."""
        value = self.input
        if isinstance(value, str) or is_ids(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise _bad_input("must be a string, a list of strings, a list of token ids or a list of such lists")
        if not (all(isinstance(p, str) for p in value) or all(is_ids(p) for p in value)):
            raise _bad_input("mixes kinds, is empty in a place, or holds something else than strings or token ids")
        if len(value) > MAX_INPUTS:
            raise _bad_input(f"has {len(value)} entries; at most {MAX_INPUTS}")
        if bad := next((i for ids in value if isinstance(ids, list) for i in ids if not 0 <= i < 2**31), None):
            raise _bad_input(f"holds the token id {bad if abs(bad) < 2**63 else '…'}, which is in no vocabulary")
        return value


class Document(Strict):
    text: str


class RerankRequest(RequestFields):
    harmless: ClassVar[frozenset[str]] = frozenset({"user"})
    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "rank_fields": (["text"],),
        "truncation": (),
    }

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    @field_validator("documents", mode="before")
    @classmethod
    def _each(cls, documents: Any) -> Any:
        if isinstance(documents, list):
            for i, one in enumerate(documents):
                if not isinstance(one, str | dict):
                    raise ValueError(f'documents[{i}] must be a string or {{"text": …}}')
        return documents

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


@router.post("/v1/embeddings", openapi_extra=reads(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """A vector for each input."""
    state = state_of(request)
    body, inputs, ignored = await read(request, state, EmbeddingRequest, EmbeddingRequest.inputs)

    async def work(encoder: Encoder) -> dict[str, Any]:
        made = await encoder.aembed(inputs, dimensions=body.dimensions)
        render = functools.partial(_embedding_list, made.vectors, body.encoding_format == "base64")
        return {"object": "list", "data": await asyncio.to_thread(render), "usage": _usage(made.prompt_tokens)}

    return await _encode(request, state, body.model, work, ignored)


def _embedding_list(vectors: Iterable[Any], in_base64: bool) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, vector in enumerate(vectors):
        floats = np.asarray(vector, dtype="<f4")
        value = base64.b64encode(floats.tobytes()).decode("ascii") if in_base64 else floats.tolist()
        made.append({"object": "embedding", "index": index, "embedding": value})
    return made


@router.post("/v1/rerank", openapi_extra=reads(RerankRequest))
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """The documents by their relevance to the query, the most relevant first."""
    state = state_of(request)
    body, texts, ignored = await read(request, state, RerankRequest, RerankRequest.texts)

    async def work(encoder: Encoder) -> dict[str, Any]:
        # As Jina and Cohere do, a document that is too long is judged by its beginning.
        scores = await encoder.arerank(body.query, texts, truncate=True)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        return {"id": f"rerank-{secrets.token_hex(12)}", "results": results, "usage": _usage(scores.prompt_tokens)}

    return await _encode(request, state, body.model, work, ignored)


async def _encode(
    request: Request,
    state: ServerState,
    model: str | None,
    work: Callable[[Encoder], Coroutine[None, None, dict[str, Any]]],
    ignored: Sequence[str],
) -> Response:
    """What `work` makes of the leased model; a client that leaves, or a shutdown, ends it."""
    with await state.lease(state.served_name(model), request.receive) as lease:
        encoder = lease.encoder
        state.check_open()
        made = await until_disconnect(request.receive, state.inflight.ended(work(encoder)))
        if made is None:
            return json_response({})  # nobody reads it
        usage = Usage(prompt_tokens=made["usage"]["prompt_tokens"])
        state.ended(lease.name, usage, None, "stop")
        render = functools.partial(json_response, made | {"model": lease.name}, headers=ignored_header(ignored))
        # Thousands of vectors are megabytes of text.
        return await asyncio.to_thread(render)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _bad_input(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"input {message}", param="input")
