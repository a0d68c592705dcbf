"""Which format a model replies in: by its chat template's text and the tokens that were added to its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.tokenizer.replies.format import ReplyFormat, ThinkTags
from mlxinfer.tokenizer.replies.harmony import harmony_format
from mlxinfer.tokenizer.replies.markup import GemmaCalls, Tags, python_calls
from mlxinfer.tokenizer.replies.named import MistralCalls, NamedBlock
from mlxinfer.tokenizer.replies.objects import BareCalls, JsonBlock
from mlxinfer.tokenizer.replies.whole import WholeCalls, is_balanced, is_python

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlxinfer.tokenizer.replies.syntax import CallSyntax
    from mlxinfer.tokenizer.tokenizer import Tokenizer

HERMES = JsonBlock("<tool_call>", "</tool_call>")
PLAIN = BareCalls(HERMES)
LLAMA3 = BareCalls(arguments_key="parameters")

# The bars are full-width, which an editor hardly shows.
_DEEPSEEK_SECTION = ("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")
_DEEPSEEK_CALL = ("<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>")


def _glm(prefix: str) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    return (
        (f"<{prefix}tool_call>", "\n", f"</{prefix}tool_call>"),
        (f"<{prefix}arg_key>", f"</{prefix}arg_key>\n<{prefix}arg_value>", f"</{prefix}arg_value>\n"),
    )


_GLM = Tags(*_glm(""))
_LONGCAT = Tags(*_glm("longcat_"))

# Names are those of mlx_lm.tool_parsers; the markup is that of the models' chat templates.
WHOLE: dict[str, WholeCalls] = {
    "qwen3_coder": WholeCalls(
        parser="qwen3_coder",
        openers=("<tool_call>",),
        closer="</tool_call>",
        grammar=Tags(
            ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"), ("<parameter=", ">\n", "\n</parameter>\n")
        ),
        shape=("<function=", "</function>"),
        costly="<parameter=",
    ),
    "glm47": WholeCalls(
        parser="glm47",
        openers=("<tool_call>",),
        closer="</tool_call>",
        grammar=_GLM,
        shape=("", "</arg_value>"),
        costly="<arg_key>",
        or_plain=True,
        tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "longcat": WholeCalls(
        parser="longcat",
        openers=("<longcat_tool_call>",),
        closer="</longcat_tool_call>",
        grammar=_LONGCAT,
        shape=("", "</longcat_arg_value>"),
        costly="<longcat_arg_key>",
        or_plain=True,
        tokens=("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
    ),
    "minimax_m2": WholeCalls(
        parser="minimax_m2",
        openers=("<minimax:tool_call>",),
        closer="</minimax:tool_call>",
        grammar=Tags(
            ('<invoke name="', '">\n', "</invoke>\n"),
            ('<parameter name="', '">', "</parameter>\n"),
            ("<minimax:tool_call>\n", "</minimax:tool_call>"),
            gap="",
        ),
        shape=("<invoke name=", "</invoke>"),
        costly="<parameter name=",
        counted="<invoke name=",
    ),
    "minicpm5": WholeCalls(
        parser="minicpm5",
        openers=("<function name=",),
        closer="</function>",
        grammar=Tags(('<function name="', '">', "</function>"), ('<param name="', '">', "</param>"), gap=""),
        costly="<param",
    ),
    "muse_spark": WholeCalls(
        parser="muse_spark",
        openers=("<atem:function_calls>",),
        closer="</atem:function_calls>",
        grammar=Tags(
            ('<atem:invoke name="', '">\n', "</atem:invoke>\n"),
            ('<atem:parameter name="', '">', "</atem:parameter>\n"),
            ("<atem:function_calls>\n", "</atem:function_calls>"),
            gap="",
        ),
        shape=("<atem:invoke", "</atem:invoke>"),
        costly="<atem:",
        counted="<atem:invoke ",
    ),
    "kimi_k3": WholeCalls(
        parser="kimi_k3",
        openers=("<|open|>tools<|sep|>",),
        closer="<|close|>tools<|sep|>",
        grammar=Tags(
            ('<|open|>call tool="', '" index="', "<|close|>call<|sep|>"),
            ('<|open|>argument key="', '" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
            ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            gap="",
            typed=True,
            numbered='"<|sep|>',
        ),
        shape=("<|open|>call", "<|close|>call<|sep|>"),
        costly="<|open|>",
        counted="<|open|>call ",
    ),
    "pythonic": WholeCalls(
        parser="pythonic",
        openers=("<|tool_call_start|>",),
        closer="<|tool_call_end|>",
        grammar=python_calls,
        shape=("[", "]"),
        costly="(",
        check=is_python,
    ),
    "gemma4": WholeCalls(
        parser="gemma4",
        openers=("<|tool_call>",),
        closer="<tool_call|>",
        grammar=GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>', nested=True),
        shape=("call:", "}"),
        costly="call:",
        check=is_balanced,
        tokens=('<|"|>',),
    ),
    "function_gemma": WholeCalls(
        parser="function_gemma",
        openers=("<start_function_call>",),
        closer="<end_function_call>",
        grammar=GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>", nested=False),
        shape=("call:", "}"),
        costly="call:",
        tokens=("<escape>",),
    ),
}
"""By the name of mlx-lm's parser, those whose calls aren't JSON."""

_SEED_CALL = ("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>")
SEED_OSS = WholeCalls(
    parser="qwen3_coder",
    openers=("<seed:tool_call>",),
    closer="</seed:tool_call>",
    grammar=Tags(_SEED_CALL, ("<parameter=", ">\n", "\n</parameter>\n")),
    shape=("<function=", "</function>"),
    costly="<parameter=",
)
"""Qwen's calls between other markers."""

