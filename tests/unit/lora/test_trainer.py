"""The loop of the trainer on a tiny model."""

from __future__ import annotations

import gc
import json
import os
import signal
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxinfer.errors import InvalidRequestError, TrainingError
from mlxinfer.lora import Callback, TrainConfig, train
from mlxinfer.lora.parallel import digest_of
from mlxinfer.lora.types import Example, Judged, Pair
from tests.unit.lora.rows import Rows, cross_entropy, model, rows


def weights(net: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(net.trainable_parameters())}


def test_a_tiny_model_learns_its_rows() -> None:
    history = train(model(), None, rows(4), None, TrainConfig(updates=40, micro_batch_size=4, learning_rate=1e-2))
    assert len(history.losses) == 40
    assert history.losses[-1] < history.losses[0] - 1.5


@pytest.mark.parametrize("method", ["lora", "rslora", "dora", "full"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon", "sgd"])
def test_each_method_and_optimizer_lowers_the_loss(method: str, optimizer: str) -> None:
    rate = {"adamw": 3e-3, "adafactor": 3e-3, "muon": 1e-2, "sgd": 3e-2}[optimizer]
    config = TrainConfig(
        method=method,  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        updates=12,
        micro_batch_size=4,
        learning_rate=rate,
    )
    losses = train(model(), None, rows(4), None, config).losses
    assert losses[-1] < losses[0] - 0.01


def test_gradients_do_not_depend_on_how_an_update_is_split() -> None:
    found = []
    for size, steps in ((1, 8), (2, 4), (8, 1)):
        # One step of SGD at rate 1 from the same weights: the change is the gradient.
        net = model()
        config = TrainConfig(
            optimizer="sgd", momentum=0.0, learning_rate=1.0, updates=1, micro_batch_size=size,
            grad_accumulation_steps=steps,
        )  # fmt: skip
        train(net, None, rows(8), None, config)
        found.append(weights(net))
    for other in found[1:]:
        assert max(float(np.abs(other[name] - value).max()) for name, value in found[0].items()) <= 1e-6
    assert max(float(np.abs(value).max()) for name, value in found[0].items() if "lora_b" in name) > 1e-3


def test_an_update_is_the_mean_over_supervised_tokens_not_over_rows() -> None:
    data = rows(6)
    history = train(model(), None, data, None, TrainConfig(updates=1, grad_accumulation_steps=6))
    net, total, count = model(), 0.0, 0
    for row in data.items:
        logits = net(mx.array([row.token_ids]))[0]
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for place in range(1, len(row.token_ids)):
            if row.supervised[place]:
                total -= logs[place - 1, row.token_ids[place]].item()
                count += 1
    assert history.losses[0] == pytest.approx(total / count, abs=1e-5)


def test_every_row_is_trained_once_an_epoch_the_remainder_too() -> None:
    seen: list[tuple[int, ...]] = []

    def counting(net: Any, batch: Any) -> Any:
        for row, segment in zip(np.array(batch.inputs), np.array(batch.segments), strict=True):
            seen.extend(tuple(row[segment == number].tolist()) for number in range(1, segment.max() + 1))
        return cross_entropy(net, batch)

    data = rows(7)
    train(
        model(), None, data, None, TrainConfig(epochs=2, micro_batch_size=2, grad_accumulation_steps=2), loss=counting
    )
    assert sorted(seen) == sorted([row.token_ids for row in data.items] * 2)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_checkpointing_gives_the_same_weights_and_is_undone(method: str) -> None:
    found = []
    for recompute in (False, True):
        net = model()
        kinds = [type(block) for block in net.layers]
        config = TrainConfig(method=method, updates=4, grad_checkpointing=recompute)  # type: ignore[arg-type]
        train(net, None, rows(4), None, config)
        assert [type(block) for block in net.layers] == kinds
        found.append(weights(net))
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, atol=1e-6)


def test_five_runs_in_a_process_cost_the_same_forwards_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    block: Any = type(model().layers[0])
    own, calls = block.__call__, []
    monkeypatch.setattr(block, "__call__", lambda self, *args, **kwargs: calls.append(1) or own(self, *args, **kwargs))
    forwards, memory = [], []
    net = model()

    class Count(Callback):
        def on_begin(self, total_updates: int, config: Any) -> None:
            calls.clear()

    for _ in range(5):
        config = TrainConfig(updates=3, grad_checkpointing=True)
        # The first batch tells the model's body from its head, once a run.
        once = train(net, None, rows(2), None, TrainConfig(updates=1, grad_checkpointing=True), callbacks=[Count()])
        assert len(once.losses) == 1
        first = len(calls)
        train(net, None, rows(2), None, config, callbacks=[Count()])
        forwards.append(len(calls) - first)
        gc.collect()
        mx.clear_cache()
        memory.append(mx.get_active_memory())
    assert forwards == [2 * 2 * 2] * 5  # updates, blocks, (forward, again going back)
    assert memory[-1] <= memory[1] + (16 << 10)  # a lost set of adapters would be 28 kB a run


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_nothing_of_an_update_waits_for_the_garbage_collector(packing: Any, loss: Any) -> None:
    held: list[int] = []

    class Watch(Callback):
        def on_record(self, record: Any) -> None:
            held.append(mx.get_active_memory())

    made = rows(8, longest=40).items
    data = Rows([Pair(*pair) for pair in zip(made[::2], made[1::2], strict=True)] if loss == "dpo" else made)
    size = 4 if packing == "on" else 1
    config = TrainConfig(updates=6, loss=loss, packing=packing, micro_batch_size=size, optimizer="sgd", momentum=0.0)
    gc.collect()
    gc.disable()
    try:
        train(model(), None, data, None, config, callbacks=[Watch()])
    finally:
        gc.enable()
    assert len(held) == 6
    # What one update computes takes some 400 kB.
    assert max(held[2:]) - min(held[2:]) < 20_000


def test_a_loss_that_is_no_number_names_update_and_row_and_keeps_the_state(tmp_path: Any) -> None:
    data = rows(4)
    bad = data.items[2].token_ids

    def poisoned(net: Any, batch: Any) -> Any:
        total, count = cross_entropy(net, batch)
        hit = bool((np.array(batch.inputs)[0, : len(bad)] == bad).all()) and calls["update"] >= 1
        return (total * mx.array(float("nan")) if hit else total), count

    calls = {"update": 0}

    class Count(Callback):
        def on_record(self, record: dict[str, Any]) -> None:
            calls["update"] += 1
            calls["digest"] = digest_of(dict(tree_flatten(net.trainable_parameters())))  # type: ignore[assignment]

    net = model()
    config = TrainConfig(updates=5, grad_accumulation_steps=4, packing="off")
    with pytest.raises(TrainingError, match=r"update 2: the loss is nan.*rows\.jsonl:3$"):
        train(net, None, data, None, config, callbacks=[Count()], folder=tmp_path, loss=poisoned)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000001"]
    assert digest_of(dict(tree_flatten(net.trainable_parameters()))) == calls["digest"]


def test_early_stopping_keeps_the_best_adapter(tmp_path: Any) -> None:
    config = TrainConfig(
        updates=60, micro_batch_size=4, learning_rate=5e-2, eval_every=1, patience=3,
    )  # fmt: skip
    history = train(model(), None, rows(4), rows(4, seed=1), config, folder=tmp_path)
    losses = [value for _, value in history.curve("loss", "evaluation")]
    assert history.stopped_early
    assert losses.index(min(losses)) == len(losses) - 4
    assert history.best_loss == min(losses)
    kept = json.loads((tmp_path / "adapter_config.json").read_text())["mlxinfer"]
    assert (kept["updates"], kept["best_update"]) == (len(losses), len(losses) - 3)
    best = mx.load(str(tmp_path / "checkpoints" / "best" / "weights.safetensors"))
    adapter = mx.load(str(tmp_path / "adapters.safetensors"))
    assert digest_of(best) == digest_of(adapter)  # type: ignore[arg-type]


def test_ctrl_c_leaves_a_checkpoint_that_resumes_to_the_same_bits(tmp_path: Any) -> None:
    config = TrainConfig(updates=8, dropout=0.2, grad_accumulation_steps=2)
    whole = train(model(), None, rows(6), None, config, folder=tmp_path / "whole")

    class Press(Callback):
        def on_record(self, record: dict[str, Any]) -> None:
            if record["update"] == 3:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(model(), None, rows(6), None, config, callbacks=[Press()], folder=tmp_path / "cut")
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["update-00000003"]
    resumed = train(model(), None, rows(6), None, config, folder=tmp_path / "cut", resume=True)
    assert resumed.digest == whole.digest
    assert resumed.losses == whole.losses


def test_an_option_or_a_row_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="eval_every has no effect"):
        train(model(), None, rows(2), None, TrainConfig(eval_every=2))
    with pytest.raises(InvalidRequestError, match="no row"):
        train(model(), None, Rows(()), None, TrainConfig())
    with pytest.raises(InvalidRequestError, match="sample_prompts has no effect without a tokenizer"):
        train(model(), None, rows(2), rows(2), TrainConfig(sample_prompts=("Hi",)))
    with pytest.raises(InvalidRequestError, match=r"rows\.jsonl:1: the row has 5 tokens and max_tokens is 4"):
        train(model(), None, rows(1, longest=6), None, TrainConfig(max_tokens=4))


