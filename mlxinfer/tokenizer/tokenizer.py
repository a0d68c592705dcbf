"""A model's tokenizer, from a folder's files or from the parts of a GGUF file, over the `tokenizers` package."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.formats.files import read_json_object
from mlxinfer.tokenizer import framing, limits
from mlxinfer.tokenizer.files import chat_templates, load_backend, mapped, parse_backend, special_tokens, token_ids
from mlxinfer.tokenizer.text import Detokenizer

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

    from mlxinfer.tokenizer.framing import Framed
    from mlxinfer.tokenizer.template import ChatTemplate
    from mlxinfer.types import Message


class Tokenizer:
    """Encode, decode and render chats for one model. Thread-safe; make it with `from_folder` or `from_parts`.

    Special-token strings inside any text, a user's message included, become those tokens, as in transformers.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        add_bos_token: bool,
        growth: int = 1,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._growth = growth
        self._longest = max((len(t.encode(errors="replace")) for t in backend.get_vocab()), default=1)
        self._templates = dict(chat_templates)
        self._compiled: dict[str, ChatTemplate] = {}
        self._lock = threading.Lock()
        self._special_tokens = dict(special_tokens)
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        eos = {i for i in eos_token_ids if i >= 0}
        if (token := special_tokens.get("eos_token")) and (eos_id := backend.token_to_id(token)) is not None:
            eos.add(eos_id)
        self.eos_token_ids: frozenset[int] = frozenset(eos)
        self.bos_token_id: int | None = self._id_of("bos_token")
        self.eos_token_id: int | None = self._id_of("eos_token")
        self._prepend_bos = False
        self._prepend_bos = add_bos_token and self.bos_token_id is not None and not self._backend_adds_bos()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and what stands beside it: tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja or .json, and the end-of-sequence ids of generation_config.json and config.json.

        Raises ModelFileError for a missing or broken file.
        """
        config = read_json_object(folder / "tokenizer_config.json") or {}
        special = special_tokens(read_json_object(folder / "special_tokens_map.json") or {}) | special_tokens(config)
        eos: list[int] = []
        model_config = read_json_object(folder / "config.json") or {}
        text_config = model_config.get("text_config")
        for source in (read_json_object(folder / "generation_config.json"), model_config, text_config):
            if isinstance(source, dict):
                eos += token_ids(source.get("eos_token_id"))
        backend, growth = load_backend(folder)
        return cls(
            backend,
            growth=growth,
            chat_templates=chat_templates(folder, config),
            special_tokens=special,
            eos_token_ids=eos,
            add_bos_token=config.get("add_bos_token") is True,
        )

    @classmethod
    def from_parts(
        cls,
        *,
        tokenizer_json: Mapping[str, Any],
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_token_ids: Sequence[int] = (),
        add_bos_token: bool = False,
    ) -> Tokenizer:
        """From a tokenizer.json as a dict, and the rest as values. Raises ModelFileError when it is not sound."""
        special = {k: v for k, v in (("bos_token", bos_token), ("eos_token", eos_token)) if v}
        growth = limits.check_steps(tokenizer_json, "the tokenizer")
        return cls(
            parse_backend(json.dumps(tokenizer_json), "the tokenizer"),
            growth=growth,
            chat_templates={"default": chat_template} if chat_template else {},
            special_tokens=special,
            eos_token_ids=eos_token_ids,
            add_bos_token=add_bos_token,
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template_texts(self) -> Mapping[str, str]:
        """The chat templates' own text, by name ("default", "tool_use", …)."""
        return dict(self._templates)

    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the vocabulary by hand, special or not, by their spelling."""
        return {t.content: i for i, t in self._backend.get_added_tokens_decoder().items()}

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` framed as the model's tokenizer does it (a leading BOS, …).

        Other threads run meanwhile. Raises InvalidRequestError for text that is not valid Unicode (a lone surrogate),
        ContextLengthError for what `check_length` refuses.
        """
        self.check_length(text, max_tokens)
        try:
            # The batch call lets other threads run, and without offsets it takes a quarter of the time and memory.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise mapped(error, "the tokenizer fails to encode") from error
        if add_special_tokens and self._prepend_bos:
            assert self.bos_token_id is not None
            return [self.bos_token_id, *ids]
        return ids

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, each for itself and without special tokens around it; several cores work."""
        for text in texts:
            self.check_length(text, None)
        try:
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            raise mapped(error, "the tokenizer fails to encode") from error
        return [encoding.ids for encoding in encoded]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Of each token of `text`, encoded without special tokens around it: its [start, end) in characters."""
        self.check_length(text, None)
        try:
            return self._backend.encode(text, add_special_tokens=False).offsets
        except BaseException as error:
            raise mapped(error, "the tokenizer fails to encode") from error

    def frame(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        max_tokens: int,
        truncate: bool = False,
        special_tokens: bool = True,
    ) -> list[Framed]:
        """Texts, or pairs of texts, as an encoder reads them, each in at most `max_tokens` tokens; see framing.frame.

        Raises InvalidRequestError for a lone surrogate, ContextLengthError for a text that is too long and isn't to be
        cut, or that would take too much memory.
        """
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                self.check_length(part, None if truncate else max_tokens)
        bos = self.bos_token_id if self._prepend_bos else None
        return framing.frame(
            self._backend,
            texts,
            max_tokens=max_tokens,
            truncate=truncate,
            special_tokens=special_tokens,
            bos=bos,
        )

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise ContextLengthError at once for a text that cannot be `max_tokens` tokens: one of more than 64 bytes (or
        the longest entry of the vocabulary) for each; InvalidRequestError for a lone surrogate."""
        limits.check_text(_utf8_length(text), max_tokens, self._longest, self._growth)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary have no text."""
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise mapped(error, "the tokenizer fails to decode") from error

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None beyond the vocabulary."""
        return self._backend.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token that text can't spell."""
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The text the model was trained to see for `messages`. Content that is a list of text parts is joined by
        newlines, as llama.cpp and vLLM do; content None is the empty string.

        Raises InvalidRequestError when there is no chat template, for content that is not text, and with the
        template's own message when it refuses the messages.
        """
        return self._render(messages, None, add_generation_prompt, tools, template_kwargs)

    def _render(
        self,
        messages: Sequence[Message],
        max_chars: int | None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._template("tool_use" if tools and "tool_use" in self._templates else "default")
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": [_plain_message(m, i) for i, m in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(variables, max_chars=max_chars)

    def chat_ids(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """`render_chat` and `encode` in one; the template itself writes the special tokens.

        With `max_tokens`, raises ContextLengthError for messages or rendered text that cannot fit it, before the work.
        """
        max_chars = None
        if max_tokens is not None:
            max_chars = limits.max_text_bytes(max_tokens, self._longest)
            limits.check_text(_content_chars(messages), max_tokens, self._longest, 1)
        text = self._render(messages, max_chars, add_generation_prompt, tools, template_kwargs)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def detokenizer(self, keep: Iterable[int] = ()) -> Detokenizer:
        """A new incremental decoder for one reply; it skips special tokens but those to `keep`."""
        kept = {token: text for token in keep if (text := self.token_text(token)) is not None}
        return Detokenizer(self.decode, self._has_text, kept)

    def special_id(self, text: str) -> int | None:
        """The id of a control token; None when the vocabulary has none of this spelling."""
        token = self._backend.token_to_id(text)
        return token if token in self._special_ids else None

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return self._backend.to_str()

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def _template(self, name: str) -> ChatTemplate:
        if not self._templates:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot chat; "
                "complete plain text instead (generate, --raw or /v1/completions)",
                param="messages",
            )
        with self._lock:
            if name not in self._compiled:
                # jinja2 is only needed by chats.
                from mlxinfer.tokenizer.template import ChatTemplate

                self._compiled[name] = ChatTemplate(self._templates[name])
            return self._compiled[name]

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return self._backend.token_to_id(token) if token else None

    def _backend_adds_bos(self) -> bool:
        return self.encode("a")[:1] == [self.bos_token_id]


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or a list of text parts, not {content!r:.80}", param="messages"
        )
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRequestError(
                f"messages[{index}].content has a part of type {kind!r:.80}; this model reads text only",
                param="messages",
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _content_chars(messages: Sequence[Message]) -> int:
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list | tuple):
            texts = (part.get("text") for part in content if isinstance(part, Mapping))
            total += sum(len(text) for text in texts if isinstance(text, str))
    return total


def _utf8_length(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate {text[error.start]!r}"
        ) from None
