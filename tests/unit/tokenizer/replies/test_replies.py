"""What parsers of replies make of whole, broken and cut replies."""

import pytest

from mlxinfer.tokenizer.replies import TextPart, ToolCallArguments, ToolCallStart
from tests.unit.tokenizer.replies.models import MODELS, TOOLS, format_of
from tests.unit.tokenizer.replies.reading import parse, summary

FIRST = ("get_weather", {"city": "Köln", "days": 3})
SECOND = ("get_weather", {"city": "<b>"})
MARKED = [n for n in MODELS if n not in ("plain", "llama3", "harmony")]
THINKING = [n for n in MODELS if format_of(n).think]
BREAKING = {
    "qwen3_coder": (("</function>", ""),),
    "seed_oss": (("</function>", ""),),
    "glm47": (("</arg_value>", ""),),
    "glm47_compact": (("</arg_value>", ""),),
    "longcat": (("</longcat_arg_value>", ""),),
    "minimax_m2": (("</invoke>", ""),),
    "minicpm5": (('"get_weather"', '""'),),
    "muse_spark": (("</atem:invoke>", ""),),
    "kimi_k3": (('tool="get_weather"', ""),),
    "pythonic": (("=3", ""), ("=", "")),
    "gemma4": ((":3", ":3}"),),
    "function_gemma": (("call:", "call "),),
}
STREAMING = [
    "hermes",
    "llama3",
    "mistral",
    "mistral_named",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "harmony",
    "phi4",
]
STREAMING += ["plain"]


def read(name, text, complete=True, tools=TOOLS, **options):
    return summary(parse(format_of(name), text, complete=complete, tools=tools, **options))


@pytest.mark.parametrize("name", MODELS)
def test_a_call_as_the_template_writes_it_is_read(name):
    assert read(name, MODELS[name].one) == [FIRST]


@pytest.mark.parametrize("name", [n for n in MODELS if MODELS[n].two])
def test_several_calls_are_read(name):
    assert read(name, MODELS[name].two) == [FIRST, SECOND]


@pytest.mark.parametrize("name", MARKED)
def test_text_around_calls_is_kept_and_the_white_space_of_the_markup_is_not(name):
    text = f"\nLet me  see.\n\n{MODELS[name].two}\n\nThere < it is.\n"
    assert read(name, text) == ["\nLet me  see.", FIRST, SECOND, "There < it is.\n"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "text", ["Hello", " Hello \n", "a < b", "a <", "<", "<t", " ", "日本語 🙂", "{", "[1]", '{"a": 1}']
)
def test_plain_text_comes_through_unchanged(name, text):
    assert "".join(p.text for p in parse(format_of(name), text, tools=TOOLS)) == text


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_reply_has_no_parts(name):
    assert read(name, "") == []


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_split_out(name):
    form = format_of(name)
    think = form.think
    text = f"{think.start}\nIs it {{\n</x>?\n{think.end}\n\nYes.\n"
    assert form.has_reasoning
    assert read(name, text) == [("reasoning", "Is it {\n</x>?"), "Yes.\n"]
    assert read(name, text[len(think.start) :], prompt_tail=f"assistant\n{think.start}\n")[1:] == ["Yes.\n"]
    assert read(name, f"{think.start}a{think.end}{MODELS[name].one}") == [("reasoning", "a"), FIRST]


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_opened_by_the_prompt_may_be_opened_again_or_cut(name):
    think = format_of(name).think
    tail = think.start + "\n"
    assert read(name, f"{think.start}a{think.end}b", prompt_tail=tail) == [("reasoning", "a"), "b"]
    assert read(name, "a b", prompt_tail=tail, complete=False) == [("reasoning", "a b")]
    assert read(name, f"{think.end}\nb", prompt_tail=tail) == ["b"]


@pytest.mark.parametrize("name", THINKING)
def test_a_reply_after_closed_reasoning_is_text(name):
    think = format_of(name).think
    assert read(name, "Yes.", prompt_tail=f"{think.start}\n\n{think.end}\n\n") == ["Yes."]


