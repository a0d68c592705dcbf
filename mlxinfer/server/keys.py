"""API keys: whose they are, what each may do, and how much of that is used up."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import time
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
MAX_LIMIT = 10**9
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LIMITS = ("requests_per_minute", "max_concurrent", "max_tokens_per_minute")
_FIELDS = frozenset({"name", "key", "sha256", "models", *LIMITS})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and its limits; None: no limit."""

    name: str
    """Goes to the access log, and keeps one key's cached prefixes apart from another's."""
    digest: bytes
    """SHA-256 of the key; the key itself is not kept."""
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    max_tokens_per_minute: int | None = None
    """Prompt and completion together. They are counted when a request ends, so the last one may go over."""
    models: frozenset[str] | None = None
    """Served names; others do not exist for this key."""

    @classmethod
    def of(cls, name: str, secret: str, **limits: Any) -> ApiKey:
        return cls(name, digest_of(secret), **limits)

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models


def digest_of(secret: str) -> bytes:
    """SHA-256 of a key. Latin-1 is how the bytes of a header were decoded."""
    return hashlib.sha256(secret.encode("latin-1", "replace")).digest()


class Bucket:
    """So much per minute: it fills steadily, holds a minute's worth, and may be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._size = per_minute
        self._level = float(per_minute)
        self._at = now

    def lack_s(self, amount: float, now: float) -> float:
        """Seconds until there is `amount` in it; 0: now."""
        self._level = min(self._size, self._level + (now - self._at) * self._size / 60)
        self._at = now
        return max(0.0, (amount - self._level) * 60 / self._size)

    def take(self, amount: float) -> None:
        self._level -= amount


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)


class Allowance:
    """What is left of one key's limits. Lives on the event loop."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._running = 0
        self._requests = _bucket(key.requests_per_minute, clock())
        self._tokens = _bucket(key.max_tokens_per_minute, clock())

    def enter(self) -> None:
        """Count a request in. Raises HttpError 429, and then it does not count."""
        key, now = self.key, self._clock()
        if key.max_concurrent is not None and self._running >= key.max_concurrent:
            raise _exceeded(key, "max_concurrent", f"{key.max_concurrent} requests at a time", 1.0)
        if self._tokens and (wait := self._tokens.lack_s(1, now)):
            raise _exceeded(key, "max_tokens_per_minute", f"{key.max_tokens_per_minute} tokens a minute", wait)
        if self._requests:
            if wait := self._requests.lack_s(1, now):
                raise _exceeded(key, "requests_per_minute", f"{key.requests_per_minute} requests a minute", wait)
            self._requests.take(1)
        self._running += 1

    def leave(self) -> None:
        self._running -= 1

    def spend(self, tokens: int) -> None:
        if self._tokens:
            self._tokens.lack_s(0, self._clock())
            self._tokens.take(tokens)


def _exceeded(key: ApiKey, limit: str, words: str, wait_s: float) -> HttpError:
    headers = {"retry-after": str(int(wait_s) + 1)}
    message = f"the key {key.name!r} may make {words} ({limit}); try again in {int(wait_s) + 1} s"
    return HttpError(429, message, code="key_limit", headers=headers)


class Keyring:
    """All keys of a server, and what is left of each one's limits."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._allowances = [Allowance(key) for key in keys]

    def __len__(self) -> int:
        return len(self._allowances)

    def find(self, secret: str) -> Allowance | None:
        """The allowance of a key. It takes the same time whichever key it is, and wherever a wrong one differs."""
        given, found = digest_of(secret), None
        for allowance in self._allowances:
            if hmac.compare_digest(allowance.key.digest, given):
                found = allowance
        return found


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a TOML file that only its owner can read: tables [[key]] with `name`, and `key` or `sha256`.

    Raises InvalidRequestError that names the file, the key and the field.
    """
    try:
        table = tomllib.loads(_read_private(path))
    except OSError as error:
        raise _bad(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _bad(f"{path} cannot be read as TOML: {error}") from error
    if unknown := next((name for name in table if name != "key"), None):
        raise _bad(f"{path}: unknown entry {unknown!r:.80}; each key is a table [[key]]")
    entries = table.get("key")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_KEYS:
        raise _bad(f"{path} must hold 1 to {MAX_KEYS} tables [[key]]")
    keys = tuple(_parse(entry, f"{path}: key {i + 1}") for i, entry in enumerate(entries))
    for what, values in (("name", [k.name for k in keys]), ("key", [k.digest for k in keys])):
        if len(set(values)) != len(values):
            raise _bad(f"{path}: two keys have the same {what}")
    return keys


def _read_private(path: Path) -> str:
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
            raise _bad(f"{path} must be a file of at most {MAX_FILE_BYTES:,} bytes")
        if info.st_mode & (0o037 if _is_credential(path) else 0o077):
            raise _bad(f"{path} can be read by others (mode {stat.S_IMODE(info.st_mode):o}): chmod 600 {path}")
        return file.read(MAX_FILE_BYTES).decode("utf-8")


def _is_credential(path: Path) -> bool:
    """Whether systemd gave the file to this service: to its user alone, by an ACL that shows as the group's right to
    read (LoadCredential= with User=)."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(folder) and path.parent == type(path)(folder)


def _parse(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise _bad(f"{where} must be a table [[key]]")
    if unknown := next((name for name in entry if name not in _FIELDS), None):
        raise _bad(f"{where}: unknown field {unknown!r:.80}; known: {', '.join(sorted(_FIELDS))}")
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _bad(f"{where}: name must be 1 to 64 letters, digits and . _ -, not {name!r:.80}")
    for limit in LIMITS:
        value = entry.get(limit, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LIMIT:
            raise _bad(f"{where} ({name}): {limit} must be an integer from 1 to {MAX_LIMIT}, not {value!r:.80}")
    models = entry.get("models")
    if models is not None and not (isinstance(models, list) and models and all(isinstance(m, str) for m in models)):
        raise _bad(f"{where} ({name}): models must be a list of served names")
    return ApiKey(
        name,
        _digest(entry, f"{where} ({name})"),
        **{limit: entry.get(limit) for limit in LIMITS},
        models=None if models is None else frozenset(models),
    )


def _digest(entry: dict[str, Any], where: str) -> bytes:
    if ("key" in entry) == ("sha256" in entry):
        raise _bad(f"{where}: give either key or sha256")
    secret, digest = entry.get("key"), entry.get("sha256")
    if "key" in entry:
        # The value is a secret: no message shows it.
        if not isinstance(secret, str) or not secret or not (secret.isascii() and secret.isprintable()):
            raise _bad(f"{where}: key must be printable ASCII")
        return digest_of(secret)
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise _bad(f"{where}: sha256 must be 64 hexadecimal digits")
    return bytes.fromhex(digest)


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="keys_file")
