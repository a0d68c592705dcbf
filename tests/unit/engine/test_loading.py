"""From files to a model: one dtype, memory checked before, and no config that gets past as something else."""

import concurrent.futures
import gc
import itertools
import json
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

import mlxinfer
from mlxinfer import ModelFileError, UnsupportedModelError, WontFitError, runtime
from mlxinfer.engine import dtypes, loading
from mlxinfer.engine.worker import SlicedJob, mlx_thread
from mlxinfer.errors import MlxinferError
from tests import tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("loading") / "good")


def load(folder, **kwargs):
    return loading.load_model("folder", folder, **kwargs)


def test_a_stray_half_precision_weight_is_cast_so_that_everything_has_one_dtype(tmp_path):
    folder = tiny.write_folder(tmp_path / "m")
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    loaded = load(folder)
    assert {w.dtype for w in dtypes.parameters(loaded.model)} == {mx.float32}
    assert loaded.dtype == "float32"


def test_weights_that_mlx_lm_keeps_out_of_casts_stay_float32():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.ones((4, 4))
            self.e_score_correction_bias = mx.ones(4)

        @property
        def cast_predicate(self):
            return lambda path: "e_score_correction_bias" not in path

    model = Model()
    assert dtypes.apply_dtype_policy(model, "bfloat16") == "bfloat16"
    assert model.weight.dtype == mx.bfloat16
    assert model.e_score_correction_bias.dtype == mx.float32


def test_without_kernels_a_quantized_model_stays_packed_where_unpacking_takes_too_much(
    without_kernels, tmp_path, monkeypatch
):
    folder = tiny.write_folder(tmp_path / "q")
    model = tiny.build_model(tiny.config())
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(tiny.config(quantization={"group_size": 32, "bits": 4})))
    assert "dequantized" in load(folder).quantization
    plain = 4 * load(folder).num_parameters
    small = runtime.Memory(total=plain, available=plain, budget=mx.get_active_memory() + int(plain * 1.5))
    monkeypatch.setattr(runtime, "memory", lambda: small)
    assert "dequantized" not in load(folder).quantization


def test_what_does_not_fit_is_refused_with_the_figures_before_it_is_read(good, monkeypatch):
    needed = sum(info.nbytes for info in loading.check_safetensors(good / "model.safetensors").values())
    held = mx.get_active_memory()
    for budget, fits in ((needed + held + 2**16, True), (needed + held - 2**10, False)):
        monkeypatch.setattr(runtime, "memory", lambda b=budget: runtime.Memory(b, b, b))
        if fits:
            load(good)
        else:
            with pytest.raises(WontFitError, match="mlxinfer fit"):
                load(good)


@pytest.mark.parametrize("stored", [False, True])
def test_half_precision_files_are_counted_as_what_they_become_on_a_cpu(tmp_path, monkeypatch, request, stored):
    if not stored:
        request.getfixturevalue("without_kernels")
    elif not dtypes.as_stored():
        pytest.skip("the kernels are not in use here")
    folder = tiny.write_folder(tmp_path / "half")
    weights = {k: v.astype(mx.bfloat16) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    mx.save_safetensors(str(folder / "consolidated.safetensors"), {"stray": mx.zeros(10**6)})
    size = sum(w.nbytes for w in weights.values())
    needed = 1 if stored else 2
    budget = mx.get_active_memory() + int(size * (needed - 0.5))
    monkeypatch.setattr(runtime, "memory", lambda: runtime.Memory(budget, budget, budget))
    with pytest.raises(WontFitError):
        load(folder)
    budget = mx.get_active_memory() + int(size * (needed + 0.2))
    load(folder)


CONFIGS = [
    {"hidden_size": 2**31},
    {"hidden_size": 0},
    {"hidden_size": -5},
    {"hidden_size": "64"},
    {"hidden_size": 64.5},
    {"num_attention_heads": 0},
    {"num_attention_heads": 10**9},
    {"num_key_value_heads": -(2**31)},
    {"head_dim": 2**31},
    {"vocab_size": 0},
    {"vocab_size": -1},
    {"vocab_size": float("nan")},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 2**63},
    {"num_hidden_layers": 10**30},
    {"layer_types": ["full_attention"] * 100_000},
    {"rope_scaling": {"type": "linear", "factor": 0}},
    {"rope_theta": "x"},
    {"rope_theta": []},
    {"quantization_config": {"quant_method": "awq"}},
    {"quantization": {"bits": 4}},
    {"quantization": 5},
    {"model_type": "cache"},
    {"model_type": "base"},
    {"model_type": "__init__"},
    {"model_type": "olmo"},
    {"model_type": "phi3small"},
    {"model_type": "phi3small", "vocab_size": "x"},
    {"architectures": 5},
]


