"""Ollama's endpoints. Its documented curl sends JSON as a form, so the content type is not looked at here."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import PlainTextResponse, Response

from mlxinfer import __version__
from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.chat import start_chat
from mlxinfer.server.errors import HttpError, json_response
from mlxinfer.server.ollama.embed import embed, embed_one
from mlxinfer.server.ollama.errors import DOCUMENTED, as_ollama
from mlxinfer.server.ollama.lines import Lines, whole_answer
from mlxinfer.server.ollama.models import loaded, registered_name, show, tags
from mlxinfer.server.ollama.options import NAMES
from mlxinfer.server.ollama.raw import start_raw
from mlxinfer.server.ollama.schemas import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest
from mlxinfer.server.ollama.task import RawText, read_chat, read_generate
from mlxinfer.server.openai.logprobs import TokenTexts
from mlxinfer.server.openai.respond import ignored_header, read, whole
from mlxinfer.server.openapi import reads
from mlxinfer.server.shapes import renamed
from mlxinfer.server.sse import EventStream, StreamStyle
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from mlxinfer.server.chat import ChatRun
    from mlxinfer.server.ollama.raw import RawRun
    from mlxinfer.server.ollama.schemas import Generates
    from mlxinfer.server.ollama.task import Asked
    from mlxinfer.server.state import ServerState

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients switch features on by it."""

router = APIRouter(responses=DOCUMENTED)
BodyT = TypeVar("BodyT", bound="Generates")


@router.post("/api/chat", openapi_extra=reads(ChatRequest))
async def chat(request: Request) -> Response:
    """Messages in, the assistant's reply out."""
    return await _generate(request, ChatRequest, read_chat, is_chat=True)


@router.post("/api/generate", openapi_extra=reads(GenerateRequest))
async def generate(request: Request) -> Response:
    """A prompt in, as one user message or raw; its continuation out."""
    return await _generate(request, GenerateRequest, read_generate, is_chat=False)


async def _generate(request: Request, kind: type[BodyT], check: Callable[[BodyT], Asked], *, is_chat: bool) -> Response:
    begun = time.monotonic()
    state = state_of(request)
    _, asked, ignored = await read(request, state, kind, check)
    ignored = (*ignored, *asked.ignored)
    name = registered_name(state, asked.model)
    if asked.task is None:
        return await _only_load(request, state, name, asked, ignored, is_chat)
    run = await _start(request, state, name, asked)
    if asked.keep_s is not None:
        state.models.keep(name, asked.keep_s)
    lines = Lines(
        model=asked.model or name,
        is_chat=is_chat,
        begun=begun,
        load_s=time.monotonic() - begun,
        texts=TokenTexts(run.tokenizer),
        top_logprobs=asked.top_logprobs,
    )
    if asked.stream:
        return EventStream(_lines(run, lines), ignored_header(ignored), run.end, STYLE)
    return await whole(request, whole_answer(_lines(run, lines), is_chat), ignored, run.end)


async def _start(request: Request, state: ServerState, name: str, asked: Asked) -> ChatRun | RawRun:
    try:
        if isinstance(asked.task, RawText):
            return await start_raw(request, state, name, asked.task)
        assert asked.task is not None
        return await start_chat(request, state, name, asked.task)
    except InvalidRequestError as error:
        raise renamed(error, NAMES) from error


async def _only_load(
    request: Request, state: ServerState, name: str, asked: Asked, ignored: tuple[str, ...], is_chat: bool
) -> Response:
    """A request without a prompt loads the model, or has it unloaded."""
    if asked.keep_s != 0:
        (await state.lease(name, request.receive)).release()
    if asked.keep_s is not None:
        state.models.keep(name, asked.keep_s)
    reason = "unload" if asked.keep_s == 0 else "load"
    line = Lines(model=asked.model or name, is_chat=is_chat).only(reason)
    return json_response(line, headers=ignored_header(ignored))


async def _lines(run: ChatRun | RawRun, lines: Lines) -> AsyncGenerator[dict[str, Any] | None]:
    async with contextlib.aclosing(run.parts()) as parts:
        async for item in parts:
            if item is None:
                # Clients parse every line: there is no comment that would fill a silence.
                yield lines.line()
                continue
            for line in lines.read(item[1]):
                yield line


def _encode(line: Any) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"


def _failed(status: int, told: Mapping[str, Any]) -> bytes:
    return _encode(as_ollama(told))


STYLE = StreamStyle("application/x-ndjson", encode=_encode, keepalive=b"", done=b"", error=_failed)


@router.post("/api/embed", openapi_extra=reads(EmbedRequest))
async def embed_texts(request: Request) -> Response:
    """Texts in, vectors out."""
    state = state_of(request)
    body, _, ignored = await read(request, state, EmbedRequest, EmbedRequest.texts)
    return json_response(await embed(request, state, body), headers=ignored_header(ignored))


@router.post("/api/embeddings", openapi_extra=reads(EmbeddingsRequest))
async def embed_prompt(request: Request) -> Response:
    """One text in, its vector out: the older form."""
    state = state_of(request)
    body, _, ignored = await read(request, state, EmbeddingsRequest, lambda body: body)
    return json_response(await embed_one(request, state, body), headers=ignored_header(ignored))


@router.get("/api/tags")
async def list_models(request: Request) -> Response:
    """Every registered model."""
    return json_response({"models": tags(state_of(request))})


@router.get("/api/ps")
async def list_loaded(request: Request) -> Response:
    """The models in memory."""
    return json_response({"models": loaded(state_of(request))})


@router.post("/api/show", openapi_extra=reads(ShowRequest))
async def show_model(request: Request) -> Response:
    """What is known of a model."""
    state = state_of(request)
    body, _, ignored = await read(request, state, ShowRequest, lambda body: body)
    name = registered_name(state, body.name if body.model is None else body.model)
    return json_response(show(state, name), headers=ignored_header(ignored))


@router.get("/api/version")
async def version() -> Response:
    """Ollama's version, as far as its API is spoken, and ours."""
    return json_response({"version": API_VERSION, "mlxinfer": __version__})


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def alive() -> Response:
    """Ollama's clients ask here whether anyone is listening."""
    return PlainTextResponse("mlxinfer is running")


async def managed() -> Response:
    """No request downloads, makes, changes or removes a model."""
    raise HttpError(
        403,
        "models are managed by this server's owner, with the mlxinfer command; requests can only use them",
        code="managed_by_owner",
    )


for path in ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest:path}"):
    router.add_api_route(path, managed, methods=["HEAD", "POST", "DELETE"], include_in_schema=False)
