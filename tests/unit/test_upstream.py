"""Contract with mlx and mlx-lm: everything mlxinfer leans on is there and behaves as assumed."""

import inspect
import json
import resource
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from tests import tiny


def test_attention_has_the_signature_that_ours_takes_its_place_with():
    names = list(inspect.signature(upstream.mlx_lm_attention).parameters)
    assert names == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]


def test_installing_attention_reaches_every_loaded_model_module_and_can_be_undone():
    import mlx_lm.models.llama as llama

    def marker(*_a, **_k):
        raise AssertionError

    before = llama.scaled_dot_product_attention
    upstream.install_attention(marker)
    assert llama.scaled_dot_product_attention is marker
    upstream.install_attention(before)
    assert llama.scaled_dot_product_attention is before


def test_installing_swiglu_reaches_every_loaded_model_module_and_can_be_undone():
    import mlx_lm.models.llama as llama

    def marker(gate, x):
        raise AssertionError

    before = llama.swiglu
    upstream.install_swiglu(marker)
    assert llama.swiglu is marker
    upstream.install_swiglu(upstream.mlx_lm_swiglu)
    assert llama.swiglu is upstream.mlx_lm_swiglu
    upstream.install_swiglu(before)


def test_rope_takes_one_offset_per_row():
    x = mx.random.normal((2, 3, 1, 8))
    both = mx.fast.rope(x, 8, traditional=False, base=1e4, scale=1.0, offset=mx.array([3, 11]))
    for row, offset in enumerate((3, 11)):
        alone = mx.fast.rope(x[row : row + 1], 8, traditional=False, base=1e4, scale=1.0, offset=offset)
        assert mx.allclose(both[row : row + 1], alone, atol=1e-6).item()


def test_importing_mlx_lm_leaves_the_file_limit_as_it_was():
    code = (
        "import resource, mlxinfer; a = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import mlxinfer.upstream; print(a == resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "True"
    assert resource.setrlimit.__module__ == "resource"


@pytest.mark.parametrize("name", ["os", "../x", "", None, 5, "llama; import os", "no_such_model"])
def test_a_model_type_that_is_not_a_model_is_refused(name):
    with pytest.raises(UnsupportedModelError):
        upstream.model_classes({"model_type": name})


def test_a_model_is_built_from_packed_and_plain_weights():
    model = tiny.build_model(tiny.config())
    tokens = mx.array([[1, 2, 3]])
    nn.quantize(model, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    cfg = tiny.config(quantization={"group_size": 32, "bits": 4})
    built = upstream.build_model(cfg, weights)
    assert mx.allclose(built(tokens), model(tokens)).item()
    upstream.dequantize(built)
    assert mx.allclose(built(tokens), model(tokens), atol=1e-4).item()
    assert not any(isinstance(m, nn.QuantizedLinear) for m in built.modules())


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_weights_that_do_not_match_are_named(change):
    weights = dict(tree_flatten(tiny.build_model(tiny.config()).parameters()))
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "extra":
        weights[name := "model.nonsense"] = mx.zeros(3)
    else:
        weights[name] = mx.zeros((2, 2))
    with pytest.raises(ModelFileError, match=name):
        upstream.build_model(tiny.config(), weights)


def test_a_config_with_a_missing_field_is_a_file_error():
    cfg = tiny.config()
    del cfg["hidden_size"]
    with pytest.raises(ModelFileError, match="hidden_size"):
        upstream.build_model(cfg, {})


def test_only_the_given_shards_are_read_and_custom_code_is_never_run(tmp_path):
    folder = tiny.write_folder(tmp_path / "m")
    mx.save_safetensors(str(folder / "model-stray.safetensors"), {"model.norm.weight": mx.full((64,), 99.0)})
    model, _ = upstream.load_folder(folder, [folder / "model.safetensors"])
    assert mx.max(model.model.norm.weight).item() < 50
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    (folder / "config.json").write_text(json.dumps(tiny.config(model_file="evil.py")))
    with pytest.raises(ModelFileError, match="custom"):
        upstream.load_folder(folder, [folder / "model.safetensors"])


def test_a_parser_of_tool_calls_that_fails_finds_none():
    good = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    assert upstream.parse_tool_call("qwen3_coder", good, []) == [{"name": "f", "arguments": {"a": "1"}}]
    typed = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    assert upstream.parse_tool_call("qwen3_coder", good, [typed])[0]["arguments"] == {"a": 1}
    assert upstream.parse_tool_call("qwen3_coder", good.replace("1", "x"), [typed]) == []
    for broken in ("", "<function=f", good.replace("f>", ">")):
        assert upstream.parse_tool_call("qwen3_coder", broken, [{}]) == []


def test_mlx_lm_guesses_parsers_and_reasoning_from_what_we_hand_it():
    assert upstream.tool_parser_name("<minimax:tool_call>", ()) == "minimax_m2"
    assert upstream.tool_parser_name("", ("<|tool_call_start|>", "<|tool_call_end|>")) == "pythonic"
    assert upstream.tool_parser_name("", ()) is None
    assert upstream.think_tags(("<think>", "</think>")) == ("<think>", "</think>")
    assert upstream.think_tags(()) is None
    assert upstream.framing_markup(()) == ()
    assert "<|open|>response<|sep|>" in upstream.framing_markup(("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))
