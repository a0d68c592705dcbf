"""Masks over the assistant's turns equal a reference made of parts, in every family's chat format, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mlxinfer.lora.data import spans
from mlxinfer.lora.data.formats import Chat, RowError, parse_row
from mlxinfer.lora.data.masks import Masked, Masker
from mlxinfer.tokenizer import Tokenizer
from tests.parity.chat_families import FAMILIES, Family
from tests.tiny import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "You are kind."}


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _calls(reasoning: str | None = None) -> list[dict[str, Any]]:
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"place": "Sète"}'},
    }
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return [
        {"role": "user", "content": "What is the weather in Sète?"},
        {"role": "assistant", "content": "", "tool_calls": [call], **thought},
        {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "clear", "t": 21}'},
        {"role": "assistant", "content": "Clear, 21 degrees.", **thought},
        {"role": "user", "content": "And the capital of france?"},
        {"role": "assistant", "content": "paris", **thought},
    ]


PLAIN = {
    "one turn": _turns("hi", "hello"),
    "three turns": _turns("the quick brown fox", "jumps over", "the lazy dog?", "the fox is quick.", "bye", "Bye!"),
    "with system": [SYSTEM, *_turns("what is the capital?", "paris is the capital of france.", "thanks", "Sure")],
    "the same text everywhere": _turns("a", "a", "a", "a"),
    "blanks around": _turns("  hi \n", "first line\n\n  second", "x\n", "1 + 1 = 2"),
    "looks like markup": _turns("user\nassistant", "<table>|a|</table> assistant", "USER: ", "<b> [x] ### {{ y }}"),
    "other scripts": _turns("Où ? 你好", "Là 🙂 — 世界", "é", "\u4f60\u597d"),
}
WITH_TOOLS = {"tools": _calls(), "tools and system": [SYSTEM, *_calls()]}
WITH_REASONING = {
    "reasoning": [*_turns("2 + 2?"), {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}],
    "reasoning in each turn": [
        *_turns("2 + 2?"),
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        *_turns("3 + 3?"),
        {"role": "assistant", "content": "6", "reasoning_content": "Three and three."},
    ],
    "reasoning and tools": _calls("I should look."),
}


def byte_level(specials: Sequence[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    return backend


def metaspace(specials: Sequence[str]) -> tokenizers.Tokenizer:
    """As SentencePiece vocabularies are: a blank belongs to the word after it, bytes are the fallback."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    tokens = ["<unk>", *specials, *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator([TEXT, "ASSISTANT: USER: [INST] [/INST] Hello , . 1 2 + = ?"] * 4, trainer)
    return backend


def _id(backend: tokenizers.Tokenizer, token: str) -> int:
    found = backend.token_to_id(token)
    assert found is not None
    return found


def _tokenizer(family: Family, backend: tokenizers.Tokenizer) -> Tokenizer:
    stops = [_id(backend, stop) for stop in family.stops]
    special = {"eos_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    return Tokenizer(
        backend,
        chat_templates={"default": family.template},
        special_tokens=special,
        eos_token_ids=stops,
        add_bos_token=family.bos is not None,
    )


def _reference(family: Family, backend: tokenizers.Tokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """A token is learnt where any of its characters that is no blank is the assistant's, or all of them are."""
    learnt: list[bool] = []
    text = ""
    for part, own in family.pieces(chat.messages, chat.tools):
        text += part
        learnt += [own] * len(part)
    encoding = backend.encode(text, add_special_tokens=False)
    mask: list[bool] = []
    for a, b in encoding.offsets:
        solid = [i for i in range(a, b) if not text[i].isspace()] or list(range(a, b))
        mask.append(any(learnt[i] for i in solid))
    ids = list(encoding.ids)
    if family.appends_eos:
        ids.append(_id(backend, family.eos))
        mask.append(True)
    mask[0] = False
    return ids, mask


def _cases(family: Family) -> dict[str, list[dict[str, Any]]]:
    return PLAIN | (WITH_TOOLS if family.tools else {}) | (WITH_REASONING if family.reasoning else {})


def _chat(family: Family, name: str) -> Chat:
    row = parse_row({"messages": _cases(family)[name], "tools": TOOLS if "tools" in name else None}, as_chat=True)
    assert isinstance(row.first, Chat)
    return row.first


CASES = [(family, name) for family in FAMILIES for name in _cases(family)]
BACKENDS: dict[str, tokenizers.Tokenizer] = {}


def _backend(family: Family) -> tokenizers.Tokenizer:
    if family.name not in BACKENDS:
        BACKENDS[family.name] = byte_level(tuple(dict.fromkeys((*family.specials, family.eos))))
    return BACKENDS[family.name]


def _mask(family: Family, name: str) -> Masked:
    return Masker(_tokenizer(family, _backend(family)), "assistant", {}).mask(_chat(family, name))


def test_there_are_twenty_families_and_more() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 20


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda v: v.name if isinstance(v, Family) else v)
def test_every_token_is_masked_as_the_reference_says(family: Family, name: str) -> None:
    chat = _chat(family, name)
    ids, mask = _reference(family, _backend(family), chat)
    masked = _mask(family, name)
    assert masked.token_ids == ids
    wrong = [i for i, (a, b) in enumerate(zip(masked.supervised, mask, strict=True)) if a != b]
    assert not wrong, [(_backend(family).id_to_token(ids[i]), mask[i]) for i in wrong]
    assert any(mask)


