"""Load a model on the MLX thread, in slices, and put an engine around it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from mlxinfer import kernels, runtime, upstream
from mlxinfer.engine.disk import DiskTier
from mlxinfer.engine.engine import Engine
from mlxinfer.engine.fingerprint import fingerprint
from mlxinfer.engine.governor import governor
from mlxinfer.engine.loading import Prepared, build, prepare
from mlxinfer.engine.prefix_disk import PrefixDisk
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.worker import MlxThread, aside, mlx_thread
from mlxinfer.types import ModelInfo, Progress, SamplingParams
from mlxinfer.zoo import CancelledError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from mlxinfer.config import Settings
    from mlxinfer.tokenizer import Tokenizer

T = TypeVar("T")

FORMAT = "1"
"""Of what a prefix on disk holds; another number starts with a cold cache."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine and what is known of its model."""

    engine: Engine
    info: ModelInfo
    tokenizer: Tokenizer
    defaults: SamplingParams


def start_engine(
    kind: Literal["folder", "gguf"],
    path: Path,
    *,
    name: str,
    source: str,
    settings: Settings,
    cancel: threading.Event | None = None,
    progress: Progress | None = None,
) -> Started:
    """Load the model at `path` and start stepping it. Blocks until it is ready; raises what loading raises.

    The MLX thread does it in slices, between the steps of other engines. `cancel` may be set from any thread: what was
    read is let go of and CancelledError raised.
    """
    thread = mlx_thread()
    # A minute or two, the first time on a machine: on the caller's thread, whose Ctrl-C stops the compilers.
    kernels.enable(settings, progress=progress, cancel=cancel)
    governor().set_budget(None if settings.memory_mb is None else settings.memory_mb << 20)

    def files() -> tuple[Prepared, DiskTier | None]:
        return prepare(kind, path, dtype=settings.dtype), _disk_tier(kind, path, settings)

    # Not on the caller's thread: libraries that are imported or called there may swallow its Ctrl-C.
    prepared, tier = thread.wait_for(aside(files))
    job = thread.run_sliced(_start(thread, prepared, name, source, settings, tier, cancel or threading.Event()))
    try:
        started = job.result()
    except BaseException:
        # Ctrl-C: the next slice is not run.
        job.cancel()
        raise
    # Here and not in the job, so that one that is cancelled at its very end leaves nothing behind.
    thread.post(lambda: thread.attach(started.engine))
    return started


def _disk_tier(kind: Literal["folder", "gguf"], path: Path, settings: Settings) -> DiskTier | None:
    """Where idle prefixes of this model are kept, its index read."""
    if not settings.prefix_disk_mb or settings.prefix_cache_mb == 0:
        return None
    run_as = {"dtype": settings.dtype, "kv_bits": str(settings.kv_bits), "device": runtime.device_name()}
    how = {"format": FORMAT, **run_as, **upstream.versions()}
    tier = DiskTier(settings.cache_dir / "prefixes", fingerprint(kind, path, how), settings.prefix_disk_mb << 20)
    tier.load_index()
    return tier


def _start(
    thread: MlxThread,
    prepared: Prepared,
    name: str,
    source: str,
    settings: Settings,
    tier: DiskTier | None,
    cancel: threading.Event,
) -> Generator[None, None, Started]:
    loaded = yield from unless_cancelled(cancel, name, build(prepared))
    if silu_mul := kernels.kernel("silu_mul"):
        upstream.install_swiglu(silu_mul)
    yield
    runner = Runner(loaded.model, loaded.vocab_size, settings.kv_bits, probed=False)
    runner.adapters.max_bytes = settings.adapter_mb << 20
    yield from runner.probe()
    engine = Engine(
        thread,
        runner,
        max_num_seqs=settings.max_num_seqs,
        max_queue=settings.max_queue,
        prefill_chunk=settings.prefill_chunk,
        weight_bytes=loaded.weight_bytes,
        prefix_bytes=None if settings.prefix_cache_mb is None else settings.prefix_cache_mb << 20,
        disk=None if tier is None else PrefixDisk(tier),
    )
    runtime.set_wired_limit(settings.wired_limit_mb)
    limit = settings.context_length
    info = ModelInfo(
        name=name,
        model_type=str(loaded.config["model_type"]),
        source=source,
        context_length=loaded.context_length if limit is None else min(limit, loaded.context_length),
        vocab_size=loaded.vocab_size,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=loaded.dtype,
        quantization=loaded.quantization,
        tier=runner.tier,
        has_chat_template=loaded.tokenizer.has_chat_template,
        kv_quantization=str(runner.packing or "none"),
    )
    return Started(engine, info, loaded.tokenizer, loaded.defaults)


def unless_cancelled(cancel: threading.Event, name: str, pieces: Generator[None, None, T]) -> Generator[None, None, T]:
    while True:
        if cancel.is_set():
            pieces.close()
            raise CancelledError(f"loading {name} was cancelled")
        try:
            next(pieces)
        except StopIteration as done:
            return done.value
        yield
