"""From generations to text_completion objects, whole or chunk by chunk."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.server.inflight import merged
from mlxinfer.server.openai.logprobs import TokenTexts, finite
from mlxinfer.server.openai.respond import completion_frame, usage_object
from mlxinfer.types import TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from mlxinfer.llm import Generation
    from mlxinfer.pool import Lease
    from mlxinfer.server.openai.text import TextTask
    from mlxinfer.server.state import ServerState
    from mlxinfer.types import Delta


@dataclass(slots=True)
class _Choice:
    text: str = ""
    tokens: list[tuple[int, TokenLogprob | None]] = field(default_factory=list[tuple[int, TokenLogprob | None]])
    """(id, its log probability); None for a prompt's first, which nothing came before."""
    reason: str | None = None


class TextAnswer:
    """The generations of all choices and what frames them. `end` lets the model go."""

    def __init__(
        self,
        state: ServerState,
        lease: Lease,
        generations: Sequence[Generation],
        task: TextTask,
        ids: Sequence[Sequence[int]],
    ) -> None:
        self._state = state
        self._lease = lease
        self._generations = generations
        self._task = task
        self._ids = ids
        self._texts = TokenTexts(lease.llm.tokenizer)
        self._usages: dict[int, Usage] = {}
        self._lengths = [0] * len(generations)
        self._open = dict.fromkeys(range(len(generations)), 0)
        """Tokens so far of each choice that hasn't ended."""
        self._frame = functools.partial(
            completion_frame,
            "text_completion",
            id=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=lease.name,
        )

    def end(self) -> None:
        """Cancel what still runs and let go of the model. Harmless when it has ended."""
        for generation in self._generations:
            generation.cancel()
        # Those that an error or a departure cut short used tokens too.
        while self._open:
            index, tokens = self._open.popitem()
            usage = Usage(len(self._ids[index // self._task.n]), tokens)
            first = index % self._task.n == 0
            self._state.ended(self._lease.name, usage, None, "cancelled", with_prompt=first)
        self._lease.release()

    async def whole(self) -> dict[str, Any]:
        """Raises the first error of any choice."""
        choices = [_Choice() for _ in self._generations]
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for item in pieces:
                if item is not None:
                    choice, piece = choices[item[0]], item[1]
                    choice.text += piece.text
                    choice.tokens += piece.tokens
                    choice.reason = piece.reason
        # With log probabilities that is a lot of work.
        objects = await asyncio.to_thread(lambda: [self._object(i, c) for i, c in enumerate(choices)])
        return self._frame(choices=objects) | {"usage": self._usage()}

    async def chunks(self, include_usage: bool) -> AsyncGenerator[dict[str, Any] | None]:
        """text_completion objects with a piece each, None in a silence."""
        blank: dict[str, Any] = {"usage": None} if include_usage else {}
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for item in pieces:
                if item is None:
                    yield None
                    continue
                index, piece = item
                if piece.text or piece.tokens or piece.reason is not None:
                    yield self._frame(choices=[self._object(index, piece)]) | blank
        if include_usage:
            yield self._frame(choices=[]) | {"usage": self._usage()}

    async def _pieces(self) -> AsyncGenerator[tuple[int, _Choice] | None]:
        """(choice, the next piece of it), None in a silence; the prompt first where it is to be echoed."""
        begun: set[int] = set()
        events = merged(self._generations, self._state.inflight, self._state.options.keepalive_s)
        async with contextlib.aclosing(events):
            async for event in events:
                if event is None:
                    yield None
                    continue
                index, delta = event
                if index not in begun and self._task.echo:
                    yield index, self._echo(index)
                begun.add(index)
                self._open[index] += len(delta.token_ids)
                piece = self._piece(delta)
                if delta.finish_reason is not None:
                    self._end_choice(index, delta)
                yield index, piece

    def _piece(self, delta: Delta) -> _Choice:
        if self._task.prompt_only:
            return _Choice(reason=delta.finish_reason)
        return _Choice(delta.text, [(t.token_id, t) for t in delta.logprobs], delta.finish_reason)

    def _echo(self, index: int) -> _Choice:
        which = index // self._task.n
        prompt, ids = self._task.prompts[which], self._ids[which]
        text = prompt if isinstance(prompt, str) else self._lease.llm.tokenizer.decode(ids, skip_special_tokens=False)
        if self._task.params.logprobs is None:
            return _Choice(text)
        found = self._generations[index].prompt_logprobs
        assert found is not None, "asked for, and there from the first delta on"
        return _Choice(text, list(zip(ids, found, strict=True)))

    def _end_choice(self, index: int, delta: Delta) -> None:
        del self._open[index]
        usage = delta.usage or Usage()
        if self._task.prompt_only:
            # The engine makes a token with the prompt's logits; nobody asked for it.
            usage = dataclasses.replace(usage, completion_tokens=0)
        self._usages[index] = usage
        first = index % self._task.n == 0
        self._state.ended(self._lease.name, usage, delta.timings, str(delta.finish_reason), with_prompt=first)

    def _usage(self) -> dict[str, Any]:
        firsts = [u for i, u in self._usages.items() if i % self._task.n == 0]
        return usage_object(firsts, list(self._usages.values()))

    def _object(self, index: int, piece: _Choice) -> dict[str, Any]:
        logprobs = self._logprobs(piece, self._lengths[index]) if self._task.params.logprobs is not None else None
        self._lengths[index] += len(piece.text)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.reason}

    def _logprobs(self, piece: _Choice, start: int) -> dict[str, Any]:
        """Parallel lists over the tokens; offsets are counted in characters of the choice's text."""
        texts = [self._texts(token_id) for token_id, _ in piece.tokens]
        return {
            "tokens": [text for text, _ in texts],
            "token_logprobs": [None if t is None else finite(t.logprob) for _, t in piece.tokens],
            "top_logprobs": [None if t is None else self._top(t) for _, t in piece.tokens],
            "text_offset": [start + at for at in offsets(piece.text, [raw for _, raw in texts])],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Text to log probability: the likeliest and the chosen one. Of tokens with the same text, the likelier."""
        found: dict[str, float] = {}
        asked = token.top[: self._task.params.logprobs]
        for token_id, logprob in (*asked, (token.token_id, token.logprob)):
            text = self._texts(token_id)[0]
            found[text] = max(finite(logprob), found.get(text, finite(logprob)))
        return found


def offsets(text: str, tokens: Sequence[bytes]) -> list[int]:
    """Where in `text` each token begins, in characters; one that isn't in it (the tokenizer's BOS) takes no room."""
    data = text.encode(errors="surrogatepass")
    at = chars = 0
    found: list[int] = []
    for raw in tokens:
        found.append(chars)
        if data.startswith(raw, at):
            at += len(raw)
            # Bytes that begin a character; the rest continue one.
            chars += sum(byte & 0xC0 != 0x80 for byte in raw)
    return found