def test_a_model_with_adapters_is_trained_on_with_the_same_options_only() -> None:
    net = model()
    before = train(net, None, rows(4), None, TrainConfig(updates=5, learning_rate=1e-2)).losses
    after = train(net, None, rows(4), None, TrainConfig(updates=5, learning_rate=1e-2)).losses
    assert after[0] < before[0]
    with pytest.raises(InvalidRequestError, match=r"with rank 8 on .*and 4 was asked for"):
        train(net, None, rows(4), None, TrainConfig(updates=1, rank=4, alpha=8.0))
    with pytest.raises(InvalidRequestError, match="with method lora on"):
        train(net, None, rows(4), None, TrainConfig(updates=1, method="dora"))
    with pytest.raises(InvalidRequestError, match=r"with method lora on .*and full was asked for"):
        train(net, None, rows(4), None, TrainConfig(updates=1, method="full"))
    with pytest.raises(InvalidRequestError, match=r"with dropout 0\.0 on .*and 0\.1 was asked for"):
        train(net, None, rows(4), None, TrainConfig(updates=1, dropout=0.1))
    for other in (TrainConfig(updates=1, targets=("q_proj",)), TrainConfig(updates=1, num_layers=1)):
        with pytest.raises(InvalidRequestError, match="targets and num_layers name others: model"):
            train(net, None, rows(4), None, other)
    train(net, None, rows(4), None, TrainConfig(updates=1, targets=("*_proj",), num_layers=2))


