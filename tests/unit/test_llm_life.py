"""A model comes into memory and leaves it."""

import gc
import json
import time

import mlx.core as mx
import pytest

import mlxinfer
from mlxinfer import EngineClosedError
from tests import tiny


def test_unload_frees_the_memory_and_ends_what_is_open(tmp_path):
    gc.collect()
    before = mx.get_active_memory()
    folder = tiny.write_folder(tmp_path / "m", hidden_size=256, intermediate_size=1024)
    llm = mlxinfer.load(str(folder))
    assert mx.get_active_memory() > before + llm.info.weight_bytes // 2
    stream = llm.stream("go on", raw=True, max_tokens=1500, ignore_eos=True)
    next(stream)
    llm.unload()
    llm.unload()
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError):
        llm.chat("hello")
    assert not llm.alive
    assert mx.get_active_memory() <= before + 4096


def test_a_quantized_folder_loads_and_predicts_what_its_model_does(tmp_path):
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    folder = tiny.write_folder(tmp_path / "q")
    model = tiny.build_model(tiny.config())
    nn.quantize(model, group_size=32, bits=8)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(tiny.config(quantization={"group_size": 32, "bits": 8})))
    with mlxinfer.load(str(folder)) as llm:
        assert llm.info.quantization.startswith("affine 8-bit, group 32")
        ids = llm.prompt_ids("hello")
        expected = mx.argmax(model(mx.array([ids]))[0, -1]).item()
        assert llm.submit(
            ids, mlxinfer.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        ).result().token_ids == (expected,)


def falls_to(limit, thread):
    """Whether the active memory gets there: a row is released in the step after its last token."""
    until = time.monotonic() + 5
    while mx.get_active_memory() > limit and time.monotonic() < until:
        thread.call(lambda: None)
        time.sleep(0.01)
    return mx.get_active_memory() <= limit


def test_a_model_that_nobody_holds_any_more_is_freed(tmp_path):
    gc.collect()
    before = mx.get_active_memory()
    folder = tiny.write_folder(tmp_path / "m", hidden_size=256, intermediate_size=1024)
    for _ in range(3):
        llm = mlxinfer.load(folder)
        llm.generate("a", max_tokens=2)
    thread, weight_bytes = llm._engine.thread, llm.info.weight_bytes
    idle = llm.stats()["prefix_bytes"]
    assert falls_to(before + weight_bytes + idle + 2**16, thread), "only the last one is held"
    stream = llm.stream("go on", raw=True, max_tokens=50, ignore_eos=True)
    del llm
    gc.collect()
    assert len("".join(stream)) > 5, "a stream keeps its model"
    del stream
    gc.collect()
    assert falls_to(before + 2**16, thread)


def test_unload_gives_mlxs_cached_buffers_back_too(tmp_path):
    llm = mlxinfer.load(tiny.write_folder(tmp_path / "m", hidden_size=256, intermediate_size=1024))
    llm.generate([5] * 500, max_tokens=2)
    llm.unload()
    assert mx.get_cache_memory() == 0
