"""A request's body as JSON, within limits: size, time, depth, numbers and text that are what they say."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from starlette.requests import ClientDisconnect

from mlxinfer.server.errors import HttpError

if TYPE_CHECKING:
    from starlette.requests import Request

    from mlxinfer.server.state import ServerState

MAX_DEPTH = 64
THREAD_BYTES = 64 << 10
"""Bodies larger than this are parsed off the event loop."""
MAX_DISCARD_BYTES = 256 << 20
"""A body that is too large is read to its end up to here, so that the client gets to see the answer."""
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_json(request: Request, state: ServerState) -> dict[str, Any]:
    """The JSON object a client sent. Raises HttpError 400, 408, 413 or 503."""
    options = state.options
    try:
        # The time limit is on the client, not on what the server does with the body.
        async with asyncio.timeout(options.body_timeout_s):
            data = await state.inflight.unless_draining(_read(request, options.max_body_bytes))
    except TimeoutError:
        raise HttpError(
            408,
            f"the body did not arrive within {options.body_timeout_s:g} s",
            code="body_timeout",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise HttpError(400, "the client left while it sent the body", code="disconnected") from None
    if len(data) > THREAD_BYTES:
        return await state.in_pool(functools.partial(parse_object, data))
    return parse_object(data)


async def _read(request: Request, limit: int) -> bytes:
    too_large = HttpError(
        413,
        f"the body has more than {limit:,} bytes",
        code="body_too_large",
        headers={"connection": "close"},
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 15 or int(length) > MAX_DISCARD_BYTES):
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif size > MAX_DISCARD_BYTES:
            raise too_large
        else:
            chunks.clear()
    if size > limit:
        raise too_large
    return b"".join(chunks)


def parse_object(data: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, no NaN or Infinity, no name twice, nested at most MAX_DEPTH deep, an object at the top."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise _bad(f"the body is nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error}") from None
    except ValueError as error:  # Python's limit on the digits of an integer
        raise _bad(f"the body holds a number that is too long: {error}") from None
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, not {type(value).__name__}")
    _check_depth(value)
    if _ESCAPED_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _bad("the body holds half of a surrogate pair (\\ud800 to \\udfff), which is not text") from None
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _bad(f"the body is nested more than {MAX_DEPTH} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _bad(f"the body has the name {twice!a:.80} twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _bad(f"the body holds {name}, which is not JSON")


def _bad(message: str) -> HttpError:
    return HttpError(400, message, code="invalid_json")
