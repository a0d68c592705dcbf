"""Chat templates render to the very text transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxinfer.config import load_settings
from mlxinfer.tokenizer import Tokenizer
from mlxinfer.tokenizer.template import ChatTemplate

# In the manner of the families' own templates: the expressions they use, not their wording.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content if message.content is string else '' %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>' ~ ns.last_query_index ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- macro render_content(message) -%}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if (message['role'] == 'assistant') else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {{- render_content(message) }}{% generation %}{{ '<end_of_turn>\\n' }}{% endgeneration %}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  hello <b> & 'you' "}],
    [
        {"role": "user", "content": "é 日本"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfine"},
        {"role": "user", "content": "<tool_response>x</tool_response>"},
    ],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "finds 'é' <x>", "parameters": {"b": 1, "a": []}}}


def by_transformers(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **kwargs)
    return rendered[0]


@pytest.mark.parametrize("source", [LLAMA, QWEN, GEMMA], ids=["llama", "qwen", "gemma"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("kwargs", [{"add_generation_prompt": True, "enable_thinking": False}, {}])
def test_a_template_renders_as_transformers_renders_it(
    source: str, chat: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]
) -> None:
    ours = ChatTemplate(source).render({"bos_token": "<s>", "messages": chat, "tools": tools, **kwargs})
    assert ours == by_transformers(source, chat, tools=tools, bos_token="<s>", **kwargs)
    assert chat[-1]["content"].strip() in ours


@pytest.mark.model
def test_the_demo_models_chat_and_tokens_are_what_transformers_makes_of_its_files() -> None:
    from transformers import PreTrainedTokenizerFast

    tok, backend = _demo()
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    for chat in CHATS:
        text = tok.render_chat(chat)
        assert text == by_transformers(_demo_template(), chat, add_generation_prompt=True)
        assert tok.chat_ids(chat) == reference.encode(text, add_special_tokens=False)


@pytest.mark.model
def test_the_demo_models_text_streams_to_the_full_decode() -> None:
    tok, _ = _demo()
    for text in ("Hello, world!  Two  spaces.\n\n\ttab", "日本語 🙂🙂 naïve café ﷽", "x = [1, 2]\n" * 20):
        ids = tok.encode(text)
        detok = tok.detokenizer()
        assert "".join([*map(detok.add, ids), detok.flush()]) == text

    detok = tok.detokenizer()
    ids = [(i * 7919) % tok.vocab_size for i in range(5000)]
    assert "".join([*map(detok.add, ids), detok.flush()]) == tok.decode(ids)


def _vocabulary() -> Any:
    from mlxinfer import zoo
    from mlxinfer.formats.gguf import read_gguf
    from mlxinfer.formats.gguf.vocab import read_vocabulary

    file = read_gguf(zoo.resolve(zoo.DEMO, load_settings(environ={})).path)
    return read_vocabulary(file, 49152)


def _demo() -> tuple[Tokenizer, Any]:
    import json

    import tokenizers

    found = _vocabulary()
    tok = Tokenizer.from_parts(
        tokenizer_json=found.tokenizer_json,
        chat_template=found.chat_template,
        bos_token=found.bos_token,
        eos_token=found.eos_token,
        eos_token_ids=found.eos_token_ids,
        add_bos_token=found.add_bos_token,
    )
    return tok, tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer_json))


def _demo_template() -> str:
    return _vocabulary().chat_template
