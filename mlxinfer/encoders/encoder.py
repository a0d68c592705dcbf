"""Embeddings and reranking: `load_encoder` a model, then embed and rerank, from any thread or event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer import kernels
from mlxinfer.config import Settings, load_settings, override
from mlxinfer.encoders import qwen3
from mlxinfer.encoders.batching import TokenRow
from mlxinfer.encoders.kinds import EncoderKind, encoder_kind
from mlxinfer.encoders.loading import Loaded, Prepared, build, prepare, with_limit
from mlxinfer.encoders.runner import Runner
from mlxinfer.encoders.texts import framed
from mlxinfer.engine.governor import governor
from mlxinfer.engine.inputs import checked_ids
from mlxinfer.engine.start import unless_cancelled
from mlxinfer.engine.worker import aside, mlx_thread
from mlxinfer.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from mlxinfer.tokenizer.framing import Framed
from mlxinfer.types import ModelInfo, Progress, ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from mlxinfer.encoders.batching import Job
    from mlxinfer.zoo import ModelFiles


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Of some texts, in their order."""

    vectors: NDArray[np.float32]
    """[texts, dimensions]."""
    token_counts: tuple[int, ...]
    """Tokens read of each text, special ones counted."""
    truncated: tuple[bool, ...]
    """Which texts were cut off."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens read in all."""
        return sum(self.token_counts)


class Scores(list[float]):
    """How well each document answers the query, in the documents' order: from 0 to 1 of a reranker, the cosine, from
    -1 to 1, of an embedding model. `token_counts` and `truncated` are as in Embeddings, one for each document; the
    tokens of the query are counted with a reranker's documents, and are the last figure of an embedding model's."""

    token_counts: tuple[int, ...]
    truncated: tuple[bool, ...]

    def __init__(self, scores: Sequence[float], token_counts: Sequence[int], truncated: Sequence[bool]) -> None:
        super().__init__(scores)
        self.token_counts = tuple(token_counts)
        self.truncated = tuple(truncated)

    @property
    def prompt_tokens(self) -> int:
        """Tokens read in all."""
        return sum(self.token_counts)


def load_encoder(
    name: str | os.PathLike[str],
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    fetch: bool = True,
    cancel: threading.Event | None = None,
    **overrides: Any,
) -> Encoder:
    """Load an embedding model or a reranker by alias, hub id or folder; it is fetched first when it isn't here.

    `overrides` are fields of Settings, for example `dtype="float16"`. Without `fetch` a model that isn't here is an
    OfflineError. `cancel`, set from another thread, ends the call with zoo.CancelledError.
    Raises ModelNotFoundError, OfflineError, GatedModelError, DownloadError, ModelFileError, UnsupportedModelError
    (for a model that writes text, too) or WontFitError.
    """
    from mlxinfer import zoo

    name = os.fspath(name)
    settings = load_settings(overrides) if settings is None else override(settings, overrides)
    files = zoo.resolve(name, settings, fetch=fetch, progress=progress, cancel=cancel)
    kind = encoder_kind(files.path, name, files.name)
    if kind is None:
        raise UnsupportedModelError(f"{name} makes no embeddings and reranks nothing; load it with mlxinfer.load")
    if progress is not None:
        progress(ProgressEvent("load", 0, files.size_bytes, name))
    encoder = _start(files, kind, name, settings, progress, cancel)
    if progress is not None:
        progress(ProgressEvent("load", files.size_bytes, files.size_bytes, name))
    return encoder


def _start(
    files: ModelFiles,
    kind: EncoderKind,
    name: str,
    settings: Settings,
    progress: Progress | None,
    cancel: threading.Event | None,
) -> Encoder:
    thread = mlx_thread()
    kernels.enable(settings, progress=progress, cancel=cancel)
    governor().set_budget(None if settings.memory_mb is None else settings.memory_mb << 20)
    # Not on the caller's thread: libraries that are called there may swallow its Ctrl-C.
    checked = thread.wait_for(aside(lambda: prepare(files.path, kind, name, files.name, dtype=settings.dtype)))
    prepared = with_limit(checked, settings.context_length)
    job = thread.run_sliced(unless_cancelled(cancel or threading.Event(), name, build(prepared)))
    try:
        loaded = job.result()
    except BaseException:
        job.cancel()
        raise
    runner = Runner(thread, loaded.network, weight_bytes=loaded.weight_bytes, max_queue=settings.max_queue)
    thread.post(lambda: thread.attach(runner))
    return Encoder(_info(prepared, loaded, name, files.origin), prepared, loaded.dimensions, runner)


