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
NOT_SETTINGS = frozenset(
    {"API_KEY", "BLAS", "CONFIG", "KERNELS_CXXFLAGS", "KERNELS_DIR", "KERNELS_ISA", "THREADS"},
)
"""MLXINFER_ variables that are read elsewhere: by server.run, runtime.preload_blas, config_path and the CPU kernels."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a user can set for good. Each field is a key of config.toml and an MLXINFER_ variable."""

    model: str | None = None
    """The model of `run` and `serve` when none is named."""
    host: str = "127.0.0.1"
    port: int = 8080
    cache_dir: Path = Path(platformdirs.user_cache_dir("mlxinfer"))
    """Models out of packages and other things that can be fetched or made again."""
    data_dir: Path = Path(platformdirs.user_data_dir("mlxinfer"))
    """Conversations: what cannot be made again."""
    dtype: str = "auto"
    """auto, float32, float16 or bfloat16. auto: float32 on a CPU, the model's own elsewhere."""
    kernels: str = "auto"
    """auto or on: kernels of our own where mlx computes on a CPU and they can be had; off: mlx's alone."""
    max_num_seqs: int = 32
    """Sequences decoded together at most."""
    max_queue: int = 256
    """Requests that may wait before new ones are refused."""
    prefill_chunk: int = 512
    """Prompt tokens per prefill step at most."""
    kv_bits: int | None = None
    """Hold keys and values in 8 or 4 bits; None: as they are."""
    context_length: int | None = None
    """A limit below the model's own."""
    memory_mb: int | None = None
    """MiB for weights, contexts and idle prefixes together; None: what this machine gives to models."""
    prefix_cache_mb: int | None = None
    """MiB for idle prefixes in memory; 0: none; None: what is spare."""
    prefix_disk_mb: int | None = None
    """MiB for idle prefixes on disk, of all models together; None: 4096 for `serve`, none elsewhere."""
    adapters: tuple[str, ...] = ()
    """What `serve` offers beside its models: NAME=FOLDER, or MODEL:NAME=FOLDER where it serves several."""
    adapter_mb: int = 1024
    """MiB for the adapters of one model in memory; the least recently used go."""
    wired_limit_mb: int | None = None
    """MiB that macOS may not swap out; None: what mlx recommends; 0: none. Of no effect elsewhere."""
    keep_alive: int | None = None
    """Seconds without a request after which `serve` unloads a model; None: not before others need its memory."""
    allow_hosts: tuple[str, ...] = ()
    """Names in the Host header that `serve` answers to, besides its own; a variable separates them by commas."""
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages that may call `serve`."""
    keys_file: Path | None = None
    """API keys of `serve` with their names and limits."""
    access_log: str = "stderr"
    """Where `serve` writes a line for each request: stderr, off, or a file."""
    metrics_open: bool = False
    """/metrics needs no API key."""
    max_body_mb: int = 10
    """Largest body of a request in MiB."""
    body_timeout: int = 60
    """Seconds a client may take to send a request's headers, and its body."""
    grace: int = 30
    """Seconds that requests may go on after SIGTERM."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, _coerce(field.name, value, "Settings"))
        _check(self)


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """MLXINFER_CONFIG, or $XDG_CONFIG_HOME/mlxinfer/config.toml, or ~/.config/mlxinfer/config.toml, macOS included."""
    env = os.environ if environ is None else environ
    if explicit := env.get("MLXINFER_CONFIG"):
        return Path(explicit)
    base = env.get("XDG_CONFIG_HOME") or "~/.config"
    return expand_user(base, "the folder of config.toml (XDG_CONFIG_HOME)") / "mlxinfer" / "config.toml"


def expand_user(text: str, setting: str, *, param: str | None = None) -> Path:
    """`text` as a path with a leading ~ or ~user put in. Raises InvalidRequestError, which names the `setting`."""
    if "\0" in text:
        raise InvalidRequestError(f"{setting} must be a path, not {text!r:.80}", param=param)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no user of that name, or no HOME and no entry in the list of users
        raise InvalidRequestError(f"{setting} is {text!r:.80}: that home folder is not known", param=param) from error


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Settings:
    """Resolve the settings. `flags` holds command-line values; None there means "not given".

    Raises InvalidRequestError for an unknown key, a value of the wrong kind, a file that is not TOML or a file that
    MLXINFER_CONFIG names and that isn't there.
    """
    env = os.environ if environ is None else environ
    values = _from_file(path or config_path(env), must_exist=_names_file(path, env)) | _from_environ(env)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = _coerce(name, value, "command line")
    return Settings(**values)


def override(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with some fields replaced and checked; the environment is not asked again."""
    return dataclasses.replace(settings, **{name: _coerce(name, value, "load") for name, value in changes.items()})


