"""Will it fit, how long a context, how fast: weights, cache and bandwidth, before anything is downloaded."""

from __future__ import annotations

import dataclasses
import os
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer import runtime
from mlxinfer.errors import InvalidRequestError, ModelFileError, ModelNotFoundError
from mlxinfer.zoo.cards import card_of
from mlxinfer.zoo.checks import read_config
from mlxinfer.zoo.entries import DEMO, CacheShape, CatalogEntry, catalog, find_entry
from mlxinfer.zoo.files import human_bytes
from mlxinfer.zoo.names import parse_name
from mlxinfer.zoo.resolver import find_local, resolve
from mlxinfer.zoo.shapes import cache_bytes, context_of, count_of, largest_context, shape_from_config

if TYPE_CHECKING:
    from mlxinfer.config import Settings

CHIPS_FILE = Path(__file__).with_name("chips.toml")
DEFAULT_CONTEXT = 8192
COMFORT = 0.85
"""Up to this share of the budget the answer is yes; above it, tight."""
OVERHEAD = 512 << 20
"""Activations of a prefill chunk, logits, tokenizer and the process itself."""
CHIP_EFFICIENCY = 0.70
"""Share of a chip's published bandwidth that decoding reaches; public reports of mlx-lm lie between 0.6 and 0.85."""
MEASURED_EFFICIENCY = 0.70
"""Share of a bare matrix-vector product's bandwidth; the rest goes to attention, norms, sampling and Python."""
PROBE_ROWS, PROBE_COLUMNS = 8192, 4096
READING_SPEED = 10.0
"""Tokens per second below which a model is no pleasure to chat with, so it is not chosen by default."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a prediction needs to know about a model, from the catalogue or from its files."""

    name: str
    weight_bytes: int
    parameters: int
    active_parameters: int
    context: int
    cache: CacheShape
    packed: bool
    """Quantized weights."""
    generates: bool = True
    """False for an embedding model: it keeps no cache and has no decode speed."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """Bytes, tokens and tokens per second; predictions, with what they rest on."""

    name: str
    verdict: Literal["yes", "tight", "no"]
    context: int
    """Tokens this was computed for."""
    max_context: int
    """The longest context that fits beside the weights; 0 when not even the weights do."""
    model_context: int
    weight_bytes: int
    cache_bytes: int
    overhead_bytes: int
    total_bytes: int
    budget_bytes: int
    """What weights and caches together may take on this machine."""
    available_bytes: int
    """Free now; other programs hold the rest."""
    tok_s: float
    """Predicted decode speed of one stream with the context full; 0 when it doesn't fit or doesn't generate."""
    bandwidth_gb_s: float
    bandwidth_source: str
    efficiency: float
    loaded_as: str
    """How the weights lie in memory here, for example "as stored" or "float32"."""
    advice: tuple[str, ...]
    """What would fit, most useful first; empty when the answer is yes."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def fit(
    name: str | CatalogEntry,
    settings: Settings,
    *,
    context: int | None = None,
    memory: runtime.Memory | None = None,
    bandwidth: tuple[float, str] | None = None,
    on_cpu: bool | None = None,
) -> FitReport:
    """Predict memory and speed of a model, on this machine or on one that `memory` and `bandwidth` describe.

    `bandwidth` is (GB/s, where the figure comes from). Raises ModelNotFoundError or OfflineError when the size cannot
    be known, InvalidRequestError for a context out of range.
    """
    sizes = entry_sizes(name) if isinstance(name, CatalogEntry) else _sizes(name, settings)
    limit = min(sizes.context or 2**20, settings.context_length or 2**31)
    wanted = min(DEFAULT_CONTEXT, limit) if context is None else context
    if not 1 <= wanted <= limit:
        raise InvalidRequestError(f"context is {wanted}; {sizes.name} takes 1 to {limit} tokens", param="context")
    mem = memory or runtime.memory()
    cpu = runtime.on_cpu() if on_cpu is None else on_cpu
    weight_bytes, element, loaded_as = _in_memory(sizes, settings, cpu, mem.budget)
    kv = cache_bytes(sizes.cache, wanted, bytes_per_element=element)
    total = weight_bytes + kv + OVERHEAD
    room = mem.budget - weight_bytes - OVERHEAD
    verdict: Literal["yes", "tight", "no"] = (
        "no" if total > mem.budget else "tight" if total > COMFORT * mem.budget or total > mem.available else "yes"
    )
    gb_s, source = bandwidth or measured_bandwidth()
    efficiency = CHIP_EFFICIENCY if source.startswith("Apple") else MEASURED_EFFICIENCY
    read = weight_bytes * sizes.active_parameters / max(1, sizes.parameters) + kv
    report = FitReport(
        name=sizes.name,
        verdict=verdict,
        context=wanted,
        max_context=largest_context(sizes.cache, room, limit, bytes_per_element=element) if room >= 0 else 0,
        model_context=sizes.context,
        weight_bytes=weight_bytes,
        cache_bytes=kv,
        overhead_bytes=OVERHEAD,
        total_bytes=total,
        budget_bytes=mem.budget,
        available_bytes=mem.available,
        tok_s=0.0 if verdict == "no" or not sizes.generates else round(gb_s * 1e9 * efficiency / max(1.0, read), 1),
        bandwidth_gb_s=round(gb_s, 1),
        bandwidth_source=source,
        efficiency=efficiency,
        loaded_as=loaded_as,
        advice=(),
    )
    return dataclasses.replace(report, advice=_advice(report, sizes))