@pytest.mark.parametrize("change", CONFIGS, ids=str)
def test_an_absurd_config_is_a_clear_error(tmp_path, good, change):
    folder = tmp_path / "m"
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(tiny.config() | change))
    with pytest.raises((ModelFileError, UnsupportedModelError)):
        mlxinfer.load(folder)


def test_a_model_whose_forward_fails_is_not_left_running(tmp_path, good):
    for change in ({"rope_traditional": "x", "rope_theta": None},):
        folder = tiny.write_folder(tmp_path / "m")
        (folder / "config.json").write_text(json.dumps(tiny.config() | change))
        with pytest.raises(MlxinferError):
            mlxinfer.load(folder)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.3, "top_k": 5}, (0.3, 5)),
        ({"temperature": 10**400}, (None, None)),
        ({"top_k": float("inf")}, (None, None)),
        ({"top_k": float("nan"), "temperature": float("nan")}, (None, None)),
        ({"temperature": "hot", "top_k": True}, (None, None)),
        ({"temperature": -1, "top_p": 1.5}, (None, None)),
        ({"do_sample": False, "temperature": 0.6}, (0.0, None)),
        ({"do_sample": True, "temperature": 0.6}, (0.6, None)),
    ],
)
def test_generation_config_gives_defaults_and_malformed_values_are_left_out(generation, expected):
    defaults = loading.sampling_defaults(generation)
    assert (defaults.temperature, defaults.top_k) == expected
    assert defaults.top_p is None


def test_the_context_is_what_the_config_states_and_a_number_that_is_none_is_not_taken():
    assert loading.context_length({"max_position_embeddings": 77}) == 77
    assert loading.context_length({"text_config": {"max_position_embeddings": 88}}) == 88
    assert loading.context_length({"max_position_embeddings": 2048.0}) == 2048
    for nonsense in (True, 10**30, -1, 0, "2048", float("inf")):
        assert loading.context_length({"n_positions": nonsense}) == 4096


def pieces_of(folder, kind="folder"):
    """(bytes held after each piece, the loaded model)."""
    building = loading.build(loading.prepare(kind, folder))
    before, held = mx.get_active_memory(), []
    while True:
        try:
            next(building)
        except StopIteration as done:
            return held, done.value
        held.append(mx.get_active_memory() - before)


def test_preparing_makes_no_array_and_can_be_done_on_any_thread(good):
    made = []
    gc.collect()
    before = mx.get_active_memory()
    thread = threading.Thread(target=lambda: made.append(loading.prepare("folder", good)))
    thread.start()
    thread.join(30)
    assert mx.get_active_memory() == before
    loaded = loading.drained(loading.build(made[0]))
    assert mx.all(mx.isfinite(loaded.model(mx.array([[1, 2, 3]])))).item()


