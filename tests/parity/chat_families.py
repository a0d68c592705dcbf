# ruff: noqa: E501, RUF001  (templates and the families' own characters)
"""Chat templates in the families' published formats, and for each, in plain Python, what its text is made of.

The templates are written for these tests after the formats' descriptions. `pieces` is the reference: the text in
parts, each with whether the assistant writes it. It shares nothing with the code that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[dict[str, Any]]
Pieces = list[tuple[str, bool]]


@dataclass(frozen=True)
class Family:
    """One chat format. `eos` ends generation; where no token closes a turn it is learnt at the end of the chat."""

    name: str
    template: str
    pieces: Callable[[Messages, Any], Pieces]
    specials: tuple[str, ...]
    eos: str
    stops: tuple[str, ...] = ()
    bos: str | None = None
    tools: bool = False
    reasoning: bool = False
    appends_eos: bool = False


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Any, arguments: str = "arguments") -> str:
    return _json({"name": call["function"]["name"], arguments: call["function"]["arguments"]})


def _role_turns(
    head: Callable[[str], str], close: Callable[[str], tuple[str, str]], trim: bool = False, first: str = ""
):
    """Formats of head, content, closing token, and what the template puts after it."""

    def pieces(messages: Messages, tools: Any) -> Pieces:
        out: Pieces = [(first, False)]
        for m in messages:
            content = m["content"].strip() if trim else m["content"]
            token, rest = close(m["role"])
            own = m["role"] == "assistant"
            out += [(head(m["role"]), False), (content + token, own), (rest, False)]
        return out

    return pieces


def _simple(name: str, head: str, end: str, rest: str, specials: tuple[str, ...], **more: Any) -> Family:
    """A loop of head (with ROLE in it), content, end and rest."""
    first, trim, roles = more.pop("first", ""), more.pop("trim", False), more.pop("roles", {})
    content = "m['content'] | trim" if trim else "m['content']"
    named = _json(roles) + "[m['role']]" if roles else "m['role']"
    before, after = (_json(part) for part in head.split("ROLE"))
    template = (
        f"{{{{ {_json(first)} }}}}{{% for m in messages %}}{{{{ {before} + {named} + {after} + ({content}) + "
        f"{_json(end + rest)} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {_json(head.replace('ROLE', roles.get('assistant', 'assistant')))} }}}}"
        "{% endif %}"
    )
    pieces = _role_turns(lambda r: head.replace("ROLE", roles.get(r, r)), lambda _: (end, rest), trim, first)
    return Family(name, template, pieces, specials, more.pop("eos", end), **more)


# --- Qwen: tool calls as XML around JSON, tool results inside a user turn, reasoning only after the last question

QWEN25 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '# Tools' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = (
    QWEN25.replace(
        "{%- for m in messages %}\n",
        """{%- set ns = namespace(last=-1) %}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- set think = '' %}{%- set content = m.content %}
{%- if m.role == 'assistant' %}{%- set reasoning = m.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{%- set think = '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' %}{%- set content = content.lstrip('\\n') %}
{%- endif %}{%- endif %}
""",
        1,
    )
    .replace("'\\n' + m.content + '<|im_end|>", "'\\n' + think + content + '<|im_end|>")
    .replace("{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}", "{{- '\\n' + think + content }}")
    .replace(
        "{{- '\\n<tool_call>",
        "{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}{{- '<tool_call>",
    )
)


def _qwen(messages: Messages, tools: Any, thinks: bool = False) -> Pieces:
    out: Pieces = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        head = "<|im_start|>system\n" + (system + "\n\n" if system is not None else "") + "# Tools"
        out.append((head + "".join("\n" + _json(t) for t in tools) + "<|im_end|>\n", False))
    elif system is not None:
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        if m["role"] == "user":
            out.append((f"<|im_start|>user\n{m['content']}<|im_end|>\n", False))
        elif m["role"] == "tool":
            out.append((f"<|im_start|>user\n<tool_response>\n{m['content']}\n</tool_response><|im_end|>\n", False))
        elif m["role"] == "assistant":
            text, reasoning = m["content"], m.get("reasoning_content", "")
            if thinks and i > last and (reasoning or i == len(messages) - 1):
                text = f"<think>\n{reasoning}\n</think>\n\n{text.lstrip(chr(10))}"
            calls = ["<tool_call>\n" + _call(c) + "\n</tool_call>" for c in m.get("tool_calls", ())]
            if calls and not thinks:
                text = "\n".join(([text] if text else []) + calls)
            elif calls:
                text += ("\n" if m["content"] else "") + "\n".join(calls)
            out += [("<|im_start|>assistant\n", False), (text + "<|im_end|>", True), ("\n", False)]
    return out


# --- Llama

LLAMA2 = """{%- if messages[0].role == 'system' %}{%- set sys = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
{%- set rest = messages[1:] %}{%- else %}{%- set sys = '' %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}{%- if m.role == 'user' %}
{{- bos_token + '[INST] ' + ((sys if loop.first else '') + m.content).strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + ' ' + eos_token }}{%- endif %}{%- endfor %}"""


def _llama2(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = []
    system = ""
    for m in messages:
        if m["role"] == "system":
            system = f"<<SYS>>\n{m['content']}\n<</SYS>>\n\n"
        elif m["role"] == "user":
            out.append((f"<s>[INST] {(system + m['content']).strip()} [/INST]", False))
            system = ""
        else:
            out.append((f" {m['content'].strip()} </s>", True))
    return out


LLAMA3 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set sys = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set sys = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- sys + '<|eot_id|>' }}
{%- if tools %}{%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n' }}
{%- for t in tools %}{{- (t | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{- raise_exception('single tool-calls only') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", ' }}
{{- '"parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""


def _llama3(messages: Messages, tools: Any) -> Pieces:
    def head(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    system = next((m["content"].strip() for m in messages if m["role"] == "system"), "")
    out: Pieces = [("<|begin_of_text|>" + head("system"), False)]
    out.append((("Environment: ipython\n" if tools else "") + system + "<|eot_id|>", False))
    first = True
    for m in messages:
        if m["role"] == "user":
            functions = (
                "Functions:\n" + "".join(json.dumps(t, indent=4) + "\n\n" for t in tools) if tools and first else ""
            )
            out.append((head("user") + functions + m["content"].strip() + "<|eot_id|>", False))
            first = False
        elif m["role"] == "tool":
            out.append((head("ipython") + _json(m["content"]) + "<|eot_id|>", False))
        elif m["role"] == "assistant":
            text = _call(m["tool_calls"][0], "parameters") if m.get("tool_calls") else m["content"].strip()
            out += [(head("assistant"), False), (text + "<|eot_id|>", True)]
    return out


# --- Gemma: no system role; the assistant is called model

GEMMA3 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set prefix = messages[0].content + '\\n\\n' %}
{%- set rest = messages[1:] %}{%- else %}{%- set prefix = '' %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (prefix if loop.first else '') }}
{{- m.content | trim }}{{- '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


def _gemma3(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = [("<bos>", False)]
    prefix = ""
    for m in messages:
        if m["role"] == "system":
            prefix = m["content"] + "\n\n"
        elif m["role"] == "user":
            out.append((f"<start_of_turn>user\n{prefix}{m['content'].strip()}<end_of_turn>\n", False))
            prefix = ""
        else:
            out += [("<start_of_turn>model\n", False), (m["content"].strip() + "<end_of_turn>", True), ("\n", False)]
    return out


# --- Mistral: no generation prompt; system and tools stand before the last question

MISTRAL_V1 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set sys = messages[0].content + '\\n\\n' %}
{%- set rest = messages[1:] %}{%- else %}{%- set sys = '' %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}{%- if m.role == 'user' %}{{- ' [INST] ' + (sys if loop.first else '') + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"""


def _mistral_v1(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = [("<s>", False)]
    system = ""
    for m in messages:
        if m["role"] == "system":
            system = m["content"] + "\n\n"
        elif m["role"] == "user":
            out.append((f" [INST] {system}{m['content']} [/INST]", False))
            system = ""
        else:
            out.append((f" {m['content']}</s>", True))
    return out


MISTRAL_V3 = """{{- bos_token }}{%- set ns = namespace(last=-1) %}
{%- if messages[0].role == 'system' %}{%- set sys = messages[0].content + '\\n\\n' %}{%- else %}{%- set sys = '' %}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + (sys if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + (m.content | trim) + eos_token }}{%- endif %}{%- endfor %}"""


def _mistral_v3(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = [("<s>", False)]
    system = next((m["content"] + "\n\n" for m in messages if m["role"] == "system"), "")
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        if m["role"] == "user":
            offered = f"[AVAILABLE_TOOLS] {_json(tools)}[/AVAILABLE_TOOLS]" if tools and i == last else ""
            out.append((f"{offered}[INST] {system if i == last else ''}{m['content']}[/INST]", False))
        elif m["role"] == "tool":
            out.append((f'[TOOL_RESULTS] {{"content": {_json(m["content"])}}}[/TOOL_RESULTS]', False))
        elif m.get("tool_calls"):
            out.append((f"[TOOL_CALLS] [{', '.join(map(_call, m['tool_calls']))}]</s>", True))
        elif m["role"] == "assistant":
            out.append((f" {m['content'].strip()}</s>", True))
    return out


TEKKEN = """{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{%- elif m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{%- if m.content %}{{- m.content }}{%- endif %}{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{%- endfor %}{{- eos_token }}
{%- endif %}{%- endfor %}"""


def _tekken(messages: Messages, tools: Any) -> Pieces:
    tags = {"system": "SYSTEM_PROMPT", "user": "INST", "tool": "TOOL_RESULTS"}
    out: Pieces = [("<s>", False)]
    for m in messages:
        if tag := tags.get(m["role"]):
            out.append((f"[{tag}]{m['content']}[/{tag}]", False))
        else:
            calls = [
                f"[TOOL_CALLS]{c['function']['name']}[ARGS]{_json(c['function']['arguments'])}"
                for c in m.get("tool_calls", ())
            ]
            out.append((m["content"] + "".join(calls) + "</s>", True))
    return out


# --- GLM: nothing closes a turn; the next role's token stops the generation

GLM4 = """{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n# Tools' }}{%- for t in tools %}{{- '\\n' + (t | tojson) }}{%- endfor %}
{%- endif %}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}{%- for call in m.tool_calls or [] %}
{{- call.function.name + '\\n' + (call.function.arguments | tojson) }}{%- endfor %}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- elif m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


def _glm4(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = [("[gMASK]<sop>", False)]
    if tools:
        out.append(("<|system|>\n# Tools" + "".join("\n" + _json(t) for t in tools), False))
    for i, m in enumerate(messages):
        role = {"tool": "observation"}.get(m["role"], m["role"])
        out.append((f"<|{role}|>", i > 0 and messages[i - 1]["role"] == "assistant"))
        if role == "assistant":
            calls = [f"{c['function']['name']}\n{_json(c['function']['arguments'])}" for c in m.get("tool_calls", ())]
            out.append(("".join(calls) + ("\n" + m["content"] if m["content"] else ""), True))
        else:
            out.append(("\n" + m["content"], False))
    return out


# --- Harmony: channels; reasoning only after the last final answer; <|return|> at the end, <|end|> in the history

HARMONY = """{{- '<|start|>system<|message|>Reasoning: medium<|end|>' }}
{%- if messages[0].role in ('system', 'developer') %}{%- set dev = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set dev = '' %}{%- set rest = messages %}{%- endif %}
{%- if dev or tools %}{{- '<|start|>developer<|message|>' + dev }}{%- for t in tools or [] %}{{- '\\n' + (t | tojson) }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- set ns = namespace(call=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) + '<|call|>' }}{%- set ns.call = call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def _harmony(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = [("<|start|>system<|message|>Reasoning: medium<|end|>", False)]
    developer = next((m["content"] for m in messages if m["role"] == "system"), "")
    if developer or tools:
        offered = "".join("\n" + _json(t) for t in tools or ())
        out.append((f"<|start|>developer<|message|>{developer}{offered}<|end|>", False))
    name = ""
    for i, m in enumerate(messages):
        last = i == len(messages) - 1
        if m["role"] == "user":
            out.append((f"<|start|>user<|message|>{m['content']}<|end|>", False))
        elif m["role"] == "tool":
            head = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
            out.append((head + _json(m["content"]) + "<|end|>", False))
        elif m["role"] == "assistant":
            out.append(("<|start|>assistant", False))
            if m.get("reasoning_content") and (last or m.get("tool_calls")):
                thought = f"<|channel|>analysis<|message|>{m['reasoning_content']}<|end|><|start|>assistant"
                out.append((thought, True))
            if m.get("tool_calls"):
                call = m["tool_calls"][0]["function"]
                name = call["name"]
                head = f" to=functions.{name}<|channel|>commentary json<|message|>"
                out.append((head + _json(call["arguments"]) + "<|call|>", True))
            else:
                out.append((f"<|channel|>final<|message|>{m['content']}" + ("<|return|>" if last else "<|end|>"), True))
    return out


# --- DeepSeek: V3 with tools; R1 whose prompt opens the reasoning that the history lacks

_DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_DS_OUT = "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"
_DS_EOS = "<｜end▁of▁sentence｜>"
DEEPSEEK_V3 = """{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- endif %}{%- endfor %}
{%- set ns = namespace(tool=false) %}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- ('' if ns.tool else '<｜Assistant｜>') + m.content + '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + (c.function.arguments | tojson) }}
{{- '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}
{{- ('' if ns.tool else '<｜Assistant｜>') + m.content + '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}
{%- elif m.role == 'tool' %}{%- set ns.tool = true %}
{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' }}{%- endif %}"""


def _deepseek_v3(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = [
        ("<｜begin▁of▁sentence｜>" + "".join(m["content"] for m in messages if m["role"] == "system"), False)
    ]
    for i, m in enumerate(messages):
        if m["role"] == "user":
            out.append((f"<｜User｜>{m['content']}", False))
        elif m["role"] == "tool":
            out.append((f"{_DS_OUT[0]}{_DS_OUT[1]}{m['content']}{_DS_OUT[2]}{_DS_OUT[3]}", False))
        elif m["role"] == "assistant":
            if messages[i - 1]["role"] != "tool":
                out.append(("<｜Assistant｜>", False))
            text = m["content"]
            if m.get("tool_calls"):
                calls = [c["function"] for c in m["tool_calls"]]
                inner = [
                    f"{_DS[1]}function{_DS[2]}{c['name']}\n```json\n{_json(c['arguments'])}\n```{_DS[3]}" for c in calls
                ]
                text += _DS[0] + "".join(inner) + _DS[4]
            out.append((text + _DS_EOS, True))
    return out


DEEPSEEK_R1 = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- else %}{%- set content = m.content %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""


# --- Granite, SmolLM3, Kimi, Vicuna, Alpaca

GRANITE = """{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + (m.tool_calls | map(attribute='function') | list | tojson) }}
{{- '<|end_of_text|>\\n' }}
{%- else %}{{- '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' + m.content }}
{{- '<|end_of_text|>\\n' }}{%- endif %}
{%- if loop.first and tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""


def _granite(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = []
    for i, m in enumerate(messages):
        role = "tool_response" if m["role"] == "tool" else m["role"]
        text = m["content"]
        if m.get("tool_calls"):
            text = "<|tool_call|>" + _json([c["function"] for c in m["tool_calls"]])
        out.append((f"<|start_of_role|>{role}<|end_of_role|>", False))
        out += [(text + "<|end_of_text|>", role == "assistant"), ("\n", False)]
        if i == 0 and tools:
            out.append((f"<|start_of_role|>available_tools<|end_of_role|>{_json(tools)}<|end_of_text|>\n", False))
    return out


SMOLLM3 = """{{- '<|im_start|>system\\n## Metadata\\nReasoning Mode: /no_think\\n\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{% generation %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + m.content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}{%- endif %}"""


def _smollm3(messages: Messages, tools: Any) -> Pieces:
    system = next((m["content"] for m in messages if m["role"] == "system"), "")
    out: Pieces = [(f"<|im_start|>system\n## Metadata\nReasoning Mode: /no_think\n\n{system}<|im_end|>\n", False)]
    for m in messages:
        if m["role"] == "user":
            out.append((f"<|im_start|>user\n{m['content']}<|im_end|>\n", False))
        elif m["role"] == "assistant":
            out.append(("<|im_start|>assistant\n<think>\n\n</think>\n", False))
            out += [(m["content"].lstrip("\n") + "<|im_end|>", True), ("\n", False)]
    return out


VICUNA = """{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content + ' ' }}
{%- elif m.role == 'user' %}{{- 'USER: ' + m.content + ' ' }}{%- else %}{{- 'ASSISTANT: ' + m.content + '</s>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}"""


def _vicuna(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = []
    for m in messages:
        if m["role"] == "assistant":
            out += [("ASSISTANT:", False), (f" {m['content']}</s>", True)]
        else:
            out.append((("USER: " if m["role"] == "user" else "") + m["content"] + " ", False))
    return out


ALPACA = """{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content + '\\n\\n' }}
{%- elif m.role == 'user' %}{{- '### Instruction:\\n' + m.content + '\\n\\n' }}
{%- else %}{{- '### Response:\\n' + m.content }}{%- if not loop.last %}{{- '\\n\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}"""


def _alpaca(messages: Messages, tools: Any) -> Pieces:
    out: Pieces = []
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            out += [("### Response:\n", False), (m["content"], True)]
            out.append(("\n\n" if i + 1 < len(messages) else "", False))
        else:
            out.append((("### Instruction:\n" if m["role"] == "user" else "") + m["content"] + "\n\n", False))
    return out


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_COMMAND = (
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
)
_MISTRAL = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", _DS_EOS, "<｜User｜>", "<｜Assistant｜>", *_DS, *_DS_OUT)
_KIMI = {r: f"<|im_{r}|>{r}" for r in ("system", "user", "assistant")}
_DS_R1 = _role_turns(
    lambda r: {"system": "", "user": "<｜User｜>", "assistant": "<｜Assistant｜>"}[r],
    lambda r: (_DS_EOS if r == "assistant" else "", ""),
    first=_DEEPSEEK[0],
)

FAMILIES: tuple[Family, ...] = (
    _simple("chatml", "<|im_start|>ROLE\n", "<|im_end|>", "\n", _IM),
    _simple("zephyr", "<|ROLE|>\n", "</s>", "\n", ("<s>", "</s>")),
    _simple("phi3", "<|ROLE|>\n", "<|end|>", "\n", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    _simple("phi4", "<|im_start|>ROLE<|im_sep|>", "<|im_end|>", "", (*_IM, "<|im_sep|>")),
    _simple(
        "olmo2", "<|ROLE|>\n", "<|endoftext|>", "\n", ("<|endoftext|>",), first="<|endoftext|>", bos="<|endoftext|>"
    ),
    _simple("internlm2", "<|im_start|>ROLE\n", "<|im_end|>", "\n", ("<s>", "</s>", *_IM), first="<s>", bos="<s>"),
    _simple(
        "kimi",
        "ROLE<|im_middle|>",
        "<|im_end|>",
        "",
        ("<|im_middle|>", "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>"),
        roles=_KIMI,
    ),
    _simple(
        "command-r",
        "<|START_OF_TURN_TOKEN|>ROLE",
        "<|END_OF_TURN_TOKEN|>",
        "",
        ("<BOS_TOKEN>", *_COMMAND),
        trim=True,
        first="<BOS_TOKEN>",
        bos="<BOS_TOKEN>",
        roles={"system": "<|SYSTEM_TOKEN|>", "user": "<|USER_TOKEN|>", "assistant": "<|CHATBOT_TOKEN|>"},
    ),
    _simple(
        "gemma",
        "<start_of_turn>ROLE\n",
        "<end_of_turn>",
        "\n",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        trim=True,
        first="<bos>",
        bos="<bos>",
        roles={"system": "user", "user": "user", "assistant": "model"},
    ),
    Family(
        "gemma3",
        GEMMA3,
        _gemma3,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        ("<end_of_turn>",),
        "<bos>",
    ),
    Family("qwen2.5", QWEN25, _qwen, _IM, "<|im_end|>", ("<|endoftext|>",), tools=True),
    Family(
        "qwen3",
        QWEN3,
        lambda m, t: _qwen(m, t, True),
        _IM,
        "<|im_end|>",
        ("<|endoftext|>",),
        tools=True,
        reasoning=True,
    ),
    Family("llama2", LLAMA2, _llama2, ("<s>", "</s>"), "</s>", bos="<s>"),
    Family(
        "llama3",
        LLAMA3,
        _llama3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        tools=True,
    ),
    Family("mistral-v1", MISTRAL_V1, _mistral_v1, ("<s>", "</s>"), "</s>", bos="<s>"),
    Family("mistral-v3", MISTRAL_V3, _mistral_v3, _MISTRAL, "</s>", bos="<s>", tools=True),
    Family(
        "mistral-tekken",
        TEKKEN,
        _tekken,
        (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]"),
        "</s>",
        bos="<s>",
        tools=True,
    ),
    Family("glm4", GLM4, _glm4, _GLM, "<|endoftext|>", ("<|user|>", "<|observation|>"), tools=True, appends_eos=True),
    Family("harmony", HARMONY, _harmony, _HARMONY, "<|return|>", ("<|call|>",), tools=True, reasoning=True),
    Family("deepseek-v3", DEEPSEEK_V3, _deepseek_v3, _DEEPSEEK, _DS_EOS, bos=_DEEPSEEK[0], tools=True),
    Family("deepseek-r1", DEEPSEEK_R1, _DS_R1, _DEEPSEEK, _DS_EOS, bos=_DEEPSEEK[0]),
    Family(
        "granite",
        GRANITE,
        _granite,
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        tools=True,
    ),
    Family("smollm3", SMOLLM3, _smollm3, _IM, "<|im_end|>"),
    Family("vicuna", VICUNA, _vicuna, ("<s>", "</s>"), "</s>"),
    Family("alpaca", ALPACA, _alpaca, ("<s>", "</s>"), "</s>", appends_eos=True),
)