def choose_default(
    settings: Settings,
    *,
    memory: runtime.Memory | None = None,
    bandwidth: tuple[float, str] | None = None,
    on_cpu: bool | None = None,
) -> CatalogEntry:
    """The largest chat model of the catalogue that fits well and answers at reading speed; else the demo.

    Counted by all parameters: of two that fit, the larger one knows more, and a mixture of experts is fast besides.
    Models made for code alone and superseded ones are left to those who name them.
    """
    mem = memory or runtime.memory()
    speed = bandwidth or measured_bandwidth()
    best = find_entry(DEMO)
    assert best is not None, "the catalogue has the demo"
    for entry in catalog():
        if not entry.can("chat") or entry.can("code") or entry.superseded or entry.parameters <= best.parameters:
            continue
        report = fit(entry, settings, memory=mem, bandwidth=speed, on_cpu=on_cpu)
        if report.verdict == "yes" and report.tok_s >= READING_SPEED:
            best = entry
    return best


def entry_sizes(entry: CatalogEntry) -> Sizes:
    return Sizes(
        name=entry.alias,
        weight_bytes=entry.size_bytes,
        parameters=entry.parameters,
        active_parameters=entry.active_parameters or entry.parameters,
        context=entry.context,
        cache=entry.cache,
        packed=entry.bits < 15,
        generates=not entry.can("embedding"),
    )


def _sizes(name: str, settings: Settings) -> Sizes:
    """Sizes of a name: files on this machine tell best, then the catalogue, then the hub's own figures."""
    parsed = parse_name(name)
    entry = find_entry(name) or next((e for e in catalog() if parsed.kind == "hub" and e.hub == parsed.repo), None)
    local = find_local(parsed, settings) if parsed.kind != "unknown" else None
    if local is not None:
        card = card_of(local)
        generates = "embedding" not in card.capabilities
        share = (entry.active_parameters or entry.parameters) / entry.parameters if entry else 1.0
        return Sizes(
            name=name,
            weight_bytes=card.size_bytes,
            parameters=card.parameters,
            active_parameters=int(card.parameters * share),
            context=card.context_length,
            cache=card.cache if generates else CacheShape(),
            packed=card.size_bytes * 8 < card.parameters * 15,
            generates=generates,
        )
    if entry is not None:
        return dataclasses.replace(entry_sizes(entry), name=name)
    if parsed.kind == "hub" and not parsed.file:
        return _sizes_on_hub(name, parsed.repo, parsed.revision)
    resolve(name, settings, fetch=False)  # raises, with what to do
    raise ModelNotFoundError(f"the size of {name!r:.160} is not known; pull it first")


def _sizes_on_hub(name: str, repo: str, revision: str) -> Sizes:
    """Config and file sizes of a repository, without its weights."""
    from mlxinfer.zoo.hub import peek

    path, weight_bytes = peek(repo, revision)
    config = read_config(path)
    shape = shape_from_config(config)
    if weight_bytes == 0 or shape.layers == 0:
        raise ModelFileError(f"{repo} does not say how large it is (no safetensors or no num_hidden_layers)")
    quantization = config.get("quantization") or config.get("quantization_config")
    bits = count_of(quantization, "bits") if isinstance(quantization, dict) else 0
    # 16-bit group scales and biases add half a bit per weight in groups of 64.
    per_weight = bits + 0.5 if 1 <= bits < 16 else 16.0
    parameters = int(weight_bytes * 8 / per_weight)
    return Sizes(
        name=name,
        weight_bytes=weight_bytes,
        parameters=parameters,
        active_parameters=parameters,
        context=context_of(config),
        cache=shape,
        packed=per_weight < 15,
    )


