"""POST, GET and DELETE /v1/responses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.errors import ContextLengthError, InvalidRequestError
from mlxinfer.server.chat import start_chat
from mlxinfer.server.errors import HttpError, json_response
from mlxinfer.server.openai.respond import read, streamed, whole
from mlxinfer.server.openai.responses.answer import ResponseAnswer
from mlxinfer.server.openai.responses.request import ResponseRequest
from mlxinfer.server.openapi import reads
from mlxinfer.server.sse import StreamStyle, named_frame
from mlxinfer.server.state import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.server.chat import ChatRun, ChatTask
    from mlxinfer.server.state import ServerState

router = APIRouter()

RESPONSE_ID_HEADER = "x-mlxinfer-response-id"
"""A proxy in front of several servers reads here whose response this is: only that server can go on from it."""


@router.post("/v1/responses", openapi_extra=reads(ResponseRequest))
async def create(request: Request) -> Response:
    """Input items in, output items out; kept for a later request to go on from, unless store is false."""
    state = state_of(request)
    body, task, ignored = await read(request, state, ResponseRequest, ResponseRequest.task)
    conversation = (*_previous(state, body), *task.messages)
    if not conversation:
        raise InvalidRequestError("input has no items that make a message", param="input")
    task = dataclasses.replace(task, messages=_instructed(body.instructions, conversation))
    run = await _start(request, state, body, task)
    answer = ResponseAnswer(run, body, conversation, _keep(state) if body.store is not False else None)
    if body.stream:
        style = StreamStyle(encode=named_frame, done=b"", error=lambda _, told: named_frame(answer.failed(told)))
        reply = streamed(answer.events(), ignored, run.end, style, head=2)
    else:
        reply = await whole(request, answer.whole(), ignored, run.end)
    if body.store is not False:
        reply.headers[RESPONSE_ID_HEADER] = answer.id
    return reply


def _instructed(instructions: str | None, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Instructions in front; many templates take one system message only, so a first one that is there joins them."""
    if instructions is None:
        return messages
    first, rest = (messages[0]["content"], messages[1:]) if messages[0]["role"] == "system" else ("", messages)
    return ({"role": "system", "content": f"{instructions}\n\n{first}".rstrip("\n")}, *rest)


def _previous(state: ServerState, body: ResponseRequest) -> Sequence[dict[str, Any]]:
    if body.previous_response_id is None:
        return ()
    found = state.responses.get(state.tenant, body.previous_response_id)
    if found is None:
        raise _unknown(body.previous_response_id, "previous_response_id")
    return found.messages


def _keep(state: ServerState):
    tenant = state.tenant

    def keep(response: dict[str, Any], messages: tuple[dict[str, Any], ...]) -> None:
        state.responses.put(tenant, response, messages)

    return keep


async def _start(request: Request, state: ServerState, body: ResponseRequest, task: ChatTask) -> ChatRun:
    """With truncation "auto", a conversation that is too long loses its oldest messages: 1, then 2, 4, …"""
    dropped = 1
    while True:
        try:
            return await start_chat(request, state, body.model, task)
        except ContextLengthError:
            shorter = _without_oldest(task.messages, dropped) if body.truncation == "auto" else None
            if shorter is None:
                raise
            task = dataclasses.replace(task, messages=shorter)
            dropped *= 2


def _without_oldest(messages: tuple[dict[str, Any], ...], count: int) -> tuple[dict[str, Any], ...] | None:
    """Without the `count` oldest that are no system messages, and from a user's message on where there is one: many
    templates want it first, and a result needs its call. None: nothing would be left."""
    head = tuple(m for m in messages if m["role"] == "system")
    rest = [m for m in messages if m["role"] != "system"][count:]
    begins = [i for i, m in enumerate(rest) if m["role"] == "user"] or [
        i for i, m in enumerate(rest) if m["role"] != "tool"
    ]
    return (*head, *rest[begins[0] :]) if begins else None


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """A stored response as it was sent."""
    state = state_of(request)
    if request.query_params.get("stream") not in (None, "false"):
        raise InvalidRequestError("a stored response isn't streamed; leave stream out", param="stream")
    found = state.responses.get(state.tenant, response_id)
    if found is None:
        raise _unknown(response_id, None)
    return json_response(found.response)


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forget one."""
    state = state_of(request)
    if not state.responses.delete(state.tenant, response_id):
        raise _unknown(response_id, None)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _unknown(response_id: str, param: str | None) -> HttpError:
    message = f"no response {response_id!r:.140} is stored here; it may have expired, or was sent with store: false"
    code = "previous_response_not_found" if param else "response_not_found"
    return HttpError(404 if param is None else 400, message, code=code, param=param)
