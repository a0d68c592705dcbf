"""Chats, prompts and texts as token ids with what of them is learnt; a mask that cannot be proven is an error."""

from __future__ import annotations

import itertools
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.lora.data.formats import Chat, RowError, Text
from mlxinfer.lora.data.spans import assistant_turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.lora.data.formats import Message
    from mlxinfer.lora.data.options import Supervise
    from mlxinfer.tokenizer import Tokenizer

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Masked:
    """Token ids and, of each, whether it is learnt."""

    token_ids: list[int]
    supervised: list[bool]
    lost_reasoning: int = 0


class Masker:
    """Turns rows into masked tokens, through one tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, supervise: Supervise, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._supervise = supervise
        self._template_kwargs = dict(template_kwargs)
        added = tokenizer.added_tokens()
        self._stops = {text for token in tokenizer.eos_token_ids if (text := tokenizer.token_text(token)) is not None}
        self._specials = {text for text, token in added.items() if tokenizer.is_special(token)} | self._stops
        self._eos = tokenizer.eos_token_id

    def mask(self, row: Chat | Text, *, last_only: bool = False) -> Masked:
        """The row's tokens. Raises RowError, or InvalidRequestError with the template's or the tokenizer's message."""
        masked = self._text(row) if isinstance(row, Text) else self._chat(row, last_only)
        bos = self._tokenizer.bos_token_id
        while bos is not None and masked.token_ids[:2] == [bos, bos]:
            # The text spells the BOS and the tokenizer, or the template, adds one.
            masked = Masked(masked.token_ids[1:], masked.supervised[1:], masked.lost_reasoning)
        if self._supervise == "all":
            masked = Masked(masked.token_ids, [True] * len(masked.token_ids), masked.lost_reasoning)
        if masked.supervised:
            masked.supervised[0] = False  # nothing comes before it
        return masked

    def _chat(self, chat: Chat, last_only: bool) -> Masked:
        def render(messages: Sequence[Message], prompt: bool) -> str:
            return self._tokenizer.render_chat(
                messages, add_generation_prompt=prompt, tools=chat.tools, **self._template_kwargs
            )

        text, turns = assistant_turns(chat.messages, render, self._specials, self._stops)
        lost = 0
        for turn in turns:
            reasoning = chat.messages[turn.message].get("reasoning_content", "").strip()
            lost += bool(reasoning) and reasoning not in text[turn.start : turn.end]
        learnt = turns[-1:] if last_only or self._supervise == "last" else turns
        masked = self._encode(text, [(turn.start, turn.end) for turn in learnt])
        ends_open = not turns[-1].closed and turns[-1].end == len(text)
        if ends_open and self._eos is not None:
            masked.token_ids.append(self._eos)
            masked.supervised.append(True)
        return Masked(masked.token_ids, masked.supervised, lost)

    def _text(self, row: Text) -> Masked:
        whole = self._tokenizer.encode(row.prompt + row.learnt)
        plain = self._encode(row.prompt + row.learnt, [(len(row.prompt), len(row.prompt) + len(row.learnt))])
        before = _position(plain.token_ids, whole)
        after = len(whole) - before - len(plain.token_ids)
        # What the tokenizer puts around a text: a BOS is read, a closing token is learnt.
        supervised = [False] * before + plain.supervised + [True] * after
        if self._eos is not None and whole[-1] != self._eos:
            whole, supervised = [*whole, self._eos], [*supervised, True]
        return Masked(whole, supervised)

    def _encode(self, text: str, spans: Sequence[Span]) -> Masked:
        """Token ids of the whole text; those of the spans are supervised. Raises RowError for a token that is partly
        in a span, beyond blanks."""
        bounds = [0, *itertools.chain.from_iterable(spans), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
        ids, *parts = self._tokenizer.encode_pieces([text, *pieces])
        if list(itertools.chain.from_iterable(parts)) == ids:
            # Every bound is one between tokens.
            return Masked(ids, [bool(i % 2) for i, part in enumerate(parts) for _ in part])
        offsets = self._tokenizer.offsets(text)
        supervised = [False] * len(ids)
        for start, end in spans:
            inside: list[int] = []
            for i, (a, b) in enumerate(offsets):
                if a >= end or b <= start:
                    continue
                outside = text[a:start] + text[end:b]
                if outside.strip() and not text[max(a, start) : min(b, end)].strip():
                    continue  # a word of the prompt with the blank after it
                if outside.strip():
                    raise RowError(
                        f"the token {text[a:b]!r} is partly the assistant's and partly not, so what is "
                        "learnt is not certain; end the prompt, or begin the answer, with a blank"
                    )
                inside.append(i)
                supervised[i] = True
            self._prove([ids[i] for i in inside], text[start:end])
        return Masked(ids, supervised)

    def _prove(self, ids: Sequence[int], part: str) -> None:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False)
        if _plain(decoded) != _plain(part):
            raise RowError(f"what is learnt would be {decoded!r:.80}, and the assistant's part is {part!r:.80}")


def _plain(text: str) -> str:
    """For comparison: decoders of SentencePiece vocabularies drop blanks around special tokens."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _position(part: Sequence[int], whole: Sequence[int]) -> int:
    """Where `part` begins in `whole`, which has at most a few tokens more around it."""
    for at in range(len(whole) - len(part) + 1):
        if list(whole[at : at + len(part)]) == list(part):
            return at
    raise RowError(
        "the tokenizer writes the text differently with its special tokens, so what is learnt is not certain"
    )