def test_a_tag_further_in_is_text_about_the_tag():
    assert read("hermes", "Write <think> first.") == ["Write <think> first."]


@pytest.mark.parametrize("name", MODELS)
def test_calls_stay_text_when_they_are_not_asked_for(name):
    assert read(name, MODELS[name].one, parse_tools=False) == [MODELS[name].one]


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_split_out_when_calls_are_not_asked_for(name):
    think = format_of(name).think
    text = f"{think.start}a{think.end}{MODELS[name].one}"
    assert read(name, text, parse_tools=False) == [("reasoning", "a"), MODELS[name].one]


@pytest.mark.parametrize("name", MODELS)
def test_a_name_that_is_no_tool_is_reported(name):
    text = MODELS[name].one.replace("get_weather", "launch")
    assert [part[0] for part in read(name, text)] == ["launch"]


@pytest.mark.parametrize("name", MODELS)
def test_a_reply_cut_anywhere_has_no_half_call_and_no_markup_in_its_text(name):
    text = MODELS[name].one
    openers = format_of(name).syntax.openers or ("<|channel|>",)
    for length in range(1, len(text)):
        for part in read(name, text[:length], complete=False):
            assert isinstance(part, str) or part in (("void", "get_weather"), FIRST), (length, part)
            if isinstance(part, str):
                # Only what may be an answer in JSON, or as much of a marker as may be none.
                begins = any(o != part and o.startswith(part) for o in openers)
                assert begins or (name in ("llama3", "plain") and part == text[:length]), (length, part)


@pytest.mark.parametrize("name", STREAMING)
def test_arguments_arrive_in_increments_before_the_call_is_whole(name):
    at = MODELS[name].one.index("Köln") + 2
    parts = parse(format_of(name), MODELS[name].one[:at], complete=False, merge=False, tools=TOOLS)
    assert parts == [ToolCallStart(0, "get_weather"), ToolCallArguments(0, '{"city": "Kö')]


@pytest.mark.parametrize("name", MARKED)
def test_a_broken_call_is_text_and_nothing_of_it_is_lost(name):
    broken = MODELS[name].one
    for old, new in BREAKING.get(name, (('"Köln"', "Köln"),)):
        broken = broken.replace(old, new)
    text = f"See: {broken} and more"
    got = read(name, text)
    assert "".join(p for p in got if isinstance(p, str)) == text
    assert all(isinstance(p, str) or p[0] == "void" for p in got)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": 1]}}',
        '{"name": "f", "arguments": {"a": tru}}',
        '{"name": "f", "arguments": {"a": "\\x"}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": "{"}',
        '{"name": "f", "arguments": {}, "arguments": {}}',
        '{"name": "f", "arguments": {}}}',
        '{"name": "f", "arguments": {}} {"name": 5}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        '["f", {}]',
        '[{"name": "f", "arguments": {}}, 5]',
        "{'name': 'f', 'arguments': {}}",
        "f(a=1)",
        "",
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "[" * 1000 + "]" * 1000 + "}}",
        '{"name": "' + "f" * 1000 + '", "arguments": {}}',
    ],
)
def test_a_broken_object_is_given_back_after_the_calls_before_it(body):
    text = f"a <tool_call>{body}</tool_call> b"
    got = read("hermes", text)
    whole = [p for p in got if not isinstance(p, str) and p[0] != "void"]
    rest = "".join(p for p in got if isinstance(p, str))
    assert rest == text if not whole else rest.startswith("a") and rest.endswith("</tool_call> b")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f", "arguments": "{\\"a\\": \\"}\\"}"}', {"a": "}"}),
        ('{"name": "f", "parameters": {"a": [{}]}}', {"a": [{}]}),
        ('{"id": 7, "name": "f", "x": {"arguments": 1}, "arguments": {"a": null}}', {"a": None}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": {"a": "line\nline\ttab"}}', {"a": "line\nline\ttab"}),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', {"a": "</tool_call>"}),
        ('{"name":"f","arguments":{"a":"\\u00e9\\"\\\\"}}', {"a": 'é"\\'}),
        ('{"name":"f","arguments":{"a":-1.5e3}}', {"a": -1500.0}),
        ('[{"name":"f","arguments":{}}]', {}),
    ],
)
def test_call_objects_are_read_however_they_are_written(body, arguments):
    for end in ("\n</tool_call>", ""):
        assert read("hermes", f"<tool_call>\n{body}{end}") == [("f", arguments)]


