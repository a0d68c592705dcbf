"""The Python API: `load` a model, then chat, generate, stream and batch, from any thread or event loop."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import os
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.config import Settings, load_settings, override
from mlxinfer.engine.adapter_files import read_adapter
from mlxinfer.engine.engine import Engine, Request
from mlxinfer.engine.generation import Generation, Stream
from mlxinfer.engine.grammar import CompiledGrammar, Grammars
from mlxinfer.engine.inputs import Prompt, checked_ids, checked_messages, sampling_params
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.errors import ContextLengthError, InvalidRequestError, QueueFullError, UnsupportedModelError
from mlxinfer.tokenizer import message_starts, turn_tokens
from mlxinfer.types import MAX_TOP_LOGPROBS, Grammar, ModelInfo, Progress, ProgressEvent, Reply, SamplingParams

if TYPE_CHECKING:
    from mlxinfer.tokenizer import Tokenizer
    from mlxinfer.zoo import ModelFiles


ONLY_ADAPTER = "adapter"
"""The name of one that was given without."""


def load(
    name: str | os.PathLike[str],
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    fetch: bool = True,
    cancel: threading.Event | None = None,
    files: ModelFiles | None = None,
    adapter: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
    **overrides: Any,
) -> LLM:
    """Load a model by alias, hub id, folder or .gguf file; it is fetched first when it isn't on this machine.

    `overrides` are fields of Settings, for example `dtype="float16"` or `max_num_seqs=8`. Without `fetch` a model that
    isn't here is an OfflineError. `files`: what `name` stands for, where that is known already. `cancel`, set from
    another thread, ends the call with zoo.CancelledError. `adapter` is a folder: every request goes through it; or
    names and folders, for LLM.submit and LLM.adapted to choose from. Raises ModelNotFoundError, OfflineError,
    GatedModelError, DownloadError, ModelFileError, UnsupportedModelError or WontFitError.
    """
    from mlxinfer import zoo
    from mlxinfer.encoders import encoder_kind
    from mlxinfer.engine.start import start_engine

    name = os.fspath(name)
    settings = load_settings(overrides) if settings is None else override(settings, overrides)
    files = files or zoo.resolve(name, settings, fetch=fetch, progress=progress, cancel=cancel)
    if encoder_kind(files.path, name, files.name):
        raise UnsupportedModelError(f"{name} writes no text; load it with mlxinfer.load_encoder, or serve it")
    if progress is not None:
        progress(ProgressEvent("load", 0, files.size_bytes, name))
    with zoo.naming_the_conversion(files):
        started = start_engine(
            files.kind, files.path, name=name, source=files.origin, settings=settings, cancel=cancel, progress=progress
        )
    if progress is not None:
        progress(ProgressEvent("load", files.size_bytes, files.size_bytes, name))
    llm = LLM(started.info, started.tokenizer, _defaults(name, started.defaults), started.engine, settings)
    if adapter is None:
        return llm
    several = isinstance(adapter, Mapping)
    try:
        for one, folder in adapter.items() if several else ((ONLY_ADAPTER, adapter),):
            llm.add_adapter(one, folder)
    except BaseException:
        llm.unload()
        raise
    return llm if several else llm.adapted(ONLY_ADAPTER)


def _defaults(name: str, own: SamplingParams) -> SamplingParams:
    """The model's own sampling defaults, then those the catalogue recommends."""
    from mlxinfer import zoo

    entry = zoo.find_entry(name)
    if entry is None or entry.sampling is None:
        return own
    return own.with_defaults(SamplingParams(**dataclasses.asdict(entry.sampling)))


