"""The servers that are measured: how they are named on the command line, and what they say of themselves."""

from __future__ import annotations

import asyncio
import urllib.parse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from mlxinfer.bench.client import Endpoint, Record, ask, new_http
from mlxinfer.errors import EngineError, InvalidRequestError, ModelNotFoundError, OfflineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlxinfer.bench.process import OwnServer

OURS = "mlxinfer"
IGNORES_EOS = (OURS, "llamacpp")
"""`owned_by` of servers that honour `ignore_eos`; others may refuse a field they don't know."""
ASK_S = 10.0
"""For the small questions: models, version."""
SHOWN_MODELS = 8


@dataclass(frozen=True, slots=True)
class Address:
    """`NAME=URL#model`, taken apart."""

    name: str
    url: str
    """Scheme, host and port, and a path where there is one; without /v1."""
    model: str | None
    """None: the one that the server lists."""


def parse_address(text: str, *, option: str) -> Address:
    """Raises InvalidRequestError for what is no URL with a scheme and a host; `option` is named then."""
    name, equals, rest = text.partition("=")
    if not equals or "://" in name or "#" in name:
        name, rest = "", text
    bare, _, model = rest.partition("#")
    try:
        parts = urllib.parse.urlsplit(bare)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.query
        _ = parts.port
    except ValueError:
        parts, bad = urllib.parse.SplitResult("", "", "", "", ""), True
    if bad or (equals and not name and rest != text):
        raise InvalidRequestError(
            f"{option} {text!r:.160} is not [NAME=]URL[#MODEL], for example other=http://127.0.0.1:8081#its-model",
            param=option,
        )
    url = bare.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(name or parts.netloc, url, model or None)


def check_names(names: Iterable[str]) -> None:
    """Raises InvalidRequestError when two targets would be called the same."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequestError(f"two servers are called {name!r:.80}; name them: --against NAME=URL")
        seen.add(name)


@dataclass(slots=True)
class Target:
    """A server that answers, and what is known of it."""

    name: str
    endpoint: Endpoint
    ours: bool
    """It says that it is mlxinfer."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What it says of itself: owned_by, server, version, quantization, …"""
    server: OwnServer | None = None
    """When the bench started it."""
    pid: int | None = None
    """Its process, where that is on this machine and ours to look at."""

    def current_pid(self) -> int | None:
        return self.server.pid if self.server is not None else self.pid


def connect(
    address: Address, *, headers: Mapping[str, str] | None = None, ignore_eos: bool = False, timeout_s: float = 600.0
) -> Target:
    """Ask the server who it is and let it answer one short request, so that every later failure is under load.

    Raises OfflineError when nobody answers, ModelNotFoundError for a model it doesn't have, InvalidRequestError when it
    lists several and none was named, EngineError when it can't answer the request.
    """
    headers = dict(headers or {})
    with httpx.Client(timeout=ASK_S, trust_env=False, headers=headers) as http:
        listed, facts = _models(http, address)
        model = address.model or _only_model(address, listed)
        facts |= _card(listed, model) | _version(http, address)
    ours = facts.get("owned_by") == OURS
    # Ours would follow the model's generation_config, which may ask for a penalty that other servers don't apply.
    extra: dict[str, Any] = {"repetition_penalty": 1.0} if ours else {}
    if ignore_eos and facts.get("owned_by") in IGNORES_EOS:
        extra["ignore_eos"] = True
    endpoint = Endpoint(address.url, model, headers, extra)
    return _tried(Target(address.name, endpoint, ours, facts), timeout_s)


def _models(http: httpx.Client, address: Address) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(entries of /v1/models, what the headers say)."""
    try:
        reply = http.get(f"{address.url}/v1/models")
    except httpx.HTTPError as error:
        raise OfflineError(
            f"nothing answers at {address.url} ({type(error).__name__}); start the server or correct the URL"
        ) from error
    facts = {"server": reply.headers["server"]} if "server" in reply.headers else {}
    if reply.status_code in (401, 403):
        raise EngineError(f"{address.url} refuses without a key ({reply.status_code}); set MLXINFER_API_KEY for --url")
    body = _object(reply)
    listed = body.get("data")
    return [m for m in listed if isinstance(m, dict) and "id" in m] if isinstance(listed, list) else [], facts


def _only_model(address: Address, listed: list[dict[str, Any]]) -> str:
    names = [str(model["id"]) for model in listed]
    if len(names) == 1:
        return names[0]
    shown = ", ".join(names[:SHOWN_MODELS]) + (", …" if len(names) > SHOWN_MODELS else "")
    what = f"lists {len(names)} models ({shown})" if names else "does not list its models"
    raise InvalidRequestError(f"{address.url} {what}; name the one to measure: {address.name}={address.url}#MODEL")


def _card(listed: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """Of a model's entry, the fields that describe it."""
    wanted = ("owned_by", "quantization", "model_type", "context_length", "meta", "root")
    entry = next((m for m in listed if m["id"] == model), listed[0] if listed else {})
    return {key: entry[key] for key in wanted if entry.get(key)}


def _version(http: httpx.Client, address: Address) -> dict[str, Any]:
    """vLLM and its relatives have /version, llama.cpp /props; a server without them says nothing."""
    for path, key in (("/version", "version"), ("/props", "build_info")):
        try:
            reply = http.get(address.url + path)
        except httpx.HTTPError:
            continue
        if reply.status_code == 200 and isinstance(value := _object(reply).get(key), str):
            return {"version": value}
    return {}


def _object(reply: httpx.Response) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _tried(target: Target, timeout_s: float) -> Target:
    """One short request; without usage where the server refuses to be asked for it."""
    record = asyncio.run(_probe(target.endpoint, timeout_s))
    if record.error is not None and "stream_options" in record.error:
        e = target.endpoint
        target.endpoint = Endpoint(e.url, e.model, e.headers, e.extra, include_usage=False)
        record = asyncio.run(_probe(target.endpoint, timeout_s))
    if record.fingerprint:
        target.facts["system_fingerprint"] = record.fingerprint
    if record.error is None:
        return target
    where = f"{target.name} at {target.endpoint.url}"
    if record.error.startswith("HTTP 404"):
        raise ModelNotFoundError(
            f"{where} does not serve {target.endpoint.model!r:.160} ({record.error}); name another: "
            f"{target.name}={target.endpoint.url}#MODEL"
        )
    raise EngineError(f"{where} can't answer a short request: {record.error}")


async def _probe(endpoint: Endpoint, timeout_s: float) -> Record:
    messages = [{"role": "user", "content": "Say one word."}]
    async with new_http(endpoint.url) as http:
        return await ask(http, endpoint, messages, 4, Record("probe", "probe", 0, 0), timeout_s=timeout_s)
