"""What is decided before anything is written: forms, dtypes, shards, config and the hash over all of it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlxinfer.convert.choosing import default_name
from mlxinfer.convert.job import ConvertOptions, plan
from mlxinfer.convert.planning import main_dtype
from mlxinfer.convert.quantizing import min_max
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from tests.conformance.configs import CONFIGS
from tests.unit.convert.fake import FakeSource, fake_source, llama_config, moe_config, random_weights

if TYPE_CHECKING:
    from mlxinfer.convert.planning import Plan

Q4 = Packing(4, 64)
HEAD, NORM, ROUTER = "lm_head.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight"


class ByName:
    """A recipe that is a table."""

    name = "by name"

    def __init__(self, table: dict[str, Packing | None], rest: Packing | None = Q4) -> None:
        self.table = table
        self.rest = rest

    def decide(self, path: str, shape: tuple[int, ...]) -> Packing | None:
        return self.table.get(path, self.rest)


def form(made: Plan, name: str) -> tuple[Packing | None, bool, str]:
    item = next(i for i in made.items if i.output.name == name)
    return item.packing, item.kept, item.handling


def note(made: Plan, name: str) -> str:
    return next(i.note for i in made.items if i.output.name == name)


def test_without_a_wish_everything_stays_as_published() -> None:
    made = plan(fake_source(packed={HEAD: Q4}), ConvertOptions())
    assert form(made, HEAD) == (Q4, True, "exact")
    assert form(made, "model.embed_tokens.weight") == (None, False, "exact")
    assert made.dtype == "bfloat16"
    assert made.config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}


def test_a_recipe_that_asks_for_what_the_source_has_keeps_its_codes_and_otherwise_says_that_it_was_packed() -> None:
    source = fake_source(packed={HEAD: Q4, "model.embed_tokens.weight": Q4})
    made = plan(source, ConvertOptions(recipe=ByName({"lm_head": Q4}, rest=Packing(8, 32))))
    assert form(made, HEAD) == (Q4, True, "exact")
    assert form(made, "model.embed_tokens.weight") == (Packing(8, 32), False, "requantized")
    assert note(made, "model.embed_tokens.weight") == "was 4-bit affine, groups of 64"
    assert form(made, "model.layers.0.mlp.up_proj.weight") == (Packing(8, 32), False, "quantized")


def test_a_recipe_that_says_floats_gets_them() -> None:
    made = plan(fake_source(packed={HEAD: Q4}), ConvertOptions(recipe=ByName({"lm_head": None})))
    assert form(made, HEAD) == (None, False, "exact")
    assert [t.dtype for i in made.items if i.output.name == HEAD for t in i.tensors] == ["bfloat16"]


def test_what_the_model_cannot_hold_packed_is_dequantized() -> None:
    source = fake_source()
    source.arrays[NORM] = mx.ones((64,), mx.bfloat16)
    source.packings = {NORM: Q4}
    made = plan(source, ConvertOptions(packing=Q4))
    assert form(made, NORM) == (None, False, "exact")
    assert "can't hold it packed" in note(made, NORM)


def test_experts_packed_alike_keep_their_codes_and_experts_packed_differently_do_not() -> None:
    source = fake_source(moe_config())
    experts = [name for name in source.arrays if ".experts." in name]
    source.packings = dict.fromkeys(experts, Q4)
    name = "model.layers.0.mlp.switch_mlp.up_proj.weight"
    assert form(plan(source, ConvertOptions()), name) == (Q4, True, "exact")
    source.packings["model.layers.0.mlp.experts.1.up_proj.weight"] = Packing(8, 64)
    made = plan(source, ConvertOptions())
    assert form(made, name) == (Packing(8, 64), False, "requantized")
    assert form(made, name.replace("up", "down")) == (Q4, True, "exact")


def test_a_router_gets_the_bits_that_the_models_code_asks_for_unless_the_recipe_gives_more() -> None:
    made = plan(fake_source(moe_config()), ConvertOptions(packing=Q4))
    assert form(made, ROUTER) == (Packing(8, 64), False, "quantized")
    assert note(made, ROUTER) == "the model's code asks for 8-bit affine, groups of 64"
    assert made.config["quantization"]["model.layers.0.mlp.gate"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    made = plan(fake_source(moe_config()), ConvertOptions(packing=Packing(8, 32)))
    assert form(made, ROUTER) == (Packing(8, 32), False, "quantized")


def test_columns_that_no_group_divides_get_a_smaller_group_or_floats_or_an_error_as_asked() -> None:
    source = fake_source(llama_config(intermediate_size=96, hidden_size=64))
    down = "model.layers.0.mlp.down_proj.weight"
    made = plan(source, ConvertOptions(packing=Q4))
    assert form(made, down) == (Packing(4, 32), False, "quantized")
    assert note(made, down) == "groups of 32: 96 columns are no multiple of the group size 64"
    assert form(plan(source, ConvertOptions(packing=Q4, misfit="floats")), down)[0] is None
    with pytest.raises(InvalidRequestError, match="down_proj: 96 columns are no multiple of the group size 64"):
        plan(source, ConvertOptions(packing=Q4, misfit="refuse"))


def test_one_dtype_throughout_but_for_what_the_models_code_keeps() -> None:
    source = fake_source()
    source.arrays[NORM] = source.arrays[NORM].astype(mx.float32)
    made = plan(source, ConvertOptions())
    assert {i.dtype for i in made.items} == {"bfloat16"}
    config = {**CONFIGS["lfm2_moe"], "model_type": "lfm2_moe"}
    source = FakeSource(config, random_weights(config))
    biases = [name for name in source.arrays if name.endswith("expert_bias")]
    source.arrays |= {name: source.arrays[name].astype(mx.float32) for name in biases}
    made = plan(source, ConvertOptions(dtype="float16"))
    assert {i.output.name: i.dtype for i in made.items if i.dtype != "float16"} == dict.fromkeys(biases, "float32")
    assert biases


def test_the_main_dtype_is_that_of_most_weights() -> None:
    weights = random_weights(llama_config(), mx.float16)
    weights[NORM] = weights[NORM].astype(mx.float32)
    made = plan(FakeSource(llama_config(torch_dtype="bfloat16"), weights), ConvertOptions())
    assert made.dtype == "float16"
    assert made.config["torch_dtype"] == "float16"


@pytest.mark.parametrize(
    ("changes", "others", "dtype"),
    [
        ({}, mx.float32, "float16"),
        ({"model_type": "gemma"}, mx.float32, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, mx.float32, "bfloat16"),
        ({"dtype": "float32"}, mx.float16, "float32"),
        ({"torch_dtype": "float8"}, mx.bfloat16, "bfloat16"),
    ],
)
def test_codes_have_no_dtype_of_their_own(changes: dict[str, Any], others: mx.Dtype, dtype: str) -> None:
    weights = random_weights(llama_config(), mx.float32)
    packed = {name: Packing(4, 32) for name, a in weights.items() if a.ndim == 2}
    weights = {name: a if name in packed else a.astype(others) for name, a in weights.items()}
    assert main_dtype(FakeSource(llama_config(**changes), weights, packed=packed)) == dtype


def test_a_parameter_is_not_cut_across_shards_and_shards_stay_below_the_limit() -> None:
    limit = 20_000
    made = plan(fake_source(), ConvertOptions(packing=Q4, max_shard_bytes=limit))
    assert made.shards == tuple(f"model-{i:05}-of-{len(made.shards):05}.safetensors" for i in (1, 2, 3))
    for shard in range(len(made.shards)):
        items = [i for i in made.items if i.shard == shard]
        assert sum(i.nbytes for i in items) <= limit or len(items) == 1
        end = 0
        for tensor in (t for i in items for t in i.tensors):
            assert tensor.offset == end
            end += tensor.nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"packing": Packing(8, 64)},
        {"dtype": "float16"},
        {"quantizer": lambda weight, packing: min_max(weight, packing)},
        {"max_shard_bytes": 20_000},
        {"recipe": ByName({"lm_head": None})},
    ],
    ids=str,
)
def test_the_hash_changes_with_every_option_that_changes_bytes(change: dict[str, Any]) -> None:
    options = ConvertOptions(packing=Q4)
    assert plan(fake_source(), options).hash == plan(fake_source(), options).hash
    assert plan(fake_source(), options).hash != plan(fake_source(), dataclasses.replace(options, **change)).hash


def test_the_hash_changes_with_the_source() -> None:
    one, other = fake_source(), fake_source()
    other.salt = "touched"
    assert plan(one, ConvertOptions()).hash != plan(other, ConvertOptions()).hash


def test_a_plan_reads_no_tensor_and_its_config_is_json() -> None:
    source = fake_source(moe_config(rope_scaling={"factor": math.inf}, rope_parameters=None))
    made = plan(source, ConvertOptions(packing=Q4))
    assert source.reads == []
    assert json.loads(json.dumps(made.config, allow_nan=False))["rope_scaling"] == {"factor": {"__float__": "Infinity"}}


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        (Packing(7, 64), "bits is 7; affine quantization has 2, 3, 4, 5, 6, 8"),
        (Packing(4, 48), "group size is 48; it must be 32, 64, 128"),
        (Packing(4, 64, "mxfp4"), "mxfp4 has 4 bits and groups of 32 only"),
    ],
)
def test_a_form_that_mlx_does_not_have_is_refused(packing: Packing, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plan(fake_source(), ConvertOptions(packing=packing))


def test_a_source_without_tensors_or_of_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ModelFileError, match="holds no tensors"):
        plan(FakeSource(llama_config(), {}), ConvertOptions())
    with pytest.raises(UnsupportedModelError, match="'nosuch' is not in mlx-lm"):
        plan(FakeSource(llama_config(model_type="nosuch"), random_weights(llama_config())), ConvertOptions())


def test_a_config_with_a_million_layers_is_refused_before_they_are_built() -> None:
    with pytest.raises(ModelFileError, match="num_hidden_layers is 1e\\+06"):
        plan(FakeSource(llama_config(num_hidden_layers=10**6), random_weights(llama_config())), ConvertOptions())


def test_the_name_of_the_result_says_what_it_is() -> None:
    assert default_name("org/Name-1B", plan(fake_source(), ConvertOptions(packing=Q4))) == "Name-1B-mlx-4bit"
    assert default_name("./a/b.Q4_1.gguf", plan(fake_source(), ConvertOptions())) == "b.Q4_1-mlx-bf16"
    mxfp4 = ConvertOptions(packing=Packing(4, 32, "mxfp4"))
    assert default_name("org/x@main:Q8_0", plan(fake_source(), mxfp4)) == "x-main-Q8_0-mlx-mxfp4"