def test_a_call_object_that_is_not_the_whole_reply_is_text():
    call = '{"name": "now", "arguments": {}}'
    assert read("plain", f"{call} is how.") == [("void", "now"), f"{call} is how."]
    assert read("plain", f"Use {call}") == [f"Use {call}"]
    assert read("plain", '{"name": "now", "place": 1}') == ['{"name": "now", "place": 1}']
    assert read("plain", '{"name": "now"}') == ['{"name": "now"}']


def test_what_is_no_call_after_all_is_void_and_comes_as_text():
    text = '<tool_call>{"name": "f", "arguments": {}}}</tool_call>'
    assert read("hermes", text) == [("void", "f"), text]
    text = '{"name": "now", "place": 1, "arguments": {}}'
    assert read("plain", text) == [text]


def test_a_model_without_tools_is_read_for_calls_only_when_there_are_some():
    for text in (MODELS["plain"].one, MODELS["hermes"].one):
        assert read("plain", text, tools=[]) == [text]
    assert read("plain", f"Well. {MODELS['hermes'].one}") == ["Well.", FIRST]
    assert not format_of("plain").has_tools


def test_a_bare_object_cut_before_its_name_is_text_for_it_may_be_an_answer():
    assert read("plain", '{"name": "now", "arg', complete=False) == ['{"name": "now", "arg']


def test_llama_marks_calls_or_does_not():
    call = MODELS["llama3"].one
    assert read("llama3", f"<|python_tag|>{call}") == [FIRST]
    assert read("llama3", f"<|python_tag|>{call}; {call}") == [FIRST, FIRST]
    assert read("llama3", "<|python_tag|>print(1)") == ["<|python_tag|>print(1)"]


def test_mistral_writes_an_id_between_name_and_arguments():
    assert read("mistral_named", '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{"a": 1}') == [("now", {"a": 1})]
    assert read("mistral_named", '[TOOL_CALLS]now{"a": 1}') == [("now", {"a": 1})]


def test_glm_calls_without_arguments_are_read_and_its_parsers_guesses_are_not():
    assert read("glm47", "<tool_call>now</tool_call>") == [("now", {})]
    assert read("glm47", "<tool_call>now then</tool_call>") == ["<tool_call>now then</tool_call>"]


def test_a_call_that_the_model_did_not_close_is_read_when_it_is_whole_otherwise():
    assert read("qwen3_coder", MODELS["qwen3_coder"].one.removesuffix("\n</tool_call>")) == [FIRST]
    cut = MODELS["minimax_m2"].one.replace("</invoke>", "").replace("</minimax:tool_call>", "")
    assert read("minimax_m2", cut) == [cut]


@pytest.mark.parametrize("name", ["kimi_k3", "muse_spark", "qwen3_coder", "gemma4"])
def test_a_call_that_would_cost_its_parser_too_much_is_text(name):
    form = format_of(name)
    syntax = form.syntax
    body = syntax.shape[0] + (syntax.costly + "{") * 20_000 + syntax.shape[1]
    text = syntax.openers[0] + body + syntax.closer
    assert parse(form, text, tools=TOOLS) == [TextPart(text)]


def test_gemma_strings_may_hold_braces():
    text = '<|tool_call>call:f{a:<|"|>}{{<|"|>,b:{c:[1,true]}}<tool_call|>'
    assert read("gemma4", text) == [("f", {"a": "}{{", "b": {"c": [1, True]}})]
    broken = text.replace("b:{", "b:{{")
    assert read("gemma4", broken) == [broken]


