"""Settings, resolved once and then frozen: flag > MLXINFER_* > config.toml > default. An unknown key is an error."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from mlxinfer.errors import InvalidRequestError

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PREFIX = "MLXINFER_"
NOT_SETTINGS = frozenset({"API_KEY", "BLAS", "CONFIG"})
"""MLXINFER_ variables that are read elsewhere: by server.run, runtime.preload_blas and config_path."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a user can set for good. Each field is a key of config.toml and an MLXINFER_ variable."""

    model: str | None = None
    """The model of `run` and `serve` when none is named."""
    host: str = "127.0.0.1"
    port: int = 8080
    cache_dir: Path = Path(platformdirs.user_cache_dir("mlxinfer"))
    """Models out of packages and other things that can be fetched or made again."""
    dtype: str = "auto"
    """auto, float32, float16 or bfloat16. auto: float32 on a CPU, the model's own elsewhere."""
    max_num_seqs: int = 32
    """Sequences decoded together at most."""
    max_queue: int = 256
    """Requests that may wait before new ones are refused."""
    prefill_chunk: int = 512
    """Prompt tokens per prefill step at most."""
    context_length: int | None = None
    """A limit below the model's own."""


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """MLXINFER_CONFIG, or $XDG_CONFIG_HOME/mlxinfer/config.toml, or ~/.config/mlxinfer/config.toml, macOS included."""
    env = os.environ if environ is None else environ
    if explicit := env.get("MLXINFER_CONFIG"):
        return Path(explicit)
    base = env.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "mlxinfer" / "config.toml"


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Settings:
    """Resolve the settings. `flags` holds command-line values; None there means "not given".

    Raises InvalidRequestError for an unknown key, a value of the wrong kind or a file that is not TOML.
    """
    env = os.environ if environ is None else environ
    file = path or config_path(env)
    values = _from_file(file) | _from_environ(env)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = _coerce(name, value, "command line")
    settings = Settings(**values)
    _check(settings)
    return settings


def _fields() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequestError(f"{file} cannot be read as TOML: {error}") from error
    return {key: _coerce(key, value, str(file)) for key, value in table.items()}


def _from_environ(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, text in env.items():
        name = key.removeprefix(ENV_PREFIX)
        if name != key and name not in NOT_SETTINGS and text != "":
            values[name.lower()] = _coerce(name.lower(), text, f"${key}")
    return values


def _coerce(name: str, value: Any, where: str) -> Any:
    hints = _fields()
    if name not in hints:
        raise InvalidRequestError(f"{where}: unknown setting {name!r}; known: {', '.join(hints)}", param=name)
    kind = hints[name]
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    wanted = next(k for k in kinds if k is not type(None))
    if wanted is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if wanted is int and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise InvalidRequestError(f"{where}: {name} must be an integer, not {value!r:.80}", param=name) from None
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise InvalidRequestError(f"{where}: {name} must be {wanted.__name__}, not {value!r:.80}", param=name)
    return value


def _check(s: Settings) -> None:
    if s.dtype not in ("auto", "float32", "float16", "bfloat16"):
        raise InvalidRequestError(f"dtype is {s.dtype!r}; it must be auto, float32, float16 or bfloat16", param="dtype")
    limits = {
        "port": (s.port, 0, 65535),
        "max_num_seqs": (s.max_num_seqs, 1, 1024),
        "max_queue": (s.max_queue, 1, 100_000),
        "prefill_chunk": (s.prefill_chunk, 1, 65536),
        "context_length": (1 if s.context_length is None else s.context_length, 1, 2**31 - 1),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value}; it must be between {low} and {high}", param=name)


def as_dict(settings: Settings) -> dict[str, Any]:
    """The settings as JSON-ready values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(settings).items()}