@pytest.mark.parametrize("bits", [None, 4])
def test_with_the_kernels_weights_stay_as_stored_and_everything_computed_is_float32(tmp_path, bits):
    if not dtypes.as_stored():
        pytest.skip("the kernels are not in use here")
    folder = tiny.write_folder(tmp_path / "m")
    model = tiny.build_model(tiny.config())
    changes = {}
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        changes = {"quantization": {"group_size": 32, "bits": bits}}
    floats = {k: v for k, v in tree_flatten(model.parameters()) if v.dtype != mx.uint32}
    model.load_weights([(k, v.astype(mx.bfloat16)) for k, v in floats.items()], strict=False)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(tiny.config(**changes)))
    loaded = load(folder)
    kept = {k: w for k, w in tree_flatten(loaded.model.parameters()) if w.dtype == mx.bfloat16}
    assert len(kept) > 10
    assert all(k.endswith((".scales", ".biases") if bits else ".weight") for k in kept)
    assert loaded.dtype == "float32"
    logits = loaded.model(mx.array([[1, 2, 3]]))
    assert logits.dtype == mx.float32
    model.update(tree_map(lambda w: w if w.dtype == mx.uint32 else w.astype(mx.float32), model.parameters()))
    assert mx.allclose(logits, model(mx.array([[1, 2, 3]])), rtol=1e-4, atol=1e-4).item()


@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_computed_in_pieces_of_bounded_size(tmp_path, monkeypatch, packed):
    folder = tiny.write_folder(tmp_path / "m")
    model = tiny.build_model(tiny.config())
    changes = {}
    if packed:
        nn.quantize(model, group_size=32, bits=4)
        changes = {"quantization": {"group_size": 32, "bits": 4}}
    weights = dict(tree_flatten(model.parameters()))
    if not packed:
        weights = {k: v.astype(mx.bfloat16) for k, v in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(tiny.config(**changes)))
    del model, weights
    whole = load(folder)
    monkeypatch.setattr(loading, "PIECE_BYTES", 50_000)
    held, loaded = pieces_of(folder)
    largest = max(w.nbytes for w in dtypes.parameters(loaded.model))
    steps = [after - before for before, after in itertools.pairwise(held)]
    assert max(steps) <= 50_000 + 2 * largest, "never more than a piece and the parameter that fills it"
    assert held[-1] >= loaded.weight_bytes - 50_000 - largest, "all but the last piece was computed by then"
    assert len(held) >= loaded.weight_bytes // (50_000 + largest)
    for a, b in zip(dtypes.parameters(loaded.model), dtypes.parameters(whole.model), strict=True):
        assert mx.array_equal(a, b)


class After:
    """An event that is set once it was looked at `count` times."""

    def __init__(self, count):
        self.left = count

    def is_set(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_a_load_that_is_cancelled_on_its_way_leaves_nothing_behind(good, monkeypatch, count):
    from mlxinfer.zoo import CancelledError

    monkeypatch.setattr(loading, "PIECE_BYTES", 1)
    thread = mlx_thread()
    gc.collect()
    before = thread.call(mx.get_active_memory)
    with pytest.raises(CancelledError):
        mlxinfer.load(good, cancel=After(count))
    gc.collect()
    assert thread.call(mx.get_active_memory) == before


def test_ctrl_c_ends_a_load_and_frees_what_was_read(good, monkeypatch):
    thread = mlx_thread()
    gc.collect()
    before = thread.call(mx.get_active_memory)
    real = SlicedJob.result

    jobs = []

    def interrupted(self):
        monkeypatch.setattr(SlicedJob, "result", real)
        jobs.append(self)
        raise KeyboardInterrupt

    go_on = threading.Event()
    thread.post(lambda: go_on.wait(10))
    monkeypatch.setattr(SlicedJob, "result", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            mlxinfer.load(good)
    finally:
        go_on.set()
    with pytest.raises(concurrent.futures.CancelledError):
        jobs.pop().result()
    gc.collect()
    assert thread.call(mx.get_active_memory) == before
    assert mlxinfer.load(good).alive


def test_dtype_of_everything_is_the_setting_where_that_is_half_precision():
    model = tiny.build_model(tiny.config())
    assert dtypes.apply_dtype_policy(model, "float16") == "float16"
    assert {w.dtype for w in dtypes.parameters(model)} == {mx.float16}
    assert type(model.lm_head) is nn.Linear