@pytest.mark.parametrize("value", ["{1, 2}", "b'x'", "1j", "1e999"])
def test_python_values_that_json_cannot_say_leave_the_call_as_text(value):
    text = f"<|tool_call_start|>[f(a={value})]<|tool_call_end|>"
    assert read("pythonic", text) == [text]


def test_framing_around_text_is_left_out():
    reply = "<|open|>response<|sep|>Hello.<|close|>response<|sep|><|close|>message<|sep|>"
    assert read("kimi_k3", reply) == ["Hello."]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, 3),
        ({"type": ["integer", "null"]}, 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ({"$ref": "#/$defs/n"}, 3),
        ({"type": "string"}, "3"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "glm47", "longcat", "minicpm5"])
def test_a_value_between_tags_has_the_type_its_schema_names(name, schema, value):
    parameters = {"$defs": {"n": {"type": "integer"}}, "properties": {"city": {}, "days": schema}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    assert read(name, MODELS[name].one, tools=tools) == [("get_weather", {"city": "Köln", "days": value})]


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "glm47", "longcat", "minicpm5", "pythonic", "gemma4"])
@pytest.mark.parametrize(
    "function",
    [
        {"name": "get_weather"},
        {"name": "get_weather", "parameters": None},
        {"name": "get_weather", "parameters": {"properties": [1]}},
        {"name": "get_weather", "parameters": {"properties": {"city": True, "days": None}}},
        {"name": "get_weather", "parameters": {"properties": {"city": {"type": 5, "anyOf": [1], "oneOf": 5}}}},
        {},
        None,
    ],
)
def test_tools_that_are_odd_leave_calls_readable(name, function):
    ((called, arguments),) = read(name, MODELS[name].one, tools=[{"function": function}])
    assert (called, arguments["city"]) == ("get_weather", "Köln")


LONG = {
    "text": ("hermes", "Lorem <ipsum ", ""),
    "arguments": ("hermes", "ab\\n</tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "'),
    "numbers": ("hermes", "12,", '<tool_call>{"name": "f", "arguments": {"a": ['),
    "arguments first": ("hermes", "ab ", '<tool_call>{"arguments": {"a": "'),
    "white space": ("plain", " ", ""),
    "a bare call": ("plain", "ab ", '{"name": "f", "arguments": {"a": "'),
    "a call read when whole": ("qwen3_coder", "ab\n", "<tool_call><function=f><parameter=a>"),
    "reasoning": ("hermes", "ab ", "<think>"),
    "messages": ("harmony", "ab ", "<|channel|>final<|message|>"),
    "a header without end": ("harmony", "ab ", "<|channel|>"),
    "a name without end": ("mistral_named", "ab", "[TOOL_CALLS]"),
}


@pytest.mark.parametrize("case", LONG)
def test_what_is_searched_again_stays_short_in_a_long_reply(case):
    name, unit, start = LONG[case]
    parser = format_of(name).parser(tools=TOOLS)
    parser.feed(start)
    for _ in range(1 << 13):
        parser.feed(unit)
        assert len(parser._reader.text) - parser._reader.at <= 1024
    parser.end(complete=False)


def test_a_megabyte_in_pieces_of_four_characters_is_read():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "ab\n" * (1 << 18) + '"}}</tool_call>'
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    assert read("hermes", pieces) == [("f", {"a": "ab\n" * (1 << 18)})]


@pytest.mark.parametrize("name", ["plain", "hermes"])
def test_white_space_waits_only_where_markup_may_follow(name):
    parser = format_of(name).parser(tools=TOOLS if name == "hermes" else ())
    shown = [[part.text for part in parser.feed(piece)] for piece in ("One", " ", "two", "\n", "")]
    assert shown == ([["One"], [" "], ["two"], ["\n"], []] if name == "plain" else [["One"], [], [" two"], [], []])
    assert [part.text for part in parser.end(complete=True)] == ([] if name == "plain" else ["\n"])
