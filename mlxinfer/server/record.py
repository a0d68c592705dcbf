"""What one HTTP request is and came to, for the access log, the metrics and its key's limits. Never its content."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

    from mlxinfer.server.keys import Allowance, ApiKey
    from mlxinfer.types import Usage

SCOPE_KEY = "mlxinfer.record"
BROKEN_KEY = "mlxinfer.broken"
"""In the scope of a request whose body turned out to be no HTTP: the status that its connection was closed with."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class RequestRecord:
    """Filled while the request is answered."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """The client's x-request-id where it sent a proper one; goes back in the answer."""
    start: float = field(default_factory=time.perf_counter)
    allowance: Allowance | None = None
    """Of the API key it came with; None where the server has no keys."""
    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    """The code of what went wrong, also when that was after the status line."""
    allow: str | None = None
    """Of a refusal: the flag or the header that would have allowed it."""
    status: int | None = None
    sent: int = 0
    """Bytes of the answer's body."""
    ended: bool = False
    """The whole answer was sent."""
    left: bool = False
    """The client left before that."""

    @property
    def key(self) -> ApiKey | None:
        return None if self.allowance is None else self.allowance.key

    def add(self, model: str, usage: Usage) -> None:
        """Count what one choice used."""
        self.model = model
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        if self.allowance is not None:
            self.allowance.spend(usage.total_tokens)


def record_of(scope: Scope) -> RequestRecord:
    """The record of a request; a new one where no access log stands in front."""
    record = scope.get(SCOPE_KEY)
    if record is None:
        record = scope[SCOPE_KEY] = RequestRecord()
    return record


def note_error(scope: Scope, error: BaseException) -> None:
    """Remember what went wrong."""
    record_of(scope).error = getattr(error, "code", "internal_error")


def request_id(sent: str | None) -> str:
    """The client's id if it is one that can be printed anywhere, else a new one."""
    return sent if sent is not None and _REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)