def _in_memory(sizes: Sizes, settings: Settings, cpu: bool, budget: int) -> tuple[int, int, str]:
    """(bytes of the weights in memory, bytes per cache element, in words).

    A GPU computes on the weights as stored, and so does a CPU with the kernels, in float32. Without them half precision
    runs element by element, so weights become float32, packed ones too where memory allows (docs/kernels.md).
    """
    from mlxinfer import kernels

    dtype = settings.dtype if settings.dtype != "auto" else "float32" if cpu else "float16"
    element = 4 if dtype == "float32" else 2
    if not cpu:
        return sizes.weight_bytes, element, "as stored"
    if dtype == "float32" and kernels.expected(settings):
        return sizes.weight_bytes, element, "as stored, computed in float32"
    unpacked = sizes.parameters * element
    if sizes.packed and unpacked + OVERHEAD > COMFORT * budget:
        return sizes.weight_bytes, element, "as stored (too large to unpack)"
    return unpacked, element, dtype


def _advice(report: FitReport, sizes: Sizes) -> tuple[str, ...]:
    if report.verdict == "yes":
        return ()
    lines: list[str] = []
    if report.verdict == "tight" and report.total_bytes > report.available_bytes:
        lines.append(
            f"{human_bytes(report.available_bytes)} are free now and {human_bytes(report.total_bytes)} are needed: "
            f"close other programs first"
        )
    if report.verdict == "no" and report.max_context >= 1:
        lines.append(f"it fits with a context of {report.max_context} tokens: --ctx {report.max_context}")
    ratio = report.weight_bytes / max(1, sizes.weight_bytes)
    entry = find_entry(sizes.name) or next((e for e in catalog() if e.hub == sizes.name), None)
    room = COMFORT * report.budget_bytes - OVERHEAD
    fitting = [
        e
        for e in catalog()
        if e.can("chat")
        and e.alias != sizes.name
        and e.size_bytes * ratio + cache_bytes(e.cache, min(report.context, e.context)) <= room
        and e.size_bytes < sizes.weight_bytes
    ]
    family = [e for e in fitting if entry and e.family == entry.family]
    for e in sorted(family or fitting, key=lambda e: -e.parameters)[:2]:
        lines.append(f"{e.alias} ({human_bytes(e.size_bytes)}) fits")
    if report.verdict == "no" and not sizes.packed:
        quarter = int(sizes.parameters * 4.5 / 8)
        if quarter + OVERHEAD + report.cache_bytes <= report.budget_bytes:
            lines.append(f"quantized to 4 bits it takes {human_bytes(quarter)} and fits")
    return tuple(lines) or ("no chat model of the catalogue fits with this context",)


@cache
def chip_bandwidth(chip: str, cpu_cores: int | None) -> float | None:
    """GB/s of an Apple chip by its name, or None when the table doesn't have it."""
    rows = [r for r in tomllib.loads(CHIPS_FILE.read_text(encoding="utf-8"))["chip"] if r["name"] == chip]
    exact = [r for r in rows if r.get("cpu_cores") == cpu_cores]
    plain = [r for r in rows if "cpu_cores" not in r]
    row = next(iter(exact + plain), None)
    return float(row["gb_s"]) if row else None


@cache
def measured_bandwidth() -> tuple[float, str]:
    """(GB/s, source): the table for an Apple chip, else a matrix-vector product of 134 MB timed once (0.2 s)."""
    chip = runtime.chip_name()
    if chip and (known := chip_bandwidth(chip, os.cpu_count())):
        return known, f"{chip}, published"
    import mlx.core as mx

    matrix = mx.ones((PROBE_ROWS, PROBE_COLUMNS), dtype=mx.float32)
    vector = mx.ones((PROBE_COLUMNS, 1), dtype=mx.float32)
    mx.eval(matrix, vector, matrix @ vector)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        mx.eval(matrix @ vector)
        best = min(best, time.perf_counter() - started)
    return PROBE_ROWS * PROBE_COLUMNS * 4 / best / 1e9, "measured here"
