"""From the routes' answers to HTTP: the part that every completion shares."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, TypeVar

from mlxinfer import __version__
from mlxinfer.server.body import read_json
from mlxinfer.server.errors import json_response
from mlxinfer.server.inflight import until_disconnect
from mlxinfer.server.openai.fields import IGNORED_HEADER, parse
from mlxinfer.server.sse import OPENAI, EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from mlxinfer.server.openai.fields import RequestFields
    from mlxinfer.server.sse import StreamStyle
    from mlxinfer.server.state import ServerState
    from mlxinfer.types import Usage

RequestT = TypeVar("RequestT", bound="RequestFields")
T = TypeVar("T")


async def read(
    request: Request, state: ServerState, kind: type[RequestT], check: Callable[[RequestT], T]
) -> tuple[RequestT, T, tuple[str, ...]]:
    """(the body, what `check` makes of it, names of ignored fields); both off the event loop.

    Raises what `read_json`, `parse` and `check` raise.
    """
    state.check_open()
    sent = await read_json(request, state)

    def checked() -> tuple[RequestT, T, tuple[str, ...]]:
        body, ignored = parse(kind, sent)
        return body, check(body), ignored

    return await state.in_pool(checked)


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names what was ignored."""
    return {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}


def streamed(
    chunks: AsyncGenerator[dict[str, Any] | None],
    ignored: Sequence[str],
    end: Callable[[], None],
    style: StreamStyle = OPENAI,
    head: int = 0,
) -> Response:
    """A stream; a client that leaves, or anything that goes wrong, ends the run. `head` is EventStream's."""
    return EventStream(chunks, ignored_header(ignored), end, style, head)


async def whole(
    request: Request,
    work: Coroutine[None, None, dict[str, Any]],
    ignored: Sequence[str],
    end: Callable[[], None],
    *,
    is_large: bool = False,
) -> Response:
    """A whole answer; a client that leaves, or anything that goes wrong, ends the run.

    One that may be large is written off the event loop.
    """
    try:
        made = await until_disconnect(request.receive, work)
    finally:
        end()
    # Nobody reads the answer to a client that left.
    render = functools.partial(json_response, made or {}, headers=ignored_header(ignored))
    return await asyncio.to_thread(render) if is_large else render()


def usage_object(prompts: Sequence[Usage], choices: Sequence[Usage]) -> dict[str, Any]:
    """Token counts: each prompt once, each choice's tokens."""
    prompt = sum(u.prompt_tokens for u in prompts)
    completion = sum(u.completion_tokens for u in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in choices)},
    }


def completion_frame(object_name: str, id: str, created: int, model: str, choices: list[dict[str, Any]]):
    """What every completion object begins with."""
    return {
        "id": id,
        "object": object_name,
        "created": created,
        "model": model,
        "system_fingerprint": f"mlxinfer-{__version__}",
        "choices": choices,
    }