_BLOCKS = {
    "<TOOLCALL>": ("nemotron", JsonBlock("<TOOLCALL>", "</TOOLCALL>", is_list=True)),
    "<tool_calls>": ("jamba", JsonBlock("<tool_calls>", "</tool_calls>", is_list=True)),
    "<tool_call>": ("hermes", HERMES),
}
"""Lists and objects of calls between markers, by what the template has to hold."""

_THINK = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<think>", "</think>"))
"""Reasoning that mlx-lm doesn't know, or knows by tokens only."""


def reply_format(tokenizer: Tokenizer, model_type: str) -> ReplyFormat:
    """The format of a model's replies; "plain" for one whose template knows no tools."""
    added = tokenizer.added_tokens()
    special = frozenset(t for t, i in added.items() if tokenizer.is_special(i))
    template = "\n".join(tokenizer.chat_template_texts.values())
    if "<|channel|>" in template + " ".join(added) and (model_type == "gpt_oss" or "<|message|>" in template):
        return harmony_format(added, special)
    name, syntax = _calls(template, added)
    think = _think(template, added)
    silent = _silent(added) if name == "kimi_k3" else ()
    literals = (*syntax.openers, *syntax.tokens, *silent, *((think.start, think.end) if think else ()))
    if isinstance(syntax, WholeCalls):
        literals = (*literals, syntax.closer)
    own = {t: i for t, i in added.items() if _is_in(t, literals)}
    return ReplyFormat(name, name != "plain", syntax, think, silent, own, special & own.keys())


def _is_in(token: str, literals: Iterable[str]) -> bool:
    # Vocabularies have added tokens such as a run of spaces or a lone "<"; markup is longer.
    return len(token) > 2 and any(token in literal for literal in literals)


def _calls(template: str, added: dict[str, int]) -> tuple[str, CallSyntax]:
    """(name of the format, how it writes calls)."""
    if _DEEPSEEK_SECTION[0] in template:
        fenced = "```json" in template
        name = "deepseek_v3" if fenced else "deepseek_v31"
        return name, NamedBlock(_DEEPSEEK_SECTION, _DEEPSEEK_CALL, fenced=fenced)
    # Imported late: it brings the array library with it.
    from mlxinfer.upstream import tool_parser_name

    known = tool_parser_name(template, added.keys())
    if known is not None and known in WHOLE:
        return known, WHOLE[known]
    if "<seed:tool_call>" in template:
        return "seed_oss", SEED_OSS
    if known == "mistral":
        return "mistral", MistralCalls(named="[ARGS]" in template)
    if known == "kimi_k2":
        section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        call = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
        return "kimi_k2", NamedBlock(section, call, numbered=True)
    if "<|tool_call|>" in template:
        return "phi4", _object_block("<|tool_call|>", "<|/tool_call|>", template)
    for mark, (name, syntax) in _BLOCKS.items():
        if mark in template:
            return name, syntax
    if "<|python_tag|>" in added and "tools" in template:
        return "llama3", LLAMA3
    return "plain", PLAIN


def _object_block(opener: str, closer: str, template: str) -> JsonBlock:
    """Phi-4 mini closes its calls, each an object or all in a list; Granite 3 has a list and doesn't close it."""
    closer = closer if closer in template else ""
    return JsonBlock(opener, closer, is_list=not closer or f"{opener}[" in template, pad="")


def _think(template: str, added: dict[str, int]) -> ThinkTags | None:
    from mlxinfer.upstream import think_tags

    for start, end in _THINK:
        if end in template:
            return ThinkTags(start, end)
    if tags := think_tags(added.keys()):
        return ThinkTags(*tags)
    return next((ThinkTags(start, end) for start, end in _THINK if start in added and end in added), None)


def _silent(added: dict[str, int]) -> tuple[str, ...]:
    from mlxinfer.upstream import framing_markup

    return framing_markup(added.keys())