def source_of(key: str, *, environ: Mapping[str, str] | None = None, path: Path | None = None) -> str | None:
    """What sets `key`: "$MLXINFER_KEY", the file's path, or None where neither does. Raises as load_settings does."""
    env = os.environ if environ is None else environ
    if key in _from_environ(env):
        return f"${ENV_PREFIX}{key.upper()}"
    file = path or config_path(env)
    return str(file) if key in _from_file(file, must_exist=_names_file(path, env)) else None


def _names_file(path: Path | None, env: Mapping[str, str]) -> bool:
    return path is None and bool(env.get("MLXINFER_CONFIG"))


def _fields() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def _from_file(file: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except IsADirectoryError:
        raise InvalidRequestError(f"{file} is a directory; the configuration is a file, config.toml") from None
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise InvalidRequestError(f"$MLXINFER_CONFIG names {file}, and there is no such file") from None
        return {}
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequestError(f"{file} cannot be read as TOML: {error}") from error
    return {key: _coerce(key, value, str(file), folder=file.parent, typed=True) for key, value in table.items()}


def _from_environ(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, text in env.items():
        name = key.removeprefix(ENV_PREFIX)
        if name != key and name not in NOT_SETTINGS and text != "":
            values[name.lower()] = _coerce(name.lower(), text, f"${key}")
    return values


def _coerce(name: str, value: Any, where: str, *, folder: Path | None = None, typed: bool = False) -> Any:
    """The value as the field has it. A relative path is below `folder`, by default the current one.

    `typed`: the source knows numbers, so that a text in place of one is a mistake; a variable is always text.
    """
    hints = _fields()
    if name not in hints:
        raise InvalidRequestError(f"{where}: unknown setting {name!r}; known: {', '.join(hints)}", param=name)
    kind = hints[name]
    if typing.get_origin(kind) is tuple:
        return _strings(name, value, where)
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    wanted = next(k for k in kinds if k is not type(None))
    if wanted is Path and isinstance(value, str | Path):
        return Path(os.path.abspath((folder or Path()) / expand_user(str(value), f"{where}: {name}", param=name)))
    if wanted is int and isinstance(value, str) and not typed:
        try:
            return int(value)
        except ValueError:
            raise InvalidRequestError(f"{where}: {name} must be an integer, not {value!r:.80}", param=name) from None
    if wanted is bool:
        return _flag(name, value, where, typed=typed)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise InvalidRequestError(f"{where}: {name} must be {wanted.__name__}, not {value!r:.80}", param=name)
    return value


def _strings(name: str, value: Any, where: str) -> tuple[str, ...]:
    """A list of strings; a text holds them separated by commas."""
    items: list[Any] | None = None
    if isinstance(value, str):
        items = [item.strip() for item in value.split(",") if item.strip()]
    elif isinstance(value, list | tuple):
        items = [*value]  # pyright: ignore[reportUnknownArgumentType]
    if items is None or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(f"{where}: {name} must be a list of strings, not {value!r:.80}", param=name)
    return tuple(items)


def _flag(name: str, value: Any, where: str, *, typed: bool) -> bool:
    words = {"1": True, "true": True, "0": False, "false": False}
    if isinstance(value, str) and not typed and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{where}: {name} must be true or false, not {value!r:.80}", param=name)
    return value


def _check(s: Settings) -> None:
    if s.dtype not in ("auto", "float32", "float16", "bfloat16"):
        raise InvalidRequestError(f"dtype is {s.dtype!r}; it must be auto, float32, float16 or bfloat16", param="dtype")
    if s.kernels not in ("auto", "on", "off"):
        raise InvalidRequestError(f"kernels is {s.kernels!r}; it must be auto, on or off", param="kernels")
    if s.kv_bits not in (None, 8, 4):
        raise InvalidRequestError(f"kv_bits is {s.kv_bits}; it must be 8 or 4", param="kv_bits")
    limits = {
        "port": (s.port, 0, 65535),
        "max_num_seqs": (s.max_num_seqs, 1, 1024),
        "max_queue": (s.max_queue, 1, 100_000),
        "prefill_chunk": (s.prefill_chunk, 1, 65536),
        "context_length": (1 if s.context_length is None else s.context_length, 1, 2**31 - 1),
        "memory_mb": (64 if s.memory_mb is None else s.memory_mb, 64, 2**31 - 1),
        "adapter_mb": (s.adapter_mb, 1, 2**31 - 1),
        "wired_limit_mb": (s.wired_limit_mb or 0, 0, 2**31 - 1),
        "prefix_cache_mb": (s.prefix_cache_mb or 0, 0, 2**31 - 1),
        "prefix_disk_mb": (s.prefix_disk_mb or 0, 0, 2**31 - 1),
        "keep_alive": (s.keep_alive or 0, 0, 2**31 - 1),
        "max_body_mb": (s.max_body_mb, 1, 256),
        "body_timeout": (s.body_timeout, 1, 3600),
        "grace": (s.grace, 0, 3600),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value}; it must be between {low} and {high}", param=name)


def as_dict(settings: Settings) -> dict[str, Any]:
    """The settings as JSON-ready values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(settings).items()}
