"""Where a model's own code takes its parameters from, without a value being read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxinfer import upstream
from mlxinfer.convert.sources.base import Logical
from mlxinfer.convert.tracing import Tracer
from mlxinfer.errors import ModelFileError
from tests.unit.convert.fake import FakeSource, fake_source, llama_config, moe_config, random_weights


class Model:
    """Stands in for mlx-lm's class: its `sanitize` is the test's."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], sanitize: Any) -> None:
        self._shapes = shapes
        self.sanitize = sanitize

    def parameters(self) -> dict[str, mx.array]:
        return {name: mx.zeros(shape) for name, shape in self._shapes.items()}


def trace_of(
    sanitize: Any, shapes: dict[str, tuple[int, ...]], given: dict[str, mx.array]
) -> tuple[Tracer, dict[str, Any], tuple[str, ...]]:
    model: Any = Model(shapes, sanitize)
    tracer = Tracer(model, FakeSource({}, given).tensors)
    trace = tracer.trace()
    return tracer, {output.name: output for output in trace.outputs}, trace.dropped


A, B = mx.arange(6.0).reshape(2, 3), mx.ones((2, 3))


def test_a_renamed_tensor_is_the_tensor_itself() -> None:
    _, outputs, dropped = trace_of(lambda w: {"x": w["a"]}, {"x": (2, 3)}, {"a": A})
    assert [p.source for p in outputs["x"].pieces] == ["a"]
    assert not outputs["x"].stacked
    assert dropped == ()


@pytest.mark.parametrize("same", [lambda a: a.astype(a.dtype), lambda a: a.reshape(a.shape), lambda a: a])
def test_an_operation_that_changes_nothing_is_a_rename(same: Any) -> None:
    _, outputs, dropped = trace_of(
        lambda w: {"x": same(w["a"]), "y": same(w["a"])}, {"x": (2, 3), "y": (2, 3)}, {"a": A}
    )
    assert [outputs[name].pieces[0].source for name in "xy"] == ["a", "a"]
    assert dropped == ()


def test_experts_that_are_stacked_stay_apart() -> None:
    def sanitize(w: dict[str, mx.array]) -> dict[str, mx.array]:
        return {"x": mx.stack([w["a"], w["b"] + 1])}

    tracer, outputs, _ = trace_of(sanitize, {"x": (2, 2, 3)}, {"a": A, "b": B})
    assert outputs["x"].stacked
    assert [(p.source, p.inputs) for p in outputs["x"].pieces] == [("a", ("a",)), (None, ("b",))]
    assert mx.array_equal(tracer.compute([("x", 1)], {"b": B})["x", 1], B + 1)


def test_a_stack_along_another_axis_is_computed() -> None:
    _, outputs, _ = trace_of(lambda w: {"x": mx.stack([w["a"], w["b"]], axis=1)}, {"x": (2, 2, 3)}, {"a": A, "b": B})
    assert [(p.source, p.inputs) for p in outputs["x"].pieces] == [(None, ("a", "b"))]


def test_what_a_computed_result_depends_on_is_found_and_computed_from_that_alone() -> None:
    def sanitize(w: dict[str, mx.array]) -> dict[str, mx.array]:
        first, second = mx.split(w["a"], [1], axis=1)
        return {"x": first, "y": mx.concatenate([second, w["b"]], axis=1), "z": mx.zeros((2,))}

    shapes = {"x": (2, 1), "y": (2, 5), "z": (2,)}
    tracer, outputs, dropped = trace_of(sanitize, shapes, {"c": B, "a": A, "b": B})
    assert {name: o.pieces[0].inputs for name, o in outputs.items()} == {"x": ("a",), "y": ("a", "b"), "z": ()}
    assert dropped == ("c",)
    assert mx.array_equal(tracer.compute([("x", 0)], {"a": A})["x", 0], A[:, :1])


def test_mlx_has_its_own_stack_back_afterwards_even_after_an_error() -> None:
    original = mx.stack
    with pytest.raises(ModelFileError, match="KeyError"):
        trace_of(lambda w: {"x": mx.stack([w["nothing"]])}, {"x": (1, 2)}, {"a": A})
    assert mx.stack is original


def test_unknown_missing_and_misshapen_tensors_are_named_together() -> None:
    weights = random_weights(llama_config())
    weights["model.layers.0.mlp.extra.weight"] = A
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = mx.ones((5,))
    source = FakeSource(llama_config(), weights)
    with pytest.raises(ModelFileError) as error:
        Tracer(upstream.empty_model(source.config), source.tensors).trace()
    assert "model.layers.0.mlp.extra.weight belong to nothing" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight are missing" in str(error.value)
    assert "model.norm.weight (from model.norm.weight) has the shape (5,)" in str(error.value)


def test_an_axis_longer_than_mlx_counts_is_an_error_that_names_the_tensor() -> None:
    logical = Logical("model.huge", (0, 2**40), "float32", 0, ("model.huge",))
    source = FakeSource(llama_config(), random_weights(llama_config()))
    with pytest.raises(ModelFileError, match=r"model\.huge has the shape \(0, 1099511627776\)"):
        Tracer(upstream.empty_model(source.config), {**source.tensors, "model.huge": logical}).trace()


def test_a_missing_expert_is_named() -> None:
    weights = random_weights(moe_config())
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    source = FakeSource(moe_config(), weights)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        Tracer(upstream.empty_model(source.config), source.tensors).trace()


def test_what_the_models_code_leaves_out_is_listed() -> None:
    config = llama_config(tie_word_embeddings=True)
    weights = random_weights(config)
    weights |= {"lm_head.weight": mx.ones((96, 64)), "model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones((8,))}
    source = FakeSource(config, weights)
    trace = Tracer(upstream.empty_model(config), source.tensors).trace()
    assert trace.dropped == ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")


def test_a_trace_reads_nothing_and_computes_nothing() -> None:
    source = fake_source(moe_config())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    Tracer(upstream.empty_model(source.config), source.tensors).trace()
    assert source.reads == []
    assert mx.get_peak_memory() - before < 4096
