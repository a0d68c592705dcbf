"""Load a model on the MLX thread and put an engine around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlxinfer.engine.engine import Engine
from mlxinfer.engine.loading import load_model
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.worker import MlxThread, mlx_thread
from mlxinfer.types import ModelInfo, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.config import Settings
    from mlxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine and what is known of its model."""

    engine: Engine
    info: ModelInfo
    tokenizer: Tokenizer
    defaults: SamplingParams


def start_engine(kind: Literal["folder", "gguf"], path: Path, *, name: str, source: str, settings: Settings) -> Started:
    """Load the model at `path` and start stepping it. Blocks until it is ready; raises what loading raises."""
    thread = mlx_thread()
    loaded: list[Started] = []

    def run() -> Started:
        loaded.append(_start(thread, kind, path, name, source, settings))
        return loaded[0]

    try:
        return thread.call(run)
    except BaseException:
        # Ctrl-C: the load goes on behind our back; what comes of it is closed when it is there.
        thread.post(lambda: loaded[0].engine.close() if loaded else None)
        raise


def _start(
    thread: MlxThread, kind: Literal["folder", "gguf"], path: Path, name: str, source: str, settings: Settings
) -> Started:
    loaded = load_model(kind, path, dtype=settings.dtype)
    runner = Runner(loaded.model, loaded.vocab_size)
    engine = Engine(
        thread,
        runner,
        max_num_seqs=settings.max_num_seqs,
        max_queue=settings.max_queue,
        prefill_chunk=settings.prefill_chunk,
    )
    thread.attach(engine)
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
    )
    return Started(engine, info, loaded.tokenizer, loaded.defaults)
