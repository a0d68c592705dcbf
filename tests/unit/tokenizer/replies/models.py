"""Small models that reply in each format: a tokenizer with the format's tokens, a chat template cut down to its
marks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers

from mlxinfer.tokenizer import Tokenizer
from mlxinfer.tokenizer.replies import ReplyFormat, reply_format
from tests.unit.tokenizer import tiny


@dataclass(frozen=True)
class Model:
    """What tells a format: `marks` stand in the chat template, the rest in the vocabulary."""

    name: str
    marks: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    model_type: str = "llama"
    one: str = ""
    """A call of get_weather with {"city": "Köln", "days": 3}, as the model's template writes it."""
    two: str = ""
    """That, and then the same with {"city": "<b>"}."""


DS = (
    "<\uff5ctool▁calls▁begin\uff5c>",
    "<\uff5ctool▁calls▁end\uff5c>",
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁sep\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
A = '{"city": "Köln", "days": 3}'
B = '{"city": "<b>"}'


def _object(arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "get_weather", "{key}": {arguments}}}'


def _hermes(arguments: str) -> str:
    return f"<tool_call>\n{_object(arguments)}\n</tool_call>"


def _xml(*pairs: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
    return f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"


def _glm(prefix: str, gap: str, *pairs: tuple[str, str]) -> str:
    p = prefix
    inner = "".join(f"<{p}arg_key>{k}</{p}arg_key>{gap}<{p}arg_value>{v}</{p}arg_value>{gap}" for k, v in pairs)
    return f"<{p}tool_call>get_weather{gap}{inner}</{p}tool_call>"


def _invoke(prefix: str, *pairs: tuple[str, str]) -> str:
    inner = "".join(f'<{prefix}parameter name="{k}">{v}</{prefix}parameter>\n' for k, v in pairs)
    return f'<{prefix}invoke name="get_weather">\n{inner}</{prefix}invoke>\n'


def _xtml(*triples: tuple[str, str, str]) -> str:
    inner = "".join(f'<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>' for k, t, v in triples)
    return f'<|open|>call tool="get_weather" index="0"<|sep|>{inner}<|close|>call<|sep|>'


C, D, E = ("city", "Köln"), ("days", "3"), ("city", "<b>")

MODELS = {
    m.name: m
    for m in (
        Model(
            "hermes",
            ("<tool_call>", "tool_call.name"),
            added=("<tool_call>", "</tool_call>", "<think>", "</think>"),
            one=_hermes(A),
            two=f"{_hermes(A)}\n{_hermes(B)}",
        ),
        Model(
            "llama3",
            ("tools", '"parameters"'),
            special=("<|python_tag|>", "<|eom_id|>"),
            one=_object(A, "parameters"),
            two=f"{_object(A, 'parameters')}; {_object(B, 'parameters')}",
        ),
        Model(
            "mistral",
            ("[TOOL_CALLS]",),
            special=("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
            one=f"[TOOL_CALLS][{_object(A)}]",
            two=f"[TOOL_CALLS][{_object(A)}, {_object(B)}]",
        ),
        Model(
            "mistral_named",
            ("[TOOL_CALLS]", "[ARGS]"),
            special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            one=f"[TOOL_CALLS]get_weather[ARGS]{A}",
            two=f"[TOOL_CALLS]get_weather[ARGS]{A}[TOOL_CALLS]get_weather[ARGS]{B}",
        ),
        Model(
            "deepseek_v3",
            ("<\uff5ctool▁calls▁begin\uff5c>", "```json", "</think>"),
            special=DS,
            added=("<think>", "</think>"),
            one=f"{DS[0]}{DS[2]}function{DS[3]}get_weather\n```json\n{A}\n```{DS[4]}{DS[1]}",
            two=f"{DS[0]}{DS[2]}function{DS[3]}get_weather\n```json\n{A}\n```{DS[4]}\n"
            f"{DS[2]}function{DS[3]}get_weather\n```json\n{B}\n```{DS[4]}{DS[1]}",
        ),
        Model(
            "deepseek_v31",
            ("<\uff5ctool▁calls▁begin\uff5c>", "</think>"),
            special=DS,
            added=("<think>", "</think>"),
            one=f"{DS[0]}{DS[2]}get_weather{DS[3]}{A}{DS[4]}{DS[1]}",
            two=f"{DS[0]}{DS[2]}get_weather{DS[3]}{A}{DS[4]}{DS[2]}get_weather{DS[3]}{B}{DS[4]}{DS[1]}",
        ),
        Model(
            "kimi_k2",
            (KIMI[0],),
            special=KIMI,
            one=f"{KIMI[0]}{KIMI[2]}functions.get_weather:0{KIMI[3]}{A}{KIMI[4]}{KIMI[1]}",
            two=f"{KIMI[0]}{KIMI[2]}functions.get_weather:0{KIMI[3]}{A}{KIMI[4]}"
            f"{KIMI[2]}functions.get_weather:1{KIMI[3]}{B}{KIMI[4]}{KIMI[1]}",
        ),
        Model(
            "harmony",
            ("<|channel|>", "<|message|>"),
            special=HARMONY,
            model_type="gpt_oss",
            one=f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{A}",
        ),
        Model(
            "phi4",
            ("<|tool_call|>[", "<|/tool_call|>"),
            special=("<|tool_call|>", "<|/tool_call|>"),
            one=f"<|tool_call|>[{_object(A)}]<|/tool_call|>",
            two=f"<|tool_call|>[{_object(A)}, {_object(B)}]<|/tool_call|>",
        ),
        Model(
            "phi4_objects",
            ("<|tool_call|>{", "<|/tool_call|>"),
            special=("<|tool_call|>", "<|/tool_call|>"),
            one=f"<|tool_call|>{_object(A)}<|/tool_call|>",
            two=f"<|tool_call|>{_object(A)}<|/tool_call|><|tool_call|>{_object(B)}<|/tool_call|>",
        ),
        Model(
            "granite",
            ("<|tool_call|>",),
            special=("<|tool_call|>",),
            one=f"<|tool_call|>[{_object(A)}]",
            two=f"<|tool_call|>[{_object(A)}, {_object(B)}]",
        ),
        Model(
            "nemotron",
            ("<TOOLCALL>", "</think>"),
            one=f"<TOOLCALL>[{_object(A)}]</TOOLCALL>",
            two=f"<TOOLCALL>[{_object(A)}, {_object(B)}]</TOOLCALL>",
        ),
        Model(
            "jamba",
            ("<tool_calls>",),
            one=f"<tool_calls>[{_object(A)}]</tool_calls>",
            two=f"<tool_calls>[{_object(A)}, {_object(B)}]</tool_calls>",
        ),
        Model(
            "seed_oss",
            ("<seed:tool_call>", "</seed:think>"),
            special=("<seed:think>", "</seed:think>"),
            added=("<seed:tool_call>", "</seed:tool_call>"),
            one=_xml(C, D).replace("tool_call", "seed:tool_call").replace(">\nK", ">K").replace("n\n</p", "n</p"),
            two=f"{_xml(C, D)}\n{_xml(E)}".replace("tool_call", "seed:tool_call"),
        ),
        Model(
            "qwen3_coder",
            ("<tool_call>\n<function=",),
            added=("<tool_call>", "</tool_call>"),
            one=_xml(C, D),
            two=f"{_xml(C, D)}\n{_xml(E)}",
        ),
        Model(
            "glm47",
            ("<arg_key>", "</think>"),
            special=("<think>", "</think>"),
            added=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            one=_glm("", "\n", C, D),
            two=f"{_glm('', chr(10), C, D)}\n{_glm('', chr(10), E)}",
        ),
        Model(
            "glm47_compact",
            ("<arg_key>",),
            added=("<tool_call>", "</tool_call>"),
            one=_glm("", "", C, D),
            two=f"{_glm('', '', C, D)}\n{_glm('', '', E)}",
        ),
        Model(
            "longcat",
            ("<longcat_tool_call>",),
            added=("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>"),
            one=_glm("longcat_", "\n", C, D),
            two=f"{_glm('longcat_', chr(10), C, D)}\n{_glm('longcat_', chr(10), E)}",
        ),
        Model(
            "minimax_m2",
            ("<minimax:tool_call>",),
            added=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
            one=f"<minimax:tool_call>\n{_invoke('', C, D)}</minimax:tool_call>",
            two=f"<minimax:tool_call>\n{_invoke('', C, D)}{_invoke('', E)}</minimax:tool_call>",
        ),
        Model(
            "minicpm5",
            ('<function name="', '<param name="'),
            one='<function name="get_weather"><param name="city">Köln</param><param name="days">3</param></function>',
            two='<function name="get_weather"><param name="city">Köln</param><param name="days">3</param></function>'
            '<function name="get_weather"><param name="city"><b></param></function>',
        ),
        Model(
            "muse_spark",
            ("<atem:function_calls>",),
            added=("<|think:start|>", "<|think:end|>"),
            one=f"<atem:function_calls>\n{_invoke('atem:', C, D)}</atem:function_calls>",
            two=f"<atem:function_calls>\n{_invoke('atem:', C, D)}{_invoke('atem:', E)}</atem:function_calls>",
        ),
        Model(
            "kimi_k3",
            (),
            special=XTML,
            one="<|open|>tools<|sep|>"
            + _xtml(("city", "string", "Köln"), ("days", "number", "3"))
            + "<|close|>tools<|sep|>",
            two="<|open|>tools<|sep|>"
            + (_xtml(("city", "string", "Köln"), ("days", "number", "3")) + _xtml(("city", "string", "<b>")))
            + "<|close|>tools<|sep|>",
        ),
        Model(
            "pythonic",
            ("<|tool_call_start|>",),
            special=("<|tool_call_start|>", "<|tool_call_end|>"),
            one='<|tool_call_start|>[get_weather(city="Köln", days=3)]<|tool_call_end|>',
            two='<|tool_call_start|>[get_weather(city="Köln", days=3), get_weather(city="<b>")]<|tool_call_end|>',
        ),
        Model(
            "gemma4",
            ("<|tool_call>", "<tool_call|>"),
            special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
            one='<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>',
            two='<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>'
            '<|tool_call>call:get_weather{city:<|"|><b><|"|>}<tool_call|>',
        ),
        Model(
            "function_gemma",
            ("<start_function_call>",),
            added=("<start_function_call>", "<end_function_call>", "<escape>"),
            one="<start_function_call>call:get_weather{city:<escape>Köln<escape>,days:3}<end_function_call>",
            two="<start_function_call>call:get_weather{city:<escape>Köln<escape>,days:3}<end_function_call>"
            "<start_function_call>call:get_weather{city:<escape><b><escape>}<end_function_call>",
        ),
        Model("plain", one=_object(A), two=f"{_object(A)}\n{_object(B)}"),
    )
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@cache
def backend(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of a model here."""
    model = MODELS[name]
    made = tokenizers.Tokenizer.from_str(json.dumps(tiny.byte_level()))
    made.add_special_tokens(list(model.special))
    made.add_tokens(list(model.added))
    return made


@cache
def format_of(name: str) -> ReplyFormat:
    """The format found for a model here."""
    model = MODELS[name]
    tokenizer = Tokenizer.from_parts(
        tokenizer_json=json.loads(backend(name).to_str()), chat_template=" ".join(model.marks) or "{{ messages }}"
    )
    return reply_format(tokenizer, model.model_type)