def _info(prepared: Prepared, loaded: Loaded, name: str, source: str) -> ModelInfo:
    return ModelInfo(
        name=name,
        model_type=str(prepared.config.get("model_type")),
        source=source,
        context_length=prepared.max_tokens,
        vocab_size=loaded.vocab_size,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=loaded.dtype,
        quantization=loaded.quantization,
        tier=prepared.kind,
        has_chat_template=False,
        makes="embeddings" if prepared.kind == "embedding" else "scores",
    )


class Encoder:
    """A loaded embedding model or reranker. Thread-safe; texts that are handed in at the same time share forwards.

    `info.context_length` is the number of tokens it reads of a text.
    """

    def __init__(self, info: ModelInfo, prepared: Prepared, dimensions: int, runner: Runner) -> None:
        self.info = info
        self.kind: EncoderKind = prepared.kind
        self.dimensions = dimensions
        """Of an embedding; 0 for a reranker."""
        self.tokenizer = prepared.tokenizer
        self.prompts: Mapping[str, str] = prepared.recipe.prompts
        """The model's own texts to go before a text, by name."""
        self._prepared = prepared
        self._runner = runner
        self._unloading = threading.Lock()
        weakref.finalize(self, runner.thread.post, runner.close).atexit = False

    def __repr__(self) -> str:
        i = self.info
        return f"<Encoder {i.name}: {i.model_type}, {i.num_parameters / 1e6:.0f}M parameters, {i.dtype}, {i.makes}>"

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()

    # -- embeddings ------------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt: str | None = None,
        truncate: bool = False,
    ) -> Embeddings:
        """The texts' embeddings. A text may be token ids, which are read as they are, with no special tokens added.

        `dimensions` keeps the first so many numbers, of normalised embeddings normalised again. `prompt` is the name of
        one of the model's `prompts`; None is its default one, often none. A text of more than `info.context_length`
        tokens is a ContextLengthError, or loses its end with `truncate`, as in sentence-transformers.
        Raises InvalidRequestError, QueueFullError or EngineClosedError.
        """
        rows = self._embed_rows(texts, dimensions, prompt, truncate)
        return self._embeddings(rows, self._wait(self._submit(rows)), dimensions)

    async def aembed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt: str | None = None,
        truncate: bool = False,
    ) -> Embeddings:
        """`embed` for an event loop; cancelling it ends the work."""
        rows = await asyncio.to_thread(self._embed_rows, texts, dimensions, prompt, truncate)
        return self._embeddings(rows, await asyncio.wrap_future(self._submit(rows).future), dimensions)

    def _embed_rows(
        self, texts: Sequence[str | Sequence[int]], dimensions: int | None, prompt: str | None, truncate: bool
    ) -> list[Framed]:
        if self.kind != "embedding":
            raise InvalidRequestError(f"{self.info.name} is a reranker; it makes no embeddings", param="model")
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= self.dimensions):
            raise InvalidRequestError(
                f"dimensions is {dimensions!r:.80}; {self.info.name} makes 1 to {self.dimensions}", param="dimensions"
            )
        return self._framed(_checked_texts(texts, "input"), self._prompt_text(prompt), truncate)

    def _embeddings(self, rows: Sequence[Framed], results: Sequence[Any], dimensions: int | None) -> Embeddings:
        vectors = np.stack(results) if results else np.zeros((0, self.dimensions), np.float32)
        if dimensions is not None and dimensions < self.dimensions:
            vectors = np.ascontiguousarray(vectors[:, :dimensions])
            if self._prepared.recipe.normalized:
                vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Embeddings(vectors, tuple(len(r.ids) for r in rows), tuple(r.truncated for r in rows))

    def _prompt_text(self, prompt: str | None) -> str | None:
        name = self._prepared.recipe.default_prompt if prompt is None else prompt
        if name is None:
            return None
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequestError(
                f"prompt is {name!r:.80}; the prompts of {self.info.name} are: {known}", param="prompt"
            )
        return self.prompts[name]

    # -- reranking -------------------------------------------------------------------------------------------------

    def rerank(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> Scores:
        """How well each document answers the query. See Scores.

        With `truncate`, what is too long for the model is cut off; without it, that is a ContextLengthError.
        Raises InvalidRequestError, QueueFullError or EngineClosedError.
        """
        rows = self._rerank_rows(query, documents, truncate)
        return self._scores(rows, self._wait(self._submit(rows)))

    async def arerank(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> Scores:
        """`rerank` for an event loop; cancelling it ends the work."""
        rows = await asyncio.to_thread(self._rerank_rows, query, documents, truncate)
        return self._scores(rows, await asyncio.wrap_future(self._submit(rows).future))

    def _rerank_rows(self, query: str, documents: Sequence[str], truncate: bool) -> list[Framed]:
        if not isinstance(query, str):
            raise InvalidRequestError(f"query must be a string, not {query!r:.80}", param="query")
        texts = _checked_texts(documents, "documents")
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError("documents must be strings", param="documents")
        documents = [text for text in texts if isinstance(text, str)]
        if self.kind == "embedding":
            rows = self._framed(documents, self.prompts.get("document"), truncate)
            return rows + self._framed([query], self.prompts.get("query"), truncate)
        if self._prepared.answers is not None:
            return self._framed([qwen3.pair_text(query, document) for document in documents], None, truncate)
        return self._framed([(query, document) for document in documents], None, truncate)

    def _scores(self, rows: Sequence[Framed], results: Sequence[Any]) -> Scores:
        counts, cut = [len(r.ids) for r in rows], [r.truncated for r in rows]
        if self.kind == "reranker":
            return Scores([float(score) for score in results], counts, cut)
        vectors = np.stack(results).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Scores([float(score) for score in vectors[:-1] @ vectors[-1]], counts, cut)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _framed(
        self, texts: Sequence[str | tuple[str, str] | list[int]], prompt: str | None, truncate: bool
    ) -> list[Framed]:
        """Each text's tokens; a prompt goes before those that are strings."""
        limit = self.info.context_length
        strings = [(prompt or "") + t if isinstance(t, str) else t for t in texts if not isinstance(t, list)]
        made = iter(framed(self.tokenizer, strings, self._prepared.framing, max_tokens=limit, truncate=truncate))
        rows = [self._own_ids(t, i, truncate) if isinstance(t, list) else next(made) for i, t in enumerate(texts)]
        if (empty := next((i for i, row in enumerate(rows) if not row.ids), None)) is not None:
            raise InvalidRequestError(f"text {empty} has no tokens; at least one is needed", param="input")
        return rows

    def _own_ids(self, ids: list[int], index: int, truncate: bool) -> Framed:
        limit, vocab = self.info.context_length, self.info.vocab_size
        if (bad := next((t for t in ids if not 0 <= t < vocab), None)) is not None:
            raise InvalidRequestError(f"token id {bad} is outside the vocabulary of {vocab}", param="input")
        if len(ids) > limit and not truncate:
            raise ContextLengthError(
                f"text {index} has {len(ids)} tokens and the model reads {limit}; shorten it", param="input"
            )
        return Framed(ids[:limit], [0] * min(limit, len(ids)), len(ids) > limit)

    def _submit(self, rows: Sequence[Framed]) -> Job:
        pairs = self.kind == "reranker"
        vocab = self.info.vocab_size
        # The tokenizer is a file of its own: mlx reads whatever an id points to.
        if any(max(row.ids) >= vocab for row in rows):
            raise UnsupportedModelError(f"{self.info.name}: its tokenizer has ids beyond its {vocab} embeddings")
        return self._runner.submit([TokenRow(row.ids, row.types if pairs else None) for row in rows])

    def _wait(self, job: Job) -> list[Any]:
        try:
            return self._runner.thread.wait_for(job.future)
        except BaseException:
            # Ctrl-C: what hasn't run isn't run.
            job.future.cancel()
            raise

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests can be served: not unloaded, and the MLX thread runs."""
        return not self._runner.closed and self._runner.thread.alive

    def stats(self) -> dict[str, int]:
        """Running and waiting requests, forwards and tokens so far, bytes of weights."""
        return self._runner.stats() | {"weight_bytes": self.info.weight_bytes}

    def unload(self) -> None:
        """End every request and free the model's memory. Later calls raise EngineClosedError."""
        with self._unloading:
            if not self._runner.closed:
                self._runner.thread.call(self._runner.close)
                gc.collect()
                self._runner.thread.call(_return_memory)


def _checked_texts(texts: object, param: str) -> list[str | list[int]]:
    """Strings and lists of ids. Raises InvalidRequestError."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise InvalidRequestError(f"{param} must be a list of texts, not {texts!r:.80}", param=param)
    return [text if isinstance(text, str) else list(checked_ids(text)) for text in texts]


def _return_memory() -> None:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