def test_packed_rows_train_to_the_same_curve_as_rows_of_their_own() -> None:
    data = rows(8, longest=40)
    found = []
    for packing in ("on", "off"):
        config = TrainConfig(epochs=6, micro_batch_size=8, packing=packing, learning_rate=1e-2, max_tokens=64)  # type: ignore[arg-type]
        history = train(model(), None, data, rows(3, seed=1), config)
        assert history.facts["packed"] == (packing == "on")
        found.append([*history.losses, history.best_loss])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


PREFERENCES = [("dpo", Pair), ("orpo", Pair), ("simpo", Pair), ("kto", Judged)]


@pytest.mark.parametrize(("loss", "kind"), PREFERENCES)
def test_preferences_are_learnt_by_each_loss_packed_or_not(loss: str, kind: Any) -> None:
    good, bad = rows(6).items, rows(6, seed=1).items
    prompt = (7, 8, 9)

    def answer(row: Example) -> Example:
        return Example((*prompt, *row.token_ids), (False,) * 3 + (True,) * len(row.token_ids), row.where)

    pairs = [Pair(answer(a), answer(b)) for a, b in zip(good, bad, strict=True)]
    judged = [Judged(answer(row), wanted) for wanted, side in ((True, good), (False, bad)) for row in side]
    data = Rows(tuple(pairs if kind is Pair else judged))
    config = TrainConfig(loss=loss, updates=20, micro_batch_size=3, learning_rate=1e-2)  # type: ignore[arg-type]
    net = model()
    history = train(net, None, data, data, config)
    assert history.facts["packed"] == (loss != "kto")
    assert history.losses[-1] < history.losses[0] - 0.03
    if loss == "dpo":
        assert history.losses[0] == pytest.approx(np.log(2), abs=1e-6)
    with pytest.raises(InvalidRequestError, match=f"and {loss} reads"):
        train(model(), None, rows(4), None, config)


def test_a_student_comes_near_its_teacher() -> None:
    teacher = model()
    train(teacher, None, rows(4), None, TrainConfig(updates=20, learning_rate=1e-2))
    config = TrainConfig(loss="distill", updates=30, micro_batch_size=4, learning_rate=1e-2)
    losses = train(model(), None, rows(4), None, config, teacher=teacher).losses
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(InvalidRequestError, match="distill needs a teacher"):
        train(model(), None, rows(4), None, config)
    with pytest.raises(InvalidRequestError, match="a teacher has no effect with loss sft"):
        train(model(), None, rows(4), None, TrainConfig(), teacher=teacher)


def test_a_perplexity_beyond_numbers_is_null_in_the_log(tmp_path: Any) -> None:
    def huge(net: Any, batch: Any) -> Any:
        total, count = cross_entropy(net, batch)
        return total + 1e4 * count, count

    train(model(), None, rows(2), rows(2), TrainConfig(updates=1, packing="off"), folder=tmp_path, loss=huge)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["perplexity"] for line in lines if line["kind"] == "evaluation"] == [None]


def test_ctrl_c_in_an_evaluation_ends_it_with_a_checkpoint(tmp_path: Any) -> None:
    def pressing(net: Any, batch: Any) -> Any:
        if not net.training:
            os.kill(os.getpid(), signal.SIGINT)
        return cross_entropy(net, batch)

    with pytest.raises(KeyboardInterrupt):
        train(
            model(), None, rows(4), rows(4), TrainConfig(updates=4, eval_every=2, packing="off"), folder=tmp_path,
            loss=pressing,
        )  # fmt: skip
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000002"]


def test_a_history_shows_itself_and_lets_no_markup_in(tmp_path: Any) -> None:
    history = train(model(), None, rows(2), rows(2), TrainConfig(updates=3), folder=tmp_path / "<b>run")
    history.records.append({"kind": "sample", "update": 3, "prompt": "<script>", "text": "</p>"})
    shown = history._repr_html_()
    assert shown.count("<svg") == 4
    assert shown.count("</span>") == 2  # the legend: updates and evaluations
    assert " GB</text>" in shown
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
    page = (tmp_path / "<b>run" / "report.html").read_text()
    assert "<h1>Training of &lt;b&gt;run</h1>" in page
    figure = history.plot(tmp_path / "curves.png")
    assert len(figure.axes) == 4
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