SENTENCEPIECE = [f for f in FAMILIES if f.name in ("llama2", "mistral-v1", "vicuna", "gemma", "zephyr")]


@pytest.mark.parametrize("family", SENTENCEPIECE, ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["one turn", "three turns", "with system", "looks like markup", "other scripts"])
def test_a_vocabulary_with_blanks_in_its_words_is_masked_too(family: Family, name: str) -> None:
    backend = metaspace(tuple(dict.fromkeys((*family.specials, family.eos))))
    chat = _chat(family, name)
    ids, mask = _reference(family, backend, chat)
    masked = Masker(_tokenizer(family, backend), "assistant", {}).mask(chat)
    assert masked.token_ids == ids
    assert masked.supervised == mask


def test_learnt_tokens_that_do_not_decode_to_the_answer_are_refused() -> None:
    """A vocabulary that changes letters, in a format whose turns do not begin between two tokens."""
    family = next(f for f in FAMILIES if f.name == "vicuna")
    backend = metaspace(family.specials)
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(RowError, match="what is learnt would be 'bye!</s>', and the assistant's part is ' Bye!</s>'"):
        Masker(_tokenizer(family, backend), "assistant", {}).mask(_chat(family, "three turns"))


PIECES = [
    "a",
    " ",
    "\n",
    "<",
    "<think>",
    "</think>",
    "assistant",
    "user",
    "[INST]",
    "<|im_end|>",
    "{{ x }}",
    "é",
    "你",
    '"',
]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join).filter(str.strip)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FAMILIES), st.lists(TEXTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_a_mask_is_right_or_the_row_is_refused(family: Family, texts: list[str]) -> None:
    """Contents that look like the template's own text: control tokens, headers and reasoning among them."""
    # An answer that spells what the prompt of inference ends with goes on after it.
    assume(family.name != "deepseek-r1" or not any(text.startswith("<think>\n") for text in texts))
    row = parse_row({"messages": _turns(*texts)}, as_chat=True)
    assert isinstance(row.first, Chat)
    tokenizer = _tokenizer(family, _backend(family))
    try:
        masked = Masker(tokenizer, "assistant", {}).mask(row.first)
    except RowError:
        return
    expected = _reference(family, _backend(family), row.first)
    text = "".join(part for part, _ in family.pieces(row.first.messages, None))
    assume(text == tokenizer.render_chat(row.first.messages, add_generation_prompt=False))  # reasoning in the content
    assert (masked.token_ids, masked.supervised) == expected


def _moved(name: str, by: int) -> Callable[..., Any]:
    whole = getattr(spans, name)

    def moved(*args: Any) -> Any:
        found = whole(*args)
        return (found[0] + by, found[1]) if isinstance(found, tuple) else found + by

    return moved


def _without_closing(*args: Any) -> tuple[int, bool]:
    end, closed = spans_end(*args)
    text = args[0].text[:end]
    closing = max((s for s in (*args[4], *SPECIALS) if text.endswith(s)), key=len, default="")
    return end - len(closing or text[-1:]), closed


spans_end = spans._end
SPECIALS = {special for family in FAMILIES for special in (*family.specials, family.eos)}
MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "the turn begins later": ("_start", _moved("_start", 1)),
    "the turn begins in the prompt": ("_start", _moved("_start", -2)),
    "the closing token is not learnt": ("_end", _without_closing),
    "the turn ends early": ("_end", _moved("_end", -1)),
    "the turn's end reaches into the next": ("_end", _moved("_end", 3)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_mutant_of_the_masks_is_caught(family: Family, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = _chat(family, "three turns")
    expected = _reference(family, _backend(family), chat)
    monkeypatch.setattr(spans, *MUTANTS[mutant])
    try:
        masked = _mask(family, "three turns")
    except RowError:
        return  # the proof of the mask itself
    assert (masked.token_ids, masked.supervised) != expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_last_turn_only_is_not_every_turn(family: Family) -> None:
    chat = _chat(family, "three turns")
    _, mask = _reference(family, _backend(family), chat)
    last = Masker(_tokenizer(family, _backend(family)), "last", {}).mask(chat).supervised
    begin = max(i for i in range(1, len(mask)) if mask[i] and not mask[i - 1])
    assert last == [own and i >= begin for i, own in enumerate(mask)] != mask


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_prompt_of_inference_precedes_what_is_learnt_of_the_last_turn(family: Family) -> None:
    """What the engine would feed for this chat is what the model has read when the answer begins."""
    chat = _chat(family, "three turns")
    tokenizer = _tokenizer(family, _backend(family))
    prompt = tokenizer.chat_ids(chat.messages[:-1])
    masked = Masker(tokenizer, "last", {}).mask(chat)
    begin = masked.supervised.index(True)
    if family.name == "deepseek-r1":
        # Its prompt opens the reasoning, which this answer lacks.
        assert prompt[:begin] == masked.token_ids[:begin]
        assert tokenizer.decode(prompt[begin:]) == "<think>\n"
    else:
        assert masked.token_ids[:begin] == prompt