class LLM:
    """A loaded model. Thread-safe; requests made at the same time run as one batch."""

    def __init__(
        self, info: ModelInfo, tokenizer: Tokenizer, defaults: SamplingParams, engine: Engine, settings: Settings
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.settings = settings
        self._engine = engine
        self._grammars = Grammars(tokenizer, info.vocab_size)
        self._turns = turn_tokens(tokenizer) if engine.state.needs_checkpoints else frozenset[int]()
        self._unloading = threading.Lock()
        self._adapter = ""
        self._base: LLM | None = None
        """Of which this is a view; kept, since it unloads when nobody holds it."""
        # A model that nobody holds any more is unloaded; in a notebook `llm = load(…)` is run again and again.
        weakref.finalize(self, engine.thread.post, engine.close).atexit = False

    def __repr__(self) -> str:
        i = self.info
        return f"<LLM {i.name}: {i.model_type}, {i.num_parameters / 1e6:.0f}M parameters, {i.dtype}, {i.tier}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()

    # -- prompts ---------------------------------------------------------------------------------------------------

    def prompt_ids(self, messages: Prompt, *, system: str | None = None, **template_kwargs: Any) -> list[int]:
        """Token ids of a chat, the assistant's turn opened. `messages` may be one user message as a string."""
        chat = checked_messages(messages)
        if system is not None:
            if any(m["role"] == "system" for m in chat):
                raise InvalidRequestError(
                    "system is given and messages hold a system message; keep one", param="system"
                )
            chat.insert(0, {"role": "system", "content": system})
        return self.tokenizer.chat_ids(chat, self.info.context_length, **template_kwargs)

    def _raw_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, max_tokens=self.info.context_length)
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise InvalidRequestError("the prompt must be a string or token ids", param="prompt")
        return list(prompt)

    # -- the one way in --------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        keep: frozenset[int] = frozenset(),
        prompt_logprobs: int | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Queue a request and return at once. Everything is validated here, before any work.

        Requests share computed prefixes with others of the same `tenant` only: elsewhere, how fast a first token comes
        would tell what others asked. Special tokens to `keep` show in the text. `prompt_logprobs` reports how likely
        the prompt's tokens were, and as many of the likeliest, 0 to 20. A grammar that `compile` hasn't seen is
        compiled first. `adapter` names one that was added; "" is the model as it is, None what this LLM stands for.
        Raises ModelNotFoundError for an adapter, InvalidRequestError, ContextLengthError, QueueFullError, WontFitError
        or EngineClosedError.
        """
        prompt_ids = checked_ids(prompt_ids)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be an integer, not {priority!r:.80}", param="priority")
        if prompt_logprobs is not None and not 0 <= prompt_logprobs <= MAX_TOP_LOGPROBS:
            message = f"prompt_logprobs is {prompt_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}"
            raise InvalidRequestError(message, param="prompt_logprobs")
        adapter = self._adapter if adapter is None else adapter
        cache_key = self._cache_key(tenant, adapter)
        max_tokens = self.check(prompt_ids, params)
        grammar = None if params.grammar is None else self.compile(params.grammar)
        params = params.with_defaults(self.defaults)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        spec = RowSpec(
            f"req-{secrets.token_hex(8)}",
            tuple(prompt_ids),
            RowSampling.of(params),
            seed,
            cache_key,
            params.logprobs,
            prompt_logprobs,
            adapter,
        )
        eos = frozenset[int]() if params.ignore_eos else self.tokenizer.eos_token_ids
        starts = message_starts(prompt_ids, self._turns) if self._engine.state.needs_checkpoints else ()
        request = Request(spec, max_tokens, eos, priority, starts, grammar)
        return Generation(request, self._engine, self.tokenizer, params.stop, self._name_with(adapter), self, keep)

    def _cache_key(self, tenant: str, adapter: str) -> str:
        """Under which computed prefixes are shared: what an adapter computed is of use to it alone."""
        if "\0" in tenant:
            raise InvalidRequestError("tenant holds a NUL character", param="tenant")
        return f"{tenant}\0{self._engine.runner.adapters.digest(adapter)}" if adapter else tenant

    def _name_with(self, adapter: str) -> str:
        base = (self._base or self).info.name
        return f"{base}:{adapter}" if adapter else base

    # -- adapters --------------------------------------------------------------------------------------------------

    def add_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Offer the adapter in `folder` (mlx-lm's format) to requests under `name`, beside the model, which stays.

        Raises InvalidRequestError, ModelNotFoundError, ModelFileError with every tensor that doesn't fit this model,
        UnsupportedModelError or EngineClosedError.
        """
        self._engine.add_adapter(read_adapter(name, Path(folder).expanduser()))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of those that were added."""
        return self._engine.runner.adapters.names

    def adapted(self, adapter: str) -> LLM:
        """This model with an adapter for all its requests, or with "" as it is. The same engine: unloading is shared.

        Raises ModelNotFoundError.
        """
        if adapter:
            self._engine.runner.adapters.digest(adapter)
        view = copy.copy(self)
        view._adapter, view._base = adapter, self._base or self
        view.info = dataclasses.replace(self.info, name=self._name_with(adapter))
        return view

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or find it compiled. Up to seconds: not for an event loop.

        Raises InvalidRequestError for one that is wrong, too large or takes too long.
        """
        return self._grammars.compile(grammar)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """The number of tokens the request may generate. Raises what `submit` would raise for its values."""
        prompt_ids = checked_ids(prompt_ids)
        vocab = self.info.vocab_size
        if not prompt_ids:
            raise InvalidRequestError("the prompt has no tokens; at least one is needed", param="prompt")
        if (bad := next((t for t in prompt_ids if not 0 <= t < vocab), None)) is not None:
            raise InvalidRequestError(f"token id {bad} is outside the vocabulary of {vocab}", param="prompt")
        if (bad := next((t for t in params.logit_bias if t >= vocab), None)) is not None:
            raise InvalidRequestError(f"logit_bias: id {bad} is outside the vocabulary of {vocab}", param="logit_bias")
        return self._token_budget(len(prompt_ids), params.max_tokens)

    def _token_budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        limit = self.info.context_length
        room = limit - prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens and the context is {limit}; shorten the prompt", param="prompt"
            )
        if max_tokens is not None and max_tokens > room:
            raise ContextLengthError(
                f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) exceed the context of {limit}; "
                f"max_tokens can be at most {room}",
                param="max_tokens",
            )
        return room if max_tokens is None else max_tokens

    # -- whole replies ---------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Prompt,
        *,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Reply:
        """The assistant's reply. `sampling` are fields of SamplingParams, for example `temperature=0`.

        `template` goes to the chat template, for example `{"enable_thinking": False}` or `{"tools": […]}`.
        """
        chosen = sampling_params(params, sampling)
        return self.submit(self.prompt_ids(messages, system=system, **(template or {})), chosen).result()

    def generate(self, prompt: str | Sequence[int], *, params: SamplingParams | None = None, **sampling: Any) -> Reply:
        """Continue a text or token ids as they are, without a chat template."""
        return self.submit(self._raw_ids(prompt), sampling_params(params, sampling)).result()

    async def achat(
        self,
        messages: Prompt,
        *,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Reply:
        """`chat` for an event loop."""
        chosen = sampling_params(params, sampling)
        ids = await asyncio.to_thread(self._prepared, chosen, messages, False, system, template)
        return await self.submit(ids, chosen).aresult()

    async def agenerate(
        self, prompt: str | Sequence[int], *, params: SamplingParams | None = None, **sampling: Any
    ) -> Reply:
        """`generate` for an event loop."""
        chosen = sampling_params(params, sampling)
        ids = await asyncio.to_thread(self._prepared, chosen, prompt, True, None, None)
        return await self.submit(ids, chosen).aresult()

    def batch(
        self,
        prompts: Sequence[Prompt],
        *,
        raw: bool = False,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[Reply]:
        """Replies to many prompts, run together, in the order of the prompts. One bad prompt fails all, before work.

        With `raw`, prompts are continued as they are, without a chat template.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidRequestError("batch takes a list of prompts; for one prompt there is chat", param="prompts")
        chosen = sampling_params(params, sampling)
        ids = [self._ids(prompt, raw, system, template) for prompt in prompts]
        for one in ids:
            self.check(one, chosen)
        replies: list[Reply] = []
        running: list[Generation] = []
        try:
            for one in ids:
                if len(running) >= 2 * self.settings.max_num_seqs:
                    replies.append(running.pop(0).result())
                running.append(self._submit_when_room(one, chosen, running, replies))
            while running:
                replies.append(running.pop(0).result())
        finally:
            for generation in running:
                generation.cancel()
        return replies

    def _submit_when_room(
        self, ids: Sequence[int], params: SamplingParams, running: list[Generation], replies: list[Reply]
    ) -> Generation:
        """Submit, after waiting for the batch's own earlier prompts where the queue is full."""
        while True:
            try:
                return self.submit(ids, params)
            except QueueFullError:
                if not running:
                    raise
                replies.append(running.pop(0).result())

    async def abatch(self, prompts: Sequence[Prompt], **options: Any) -> list[Reply]:
        """`batch` for an event loop."""
        return await asyncio.to_thread(self.batch, prompts, **options)

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(
        self,
        messages: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Stream:
        """The reply piece by piece. `raw` continues a text without a chat template. See Stream."""
        chosen = sampling_params(params, sampling)
        return Stream(self.submit(self._ids(messages, raw, system, template), chosen))

    async def astream(
        self,
        messages: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        template: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> AsyncIterator[str]:
        """`stream` for an event loop; leaving the loop early cancels the request."""
        chosen = sampling_params(params, sampling)
        generation = self.submit(
            await asyncio.to_thread(self._prepared, chosen, messages, raw, system, template), chosen
        )
        try:
            async for delta in generation:
                if delta.text:
                    yield delta.text
        finally:
            generation.cancel()

    def _prepared(
        self, params: SamplingParams, prompt: Any, raw: bool, system: str | None, template: Mapping[str, Any] | None
    ) -> list[int]:
        """The prompt's ids, and whatever else takes time before `submit`."""
        if params.grammar is not None:
            self.compile(params.grammar)
        return self._ids(prompt, raw, system, template)

    def _ids(self, prompt: Any, raw: bool, system: str | None, template: Mapping[str, Any] | None) -> list[int]:
        if not raw:
            return self.prompt_ids(prompt, system=system, **(template or {}))
        for name, value in (("system", system), ("template", template)):
            if value is not None:
                raise InvalidRequestError(f"{name} needs a chat template; it can't go with raw", param=name)
        return self._raw_ids(prompt)

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests can be served: not unloaded, and the MLX thread runs."""
        return not self._engine.closed and self._engine.thread.alive

    def stats(self) -> dict[str, int]:
        """Running and waiting requests, steps and tokens so far, bytes of weights."""
        return self._engine.stats() | {"weight_bytes": self.info.weight_bytes}

    def unload(self) -> None:
        """End every request and free the model's memory. Later calls raise EngineClosedError."""
        with self._unloading:
            if not self._engine.closed:
                self._engine.thread.call(self._engine.close)
                self._engine.wait_written()
                gc.collect()
                self._engine.thread.call(_return_memory)


def _return_memory() -> None:
    import mlx.core as mx

    gc.collect()
    mx.synchronize()
    mx.clear_cache()


__all__ = ["LLM", "Generation", "Stream", "load", "sampling_params"]
