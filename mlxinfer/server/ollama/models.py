"""What Ollama's clients ask about models: which there are, which are loaded, what they can do."""

from __future__ import annotations

import datetime
import hashlib
from typing import TYPE_CHECKING, Any, cast

from mlxinfer.server.prompting import format_of

if TYPE_CHECKING:
    from mlxinfer.llm import LLM
    from mlxinfer.pool import ModelStatus
    from mlxinfer.server.state import ServerState
    from mlxinfer.types import ModelInfo

LATEST = ":latest"
FOREVER = datetime.timedelta(days=365 * 100)
"""How far away the end of a model that stays is said to be; the field has to hold a time."""


def registered_name(state: ServerState, name: str | None) -> str:
    """The served name that a client means: Ollama's add :latest to a name without a tag.

    Raises what `ServerState.served_name` raises.
    """
    here = state.names()  # and not all there are: an error's words must not tell of models that a key may not use
    if name is not None and name not in here:
        bare = name.removesuffix(LATEST)
        name = bare if bare in here else name
    return state.served_name(name)


def tags(state: ServerState) -> list[dict[str, Any]]:
    """Every registered model."""
    when = _rfc3339(datetime.datetime.fromtimestamp(state.started, datetime.UTC))
    return [
        {**_identity(name, status), "modified_at": when, "details": details(status.info)}
        for name, status in state.statuses().items()
    ]


def loaded(state: ServerState) -> list[dict[str, Any]]:
    """Those in memory, and when each will be unloaded if nobody uses it."""
    now = datetime.datetime.now(datetime.UTC)
    found: list[dict[str, Any]] = []
    for name, status in state.statuses().items():
        if status.state != "loaded":
            continue
        left = FOREVER
        if status.keep_s is not None:
            left = datetime.timedelta(seconds=max(0.0, status.keep_s - (status.idle_s or 0.0)))
        found.append(
            {
                **_identity(name, status),
                "details": details(status.info),
                "expires_at": _rfc3339(now + left),
                "size_vram": status.bytes,
                "context_length": 0 if status.info is None else status.info.context_length,
            }
        )
    return found


def show(state: ServerState, name: str) -> dict[str, Any]:
    """What is known of a model; before it was first loaded that is little."""
    info = state.statuses()[name].info
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "license": "",
        "modified_at": _rfc3339(datetime.datetime.fromtimestamp(state.started, datetime.UTC)),
        "details": details(info),
        "model_info": {} if info is None else _model_info(info),
        "capabilities": _capabilities(state, name),
    }


def details(info: ModelInfo | None) -> dict[str, Any]:
    """The short description."""
    family = "" if info is None else info.model_type
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if info is None else _parameters(info.num_parameters),
        "quantization_level": "" if info is None else info.quantization,
    }


def _model_info(info: ModelInfo) -> dict[str, Any]:
    kind = info.model_type
    return {
        "general.architecture": kind,
        "general.parameter_count": info.num_parameters,
        f"{kind}.context_length": info.context_length,
        f"{kind}.vocab_size": info.vocab_size,
    }


def _capabilities(state: ServerState, name: str) -> list[str]:
    held = state.models.model(name)
    if held is None:
        return ["completion"]
    if held.info.makes != "text":
        return ["embedding"]
    llm = cast("LLM", held)
    form = format_of(llm)
    # Tools work without a template for them: the server describes them and forces the calls.
    able = ["completion", "tools"] if llm.info.has_chat_template else ["completion"]
    return [*able, "thinking"] if form.has_reasoning else able


def _identity(name: str, status: ModelStatus) -> dict[str, Any]:
    # Models are stored by name here; clients show a digest's first digits and compare them.
    digest = hashlib.sha256(name.encode()).hexdigest()
    size = status.bytes or (0 if status.info is None else status.info.weight_bytes)
    return {"name": name, "model": name, "size": size, "digest": digest}


def _parameters(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _rfc3339(when: datetime.datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
