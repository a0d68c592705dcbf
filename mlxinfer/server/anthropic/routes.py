"""Anthropic's endpoints."""

from __future__ import annotations

import contextlib
import datetime
import functools
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002
from starlette.routing import Match

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.anthropic.errors import DOCUMENTED, as_anthropic, request_id_of
from mlxinfer.server.anthropic.events import PING, Blocks, whole_message
from mlxinfer.server.anthropic.schemas import CountRequest, MessagesRequest
from mlxinfer.server.anthropic.task import NAMES, read_count, read_messages
from mlxinfer.server.body import read_json
from mlxinfer.server.chat import count_prompt, start_chat
from mlxinfer.server.errors import json_response
from mlxinfer.server.inflight import until_disconnect
from mlxinfer.server.openai.respond import ignored_header
from mlxinfer.server.openapi import reads
from mlxinfer.server.shapes import renamed
from mlxinfer.server.sse import EventStream, StreamStyle, named_frame
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from starlette.types import Scope

    from mlxinfer.pool import ModelStatus
    from mlxinfer.server.anthropic.task import Asked
    from mlxinfer.server.chat import ChatRun
    from mlxinfer.server.state import ServerState

router = APIRouter(responses=DOCUMENTED)


@router.post("/v1/messages", openapi_extra=reads(MessagesRequest))
async def messages(request: Request) -> Response:
    state = state_of(request)
    state.check_open()
    sent = await read_json(request, state)
    with _in_its_words():
        asked = await state.in_pool(functools.partial(read_messages, sent))
        run = await start_chat(request, state, asked.model, asked.task)
    headers = _headers(request, asked)
    blocks = _blocks(run, asked)
    if asked.stream:
        return EventStream(_events(run, blocks), headers, run.end, _style(request_id_of(request.scope)), head=2)
    try:
        whole = await until_disconnect(request.receive, whole_message(_events(run, blocks), blocks))
    finally:
        run.end()
    # Nobody reads the answer to a client that left.
    return json_response(whole or {}, headers=headers)


@router.post("/v1/messages/count_tokens", openapi_extra=reads(CountRequest))
async def count_tokens(request: Request) -> Response:
    state = state_of(request)
    state.check_open()
    sent = await read_json(request, state)
    with _in_its_words():
        asked = await state.in_pool(functools.partial(read_count, sent))
        tokens = await count_prompt(request, state, asked.model, asked.task)
    return json_response({"input_tokens": tokens}, headers=_headers(request, asked))


def _blocks(run: ChatRun, asked: Asked) -> Blocks:
    limit = asked.task.params.max_tokens
    assert limit is not None, "Anthropic's requests have one"
    return Blocks(
        model=run.model,
        message_id=f"msg_{run.id}",
        prompt_tokens=run.prompt_tokens,
        max_tokens=limit,
        show_thinking=asked.show_thinking,
    )


async def _events(run: ChatRun, blocks: Blocks) -> AsyncGenerator[dict[str, Any] | None]:
    async with contextlib.aclosing(run.parts()) as parts:
        for event in blocks.start():
            yield event
        async for item in parts:
            if item is None:
                yield None
                continue
            for event in blocks.read(item[1]):
                yield event


def _style(request_id: str) -> StreamStyle:
    """Events with names; the last is message_stop, or an error."""

    def failed(status: int, body: Mapping[str, Any]) -> bytes:
        return named_frame(as_anthropic(status, body, request_id))

    return StreamStyle(encode=named_frame, keepalive=named_frame(PING), done=b"", error=failed)


def _headers(request: Request, asked: Asked) -> dict[str, str]:
    return {"request-id": request_id_of(request.scope), **ignored_header(asked.ignored)}


@contextlib.contextmanager
def _in_its_words() -> Iterator[None]:
    """Errors that name a field name it as Anthropic does."""
    try:
        yield
    except InvalidRequestError as error:
        raise renamed(error, NAMES) from error


class _Versioned(APIRoute):
    """A path that OpenAI's API has too: Anthropic's clients are told by the version they send."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not any(name == b"anthropic-version" for name, _ in scope["headers"]):
            return Match.NONE, {}
        return super().matches(scope)


versioned = APIRouter(route_class=_Versioned, include_in_schema=False)


@versioned.get("/v1/models")
async def models(request: Request) -> Response:
    state = state_of(request)
    cards = [_card(state, name, status) for name, status in state.statuses().items()]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {"first_id": None, "last_id": None}
    return json_response({"data": cards, "has_more": False, **ends})


@versioned.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    state = state_of(request)
    return json_response(_card(state, name, state.statuses()[state.served_name(name)]))


def _card(state: ServerState, name: str, status: ModelStatus) -> dict[str, Any]:
    info = status.info
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(state.started, datetime.UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": None if info is None else info.context_length,
        "max_tokens": None if info is None else info.context_length,
    }


router.include_router(versioned)
