"""What the figures rest on: this machine, its memory bandwidth, and the bytes that a decode step has to read."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer import __version__, runtime
from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    from mlxinfer.config import Settings

PROBE_BYTES = 1 << 27
PROBES = 5


def machine() -> dict[str, Any]:
    """JSON-ready facts: device, system, cores, memory in bytes, versions, BLAS. Imports mlx."""
    return {
        "device": runtime.device_name(),
        "os": runtime.os_name(),
        "cores": os.cpu_count(),
        "memory_bytes": runtime.memory().total,
        "blas": runtime.blas()[0],
        "python": platform.python_version(),
        "mlxinfer": __version__,
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
    }


def bandwidth() -> dict[str, Any]:
    """{"gb_s", "source"}: published for an Apple chip, else measured now.

    The larger of two measurements: `fit`'s, which is what a matrix-vector product reaches, and a bare sum over memory
    on every core. As the limit that decoding is compared with, a figure too small would flatter.
    """
    from mlxinfer.zoo.fitting import measured_bandwidth

    gb_s, source = measured_bandwidth()
    if runtime.chip_name() is None and (read := read_speed()) > gb_s:
        gb_s, source = read, "a sum over memory, measured here"
    return {"gb_s": gb_s, "source": source}


def faster(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two measurements of `bandwidth` the larger: what else ran meanwhile only makes one smaller."""
    return max(one, other, key=lambda found: found["gb_s"])


def read_speed() -> float:
    """GB/s at which all cores together sum up 134 MB, the best of five times (0.1 s)."""
    import numpy as np

    parts = np.array_split(np.ones(PROBE_BYTES // 4, dtype=np.float32), os.cpu_count() or 1)
    best = float("inf")
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(PROBES):
            began = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = min(best, time.perf_counter() - began)
    return PROBE_BYTES / best / 1e9


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What one decode step of one sequence reads, and what the model is."""

    model: str
    architecture: str
    parameters: int
    quantization: str
    loaded_as: str
    weight_bytes: int
    """In memory."""
    read_bytes: int
    """Of the weights, those that one token needs: fewer for a mixture of experts."""
    cache_bytes_per_token: float
    """Of keys, values and state, at the context this was asked for."""
    context: int

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def model_bytes(model: str, settings: Settings, context: int) -> ModelBytes | None:
    """For a model on this machine, at a mean context of `context` tokens; None when its files don't tell."""
    from mlxinfer import zoo

    try:
        card = zoo.describe(model, settings)
        limit = min(card.context_length or 2**20, settings.context_length or 2**31)
        # The verdict and the speed are not asked for; a figure in the bandwidth's place spares the measurement.
        report = zoo.fit(model, settings, context=max(1, min(context, limit)), bandwidth=(1.0, "not asked"))
    except MlxinferError:
        return None
    entry = zoo.find_entry(model)
    share = (entry.active_parameters or entry.parameters) / entry.parameters if entry and entry.parameters else 1.0
    return ModelBytes(
        model=model,
        architecture=card.architecture,
        parameters=card.parameters,
        quantization=card.quantization,
        loaded_as=report.loaded_as,
        weight_bytes=report.weight_bytes,
        read_bytes=round(report.weight_bytes * share),
        cache_bytes_per_token=report.cache_bytes / report.context,
        context=report.context,
    )


def bandwidth_share(tok_s: float, size: ModelBytes, context: float, gb_s: float) -> float:
    """Bytes per second that one stream reads at `tok_s` with `context` tokens, over what memory gives (GB/s)."""
    return tok_s * (size.read_bytes + size.cache_bytes_per_token * context) / (gb_s * 1e9)
