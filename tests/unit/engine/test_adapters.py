"""Adapters over one model: their files, their places in the model, their text and their turns."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

import mlxinfer
from mlxinfer import InvalidRequestError, ModelFileError, ModelNotFoundError, UnsupportedModelError, upstream
from mlxinfer.engine.adapter_files import read_adapter
from mlxinfer.engine.adapters import Adapters
from mlxinfer.engine.memory import KVCost
from mlxinfer.engine.pace import Pace
from mlxinfer.engine.scheduler import schedule
from mlxinfer.engine.tracked import TURN, SchedulerState, Tracked
from mlxinfer.formats.safetensors import shard_files
from tests import tiny
from tests.adapters import MLP, QV, mlx_lm_tokens, write_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPT = "the quick brown fox"
PACKED: dict[str, Any] = {"quantization": {"group_size": 32, "bits": 4}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folders(base: Path) -> dict[str, Path]:
    made = base.parent
    return {
        "a": write_adapter(made / "a", base, seed=1),
        "b": write_adapter(made / "b", base, seed=2, kind="dora", rank=8, keys=MLP, num_layers=2),
        "all": write_adapter(made / "all", base, seed=3, rank=2, keys=None, num_layers=1),
        "head": write_adapter(made / "head", base, seed=4, keys=("lm_head", "model.embed_tokens", *QV)),
    }


@pytest.fixture(scope="module")
def llm(base: Path, folders: dict[str, Path]) -> Iterator[mlxinfer.LLM]:
    with mlxinfer.load(base, adapter=folders) as model:
        yield model


@pytest.fixture(scope="module")
def expected(llm: mlxinfer.LLM, base: Path, folders: dict[str, Path]) -> dict[str, list[int]]:
    ids = llm.tokenizer.encode(PROMPT)
    names: dict[str, Path | None] = {"": None, **folders}
    return {name: mlx_lm_tokens(base, folder, ids, 24) for name, folder in names.items()}


# -- text ---------------------------------------------------------------------------------------------------------


def test_each_adapter_alone_gives_the_tokens_that_mlx_lm_gives_with_it(llm, expected):
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    for name, tokens in expected.items():
        reply = llm.adapted(name).generate(PROMPT, **GREEDY)
        assert list(reply.token_ids) == tokens, name
        assert reply.model.endswith(f":{name}" if name else "tiny")


def test_rows_of_all_adapters_at_once_give_the_tokens_that_each_gives_alone(llm, expected):
    views = {name: llm.adapted(name) for name in expected}
    running = [(name, views[name].stream(PROMPT, raw=True, **GREEDY)) for name in [*expected] * 3]
    for name, stream in running:
        "".join(stream)
        assert list(stream.reply.token_ids) == expected[name], name


def test_the_model_as_it_is_stays_the_same_to_the_bit(base, llm, folders):
    llm.adapted("a").generate(PROMPT, **GREEDY)
    llm.adapted("b").generate(PROMPT, **GREEDY)
    among = llm.generate(PROMPT, logprobs=3, **GREEDY)
    with mlxinfer.load(base) as alone:
        assert alone.generate(PROMPT, logprobs=3, **GREEDY).logprobs == among.logprobs


def test_a_prefix_is_found_under_its_own_adapter_only(llm):
    prompt = "paris is the capital of france. " * 20
    first = llm.adapted("a").generate(prompt, **GREEDY)
    assert llm.adapted("a").generate(prompt, **GREEDY).usage.cached_tokens > 0
    assert llm.adapted("b").generate(prompt, **GREEDY).usage.cached_tokens == 0
    assert llm.generate(prompt, **GREEDY).usage.cached_tokens == 0
    assert llm.adapted("a").generate(prompt, **GREEDY) == first


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_go_on_a_quantized_model(tmp_path, kind):
    base = quantized(tmp_path)
    folder = write_adapter(tmp_path / "adapter", base, seed=5, kind=kind, size=0.3)
    with mlxinfer.load(base, adapter=folder, dtype="float32") as model:
        ids = model.tokenizer.encode(PROMPT)
        tokens = list(model.generate(ids, **GREEDY).token_ids)
        assert tokens == mlx_lm_tokens(base, folder, ids, 24)
        assert tokens != mlx_lm_tokens(base, None, ids, 24)


def quantized(tmp_path: Path) -> Path:
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    base = tiny.write_folder(tmp_path / "packed", **PACKED)
    model = tiny.build_model(tiny.config())
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(base / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return base


# -- places in the model ----------------------------------------------------------------------------------------------


def modules(model) -> dict[str, int]:
    return {path: id(module) for path, _, _, module in upstream.child_slots(model)}


def test_switching_copies_no_weight_and_leaves_the_model_as_it_was(base, folders):
    model: Any = upstream.load_folder(base, shard_files(base))[0]
    before = modules(model)
    adapters = Adapters(model)
    for name, folder in folders.items():
        adapters.add(read_adapter(name, folder))
    assert modules(model) == before
    adapters.use("a")
    layer = model.layers[0].self_attn.q_proj
    assert id(layer.linear) == before["model.layers.0.self_attn.q_proj"]
    assert id(model.layers[0].mlp.down_proj) == before["model.layers.0.mlp.down_proj"]
    adapters.use("b")
    assert id(model.layers[0].self_attn.q_proj) == before["model.layers.0.self_attn.q_proj"]
    assert id(model.layers[2].mlp.down_proj) != before["model.layers.2.mlp.down_proj"]
    adapters.use("")
    assert modules(model) == before


def test_the_least_recently_used_adapter_goes_and_comes_back_when_it_is_wanted(base, folders):
    model: Any = upstream.load_folder(base, shard_files(base))[0]
    adapters = Adapters(model)
    for name, folder in folders.items():
        adapters.add(read_adapter(name, folder))
    assert adapters.nbytes == 0
    adapters.use("a")
    adapters.use("b")
    both = adapters.nbytes
    stored = sum(t.nbytes for name in ("a", "b") for t in read_adapter(name, folders[name]).tensors.values())
    assert both == stored
    adapters.max_bytes = both
    adapters.use("all")
    assert "a" not in adapters.in_memory
    adapters.use("a")
    assert adapters.in_memory[-1] == adapters.active == "a"
    adapters.max_bytes = 1
    adapters.use("b")
    assert adapters.in_memory == ("a", "b") or adapters.in_memory == ("b",)
    adapters.use("all")
    assert "a" not in adapters.in_memory


def test_the_governor_counts_adapters_in_memory(base, folders):
    with mlxinfer.load(base, adapter={"a": folders["a"]}) as model:
        before = model._engine.weight_bytes
        model.adapted("a").generate(PROMPT, **GREEDY)
        assert model._engine.weight_bytes == before + sum(
            t.nbytes for t in read_adapter("a", folders["a"]).tensors.values()
        )


# -- files that are wrong ---------------------------------------------------------------------------------------------


def changed(folder: Path, base: Path, **changes: Any) -> Path:
    return write_adapter(folder, base, seed=6, **changes)


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path, llm, base):
    folder = changed(tmp_path / "bad", base)
    weights: Any = mx.load(str(folder / "adapters.safetensors"))
    q = "model.layers.{}.self_attn.q_proj.lora_{}"
    weights[q.format(0, "a")] = mx.zeros((9, 9))
    weights[q.format(1, "b")] = weights[q.format(1, "b")].astype(mx.int32)
    del weights[q.format(2, "b")]
    weights["model.layers.0.self_attn.q_proj.weight"] = mx.zeros((64, 64))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    with pytest.raises(ModelFileError) as failure:
        llm.add_adapter("bad", folder)
    for name in (q.format(0, "a"), q.format(1, "b"), q.format(2, "b"), "model.layers.0.self_attn.q_proj.weight"):
        assert name in str(failure.value)
    assert q.format(0, "b") not in str(failure.value)
    assert "bad" not in llm.adapters


def test_an_adapter_for_another_model_is_refused_and_the_model_goes_on(tmp_path, llm, expected):
    other = tiny.write_folder(tmp_path / "other", hidden_size=32)
    folder = changed(tmp_path / "adapter", other)
    with pytest.raises(ModelFileError, match="made for another"):
        llm.add_adapter("other", folder)
    assert list(llm.generate(PROMPT, **GREEDY).token_ids) == expected[""]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"fine_tune_type": "full"}, UnsupportedModelError, "lora fuse"),
        ({"fine_tune_type": "ia3"}, UnsupportedModelError, "ia3"),
        ({"peft_type": "LORA"}, UnsupportedModelError, "lora import"),
        ({"num_layers": "two"}, ModelFileError, "num_layers"),
        ({"num_layers": 1 << 40}, ModelFileError, "num_layers"),
        ({"lora_parameters": None}, ModelFileError, "lora_parameters"),
        ({"lora_parameters": {"rank": 1 << 40, "scale": 1.0}}, ModelFileError, "rank"),
        ({"lora_parameters": {"rank": 4, "alpha": 8}}, ModelFileError, "alpha / rank"),
        ({"lora_parameters": {"rank": 4, "scale": float("nan")}}, ModelFileError, "scale"),
        ({"lora_parameters": {"rank": 4, "scale": 10**400}}, ModelFileError, "scale"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0, "keys": "q_proj"}}, ModelFileError, "keys"),
    ],
)
def test_a_config_that_is_wrong_is_refused_with_the_field_and_its_value(tmp_path, base, changes, error, says):
    folder = changed(tmp_path / "adapter", base)
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=says):
        read_adapter("x", folder)


def test_keys_that_name_no_linear_layer_are_refused(tmp_path, llm, base):
    folder = changed(tmp_path / "adapter", base)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_parameters"]["keys"] = ["self_attn"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="Attention"):
        llm.add_adapter("x", folder)


def test_missing_and_broken_files_are_refused(tmp_path, base):
    with pytest.raises(ModelNotFoundError, match="adapter_config"):
        read_adapter("x", tmp_path)
    folder = changed(tmp_path / "adapter", base)
    (folder / "adapters.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelFileError, match="header"):
        read_adapter("x", folder)
    with pytest.raises(InvalidRequestError, match="called"):
        read_adapter("../x", folder)


def test_a_file_that_changes_after_it_was_registered_fails_its_requests_only(tmp_path, llm, base, expected):
    folder = changed(tmp_path / "adapter", base)
    llm.add_adapter("late", folder)
    write_adapter(folder, base, seed=7)
    with pytest.raises(ModelFileError, match="changed"):
        llm.adapted("late").generate(PROMPT, **GREEDY)
    assert list(llm.adapted("a").generate(PROMPT, **GREEDY).token_ids) == expected["a"]
    assert llm.stats()["failed_steps"] == 0


def test_an_unknown_adapter_is_refused_before_any_work(llm):
    with pytest.raises(ModelNotFoundError, match="nobody"):
        llm.submit([1, 2], mlxinfer.SamplingParams(), adapter="nobody")
    with pytest.raises(ModelNotFoundError):
        llm.adapted("nobody")


# -- turns ------------------------------------------------------------------------------------------------------------


def ready(**options: Any) -> SchedulerState:
    return SchedulerState(max_num_seqs=4, prefill_chunk=512, pace=Pace(), **options)


def tracked(name: str, adapter: str, prompt: int = 8, limit: int = 1 << 30, **options: Any) -> Tracked:
    return Tracked(name, prompt, limit, frozenset(), adapter=adapter, **options)


def advance(state: SchedulerState) -> str:
    """One step, and whose it was. Its rows are all of that adapter."""
    step = schedule(state)
    assert step.start or step.prefill or step.decode
    assert {state.requests[name].adapter for name in step.request_ids} == {step.adapter}
    state.update(step, [7] * len(step.decode))
    return step.adapter


def test_adapters_with_work_get_as_many_steps_each():
    state = ready()
    for adapter in ("", "a", "b"):
        state.add(tracked(f"row {adapter}", adapter))
    counts = Counter(advance(state) for _ in range(60 * TURN))
    assert set(counts) == {"", "a", "b"}
    assert max(counts.values()) - min(counts.values()) <= TURN


def test_nobody_waits_longer_than_a_turn_of_each_other():
    state = ready()
    for adapter in ("", "a", "b", "c"):
        state.add(tracked(f"row {adapter}", adapter))
    last: dict[str, int] = {}
    for number in range(400):
        adapter = advance(state)
        assert number - last.get(adapter, number) <= 3 * TURN + 1
        last[adapter] = number


@pytest.mark.parametrize("fused", [True, False])
def test_a_request_is_not_starved_by_a_stream_of_newcomers_of_another_adapter(fused):
    state = ready(fused=fused)
    for number in range(8):
        state.add(tracked(f"base {number}", "", limit=6))
    state.add(tracked("patient", "a", prompt=200, limit=6))
    number = 8
    while "patient" in state.requests and number < 300:
        state.add(tracked(f"base {number}", "", limit=6))
        advance(state)
        number += 1
    assert "patient" not in state.requests


def test_memory_goes_to_the_first_in_line_whatever_its_adapter():
    state = ready(kv=KVCost(per_token=1), kv_limit=400)
    state.add(tracked("first", "", limit=100))
    assert advance(state) == ""
    state.add(tracked("large", "a", prompt=300, limit=20))
    number = 0
    while "large" in state.requests and number < 4000:
        if number % 25 == 0:
            state.add(tracked(f"small {number}", "", limit=30))
        advance(state)
        number += 1
    assert "large" not in state.requests


def test_every_request_of_random_adapters_ends():
    chance = random.Random(5)
    state = ready(kv=KVCost(per_token=1), kv_limit=900)
    names = set()
    for number in range(400):
        if number < 300 and chance.random() < 0.3:
            name = f"row {number}"
            names.add(name)
            state.add(
                tracked(name, chance.choice(["", "a", "b"]), prompt=chance.randint(1, 200), limit=chance.randint(1, 20))
            )
        if state.requests:
            advance(state)
    for _ in range(5000):
        if not state.requests:
            break
        advance(state)
    assert not state.requests
    assert set(state.turns.last) <= {"", "a", "b"}


# -- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_real_model_with_adapters_gives_mlx_lms_tokens_alone_and_beside_others(tmp_path, kind):
    base = os.environ.get("SMOLLM2_FOLDER")
    if base is None:
        pytest.skip("SMOLLM2_FOLDER is not set: SmolLM2-135M in the Hugging Face layout, in float32")
    folder = Path(base)
    adapters = {
        name: write_adapter(tmp_path / name, folder, seed=seed, kind=kind, rank=8, num_layers=16, size=0.04)
        for seed, name in enumerate("ab")
    }
    with mlxinfer.load(folder, adapter=adapters, dtype="float32") as model:
        ids = model.tokenizer.encode("The capital of France is")
        running = {n: model.submit(ids, mlxinfer.SamplingParams(**GREEDY), adapter=n) for n in ("", "a", "b")}
        together = {name: list(one.result().token_ids) for name, one in running.items()}
        expected = {name: mlx_lm_tokens(folder, adapters.get(name), ids, 24) for name in together}
        assert together == expected
        assert len({tuple(tokens) for tokens in expected.values()}) == 3
        assert list(model.adapted("a").generate(ids, **GREEDY).token_ids) == expected["a"]


def test_prefixes_on_disk_are_found_by_the_adapters_content_whatever_its_name(tmp_path, base, folders):
    prompt = "paris is the capital of france. " * 40
    options: dict[str, Any] = {"cache_dir": tmp_path, "prefix_disk_mb": 64, "kernels": "off"}
    with mlxinfer.load(base, adapter={"a": folders["a"]}, **options) as model:
        first = model.adapted("a").generate(prompt, **GREEDY)
        assert first.usage.cached_tokens == 0
    again = {"other": folders["a"], "b": folders["b"]}
    with mlxinfer.load(base, adapter=again, **options) as model:
        assert model.generate(prompt, **GREEDY).usage.cached_tokens == 0
        assert model.adapted("b").generate(prompt, **GREEDY).usage.cached_tokens == 0
        reply = model.adapted("other").generate(prompt, **GREEDY)
        assert reply.usage.cached_tokens > 0
        assert reply == first
