"""Which format a model is found to reply in."""

import importlib
import json
import pkgutil

import mlx_lm.tool_parsers
import pytest

from mlxinfer.tokenizer import Tokenizer
from mlxinfer.tokenizer.replies import ReplyFormat, reply_format
from mlxinfer.tokenizer.replies.detect import WHOLE
from tests.unit.tokenizer import tiny
from tests.unit.tokenizer.replies.models import MODELS, format_of

NAMES = {"mistral_named": "mistral", "glm47_compact": "glm47", "phi4_objects": "phi4", "granite": "phi4"}


def found(template: str | None, *tokens: str, model_type: str = "llama") -> ReplyFormat:
    raw = tiny.byte_level()
    at = max(t["id"] for t in raw["added_tokens"]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    raw["added_tokens"] += [{"id": at + i, "content": t, **flags} for i, t in enumerate(tokens)]
    tokenizer = Tokenizer.from_parts(tokenizer_json=raw, chat_template=template)
    return reply_format(tokenizer, model_type)


@pytest.mark.parametrize("name", MODELS)
def test_a_format_is_found_by_the_template_and_the_tokens(name):
    assert format_of(name).name == NAMES.get(name, name)
    assert format_of(name).has_tools == (name != "plain")


@pytest.mark.parametrize("name", MODELS)
def test_special_tokens_of_the_markup_have_to_show_and_others_do_not(name):
    model, markers = MODELS[name], format_of(name).markers
    unused = {"<|eom_id|>", "<|end_of_msg|>"}
    assert markers == set(model.special) - unused
    assert not markers & {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize("name", sorted(m.name for m in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)))
def test_every_format_of_mlx_lm_is_known_with_its_own_marks(name):
    ours = {"json_tools": "hermes", "laguna": "glm47"}.get(name, name)
    syntax = format_of(ours).syntax
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    assert module.tool_call_start in syntax.openers
    if isinstance(syntax, type(WHOLE["glm47"])):
        assert module.tool_call_end == syntax.closer


def test_a_plain_chat_template_knows_no_tools():
    assert found(tiny.CHATML).name == "plain"
    assert found(None).name == "plain"
    assert found("<tool_call> {{ messages }}").name == "hermes"


def test_tokens_alone_do_not_make_a_template_know_tools():
    # Qwen's vocabulary has them in models that were never shown a tool.
    form = found(tiny.CHATML, "<tool_call>", "</tool_call>", "<|python_tag|>")
    assert (form.name, form.has_tools) == ("plain", False)


@pytest.mark.parametrize(
    ("template", "tokens", "tags"),
    [
        ("", ("<think>", "</think>"), ("<think>", "</think>")),
        ("{{ c.split('</think>') }}", (), ("<think>", "</think>")),
        ("", ("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
        ("<seed:think></seed:think>", (), ("<seed:think>", "</seed:think>")),
        ("", ("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
        ("", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), ("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
        ("", ("<think>",), None),
        ("think", (), None),
    ],
)
def test_reasoning_is_found_by_template_or_tokens(template, tokens, tags):
    form = found(template + " ", *tokens)
    assert (form.think and (form.think.start, form.think.end)) == tags
    assert form.has_reasoning == (tags is not None)


def test_gpt_oss_is_found_by_its_type_when_it_has_no_template():
    tokens = MODELS["harmony"].special
    assert found(None, *tokens, model_type="gpt_oss").name == "harmony"
    assert found(tiny.CHATML, *tokens).name == "plain"


def test_a_template_for_tools_beside_the_default_counts():
    tokenizer = Tokenizer(
        format_tokenizer(),
        chat_templates={"default": tiny.CHATML, "tool_use": "<tool_call> tool_call.name"},
        special_tokens={},
        eos_token_ids=(),
        add_bos_token=False,
    )
    assert reply_format(tokenizer, "llama").name == "hermes"


def format_tokenizer():
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(tiny.byte_level()))
