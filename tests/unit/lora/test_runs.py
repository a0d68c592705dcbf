"""The folder of a run: nothing in it is written over, no two runs share it, and what breaks off is gone on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxinfer.errors import InvalidRequestError, ModelFileError, TrainingError
from mlxinfer.lora import Callback, TrainConfig, checkpoint, result, runs, train
from mlxinfer.lora.callbacks import JsonLog, read_log
from mlxinfer.lora.job import fine_tune
from tests import tiny
from tests.unit.lora.rows import cross_entropy, model, rows


def run(
    folder: Path | None, net: Any = None, valid: Any = None, callbacks: Any = (), loss: Any = None, **how: Any
) -> Any:
    resume, teacher = how.pop("resume", False), how.pop("teacher", None)
    config = TrainConfig(**how)
    return train(
        net or model(), None, rows(6), valid, config, callbacks=callbacks, folder=folder, resume=resume, loss=loss,
        teacher=teacher,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["README.md", "adapters.safetensors", "adapter_config.json", "report.html", "log.jsonl"]
)
def test_a_folder_with_files_that_would_be_lost_is_refused_before_the_weights_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_folder(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n')
    (tmp_path / name).write_text("mine")
    monkeypatch.setattr("mlxinfer.lora.base.Base.load", lambda *_, **__: pytest.fail("the weights were loaded"))
    with pytest.raises(InvalidRequestError, match=f"holds {name}"):
        fine_tune(model=str(tmp_path / "base"), data=str(tmp_path / "rows.jsonl"), output=str(tmp_path))
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["file", "file/below", "n" * 5000, "nul\0", "/proc/none/there"])
def test_a_folder_that_cannot_be_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="no folder can be made there"):
        run(tmp_path / name, updates=1)


def test_a_run_that_never_begins_leaves_no_folder(tmp_path: Path) -> None:
    runs.check_folder(tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    runs.check_folder(tmp_path / "old", resume=False)
    assert (tmp_path / "old").exists()


def test_two_runs_at_once_in_a_folder_are_one_too_many(tmp_path: Path) -> None:
    class Second(Callback):
        def on_record(self, record: dict[str, Any]) -> None:
            with pytest.raises(InvalidRequestError, match="another run is at work there"):
                run(tmp_path, updates=1, resume=True)

    run(tmp_path, updates=2, callbacks=[Second()])
    with runs.alone(tmp_path):
        pass


def test_another_base_or_teacher_is_another_run(tmp_path: Path) -> None:
    run(tmp_path, updates=1)
    with pytest.raises(ModelFileError, match="of a run with other options, rows or base"):
        run(tmp_path, tiny.build_model(tiny.config(num_hidden_layers=2), seed=1, scale=1.0), updates=1, resume=True)
    taught = tmp_path / "taught"
    train(model(), None, rows(4), None, TrainConfig(updates=1, loss="distill"), folder=taught, teacher=model())
    other = tiny.build_model(tiny.config(num_hidden_layers=2), seed=1, scale=1.0)
    with pytest.raises(ModelFileError, match="of a run with other options"):
        train(
            model(),
            None,
            rows(4),
            None,
            TrainConfig(updates=1, loss="distill"),
            folder=taught,
            teacher=other,
            resume=True,
        )


def test_a_whole_number_is_the_option_that_its_float_is(tmp_path: Path) -> None:
    run(tmp_path, updates=1, alpha=16)
    assert run(tmp_path, updates=2, alpha=16.0, resume=True).records[-1]["update"] == 2


class Interrupted(Callback):
    """Ctrl-C in an evaluation."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def loss(self, model: Any, batch: Any) -> Any:
        if not model.training:
            self.calls -= 1
            if self.calls == 0:
                raise KeyboardInterrupt
        return cross_entropy(model, batch)


@pytest.mark.parametrize("calls", [1, 3])
def test_an_evaluation_that_was_broken_off_is_made_when_the_run_goes_on(calls: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"valid": rows(2, seed=1), "updates": 4, "eval_every": 2, "packing": "off"}
    whole = run(tmp_path / "whole", loss=cross_entropy, **how)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", loss=Interrupted(calls).loss, **how)
    resumed = run(tmp_path / "cut", loss=cross_entropy, resume=True, **how)
    assert resumed.curve("loss", "evaluation") == whole.curve("loss", "evaluation")
    assert len(whole.curve("loss", "evaluation")) == 2
    told = [json.loads((tmp_path / name / "adapter_config.json").read_text())["mlxinfer"] for name in ("whole", "cut")]
    assert told[0] == told[1]


def test_a_run_that_stopped_early_stays_where_it_stopped(tmp_path: Path) -> None:
    how: dict[str, Any] = {"valid": rows(4, seed=1), "updates": 60, "micro_batch_size": 4, "learning_rate": 5e-2}
    how |= {"eval_every": 1, "patience": 3}
    first = run(tmp_path, **how)
    again = run(tmp_path, resume=True, **how)
    assert first.stopped_early
    assert again.stopped_early
    assert again.digest == first.digest
    assert again.losses == first.losses


@pytest.mark.parametrize("where", ["evaluation", "callback", "gradient"])
def test_whatever_fails_leaves_a_checkpoint_of_the_last_update(where: str, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_record(self, record: dict[str, Any]) -> None:
            if where == "callback" and record["update"] == 2:
                raise OSError("the network is gone")

    seen = [0]

    def loss(model: Any, batch: Any) -> Any:
        total, count = cross_entropy(model, batch)
        if where == "evaluation" and not model.training:
            return total * float("nan"), count
        seen[0] += model.training
        if where == "gradient" and seen[0] == 3:
            raise RuntimeError("no memory")
        return total, count

    how: dict[str, Any] = {"valid": rows(2, seed=1), "eval_every": 2, "updates": 4, "packing": "off"}
    with pytest.raises((TrainingError, OSError, RuntimeError)):
        run(tmp_path, callbacks=[Fails()], loss=loss, **how)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")][-1] == "update-00000002"
    resumed = run(tmp_path, loss=cross_entropy, resume=True, **how)
    assert resumed.digest == run(tmp_path / "whole", loss=cross_entropy, **how).digest


def test_a_disk_that_fills_while_the_result_is_written_keeps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    net = model()
    with monkeypatch.context() as patch:
        patch.setattr(result, "replace_file", full)
        with pytest.raises(TrainingError, match=r"the result cannot be written.*resume the run"):
            run(tmp_path, net, valid=rows(2, seed=1), updates=3, eval_every=1, learning_rate=0.5)
    last = mx.load(str(tmp_path / "checkpoints" / "update-00000003" / "weights.safetensors"))
    held: dict[str, Any] = dict(tree_flatten(net.trainable_parameters()))
    assert all(mx.array_equal(held[name], value).item() for name, value in last.items())  # type: ignore[union-attr]
    run(tmp_path, valid=rows(2, seed=1), updates=3, eval_every=1, learning_rate=0.5, resume=True)
    assert (tmp_path / "README.md").exists()


def test_a_log_on_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "log.jsonl", 0)
    log._file.close()
    with (
        Path("/dev/full").open("ab", buffering=0) as log._file,
        pytest.raises(TrainingError, match=r"log\.jsonl: the log cannot be written: .*resume"),
    ):
        log.on_record({"kind": "update", "update": 1, "loss": 1.0})
    log.on_end()


def test_a_log_keeps_what_separates_lines_elsewhere_and_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLog(path, 0)
    log.on_record({"kind": "sample", "update": 1, "text": "a\u2028b\x85c\ud800"})
    log.on_end()
    with path.open("a") as file:
        file.write('{"update": 1}\n{"kind": "update", "upd')
    JsonLog(path, 1).on_end()
    assert [record["text"] for record in read_log(path)] == ["a\u2028b\x85c\ud800"]


def test_a_best_folder_that_is_not_the_best_update_is_not_called_so(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "valid": rows(4, seed=1),
        "updates": 8,
        "learning_rate": 0.3,
        "eval_every": 1,
        "save_every": 1,
    }
    first = run(tmp_path, keep_checkpoints=9, **how)
    told = json.loads((tmp_path / "adapter_config.json").read_text())["mlxinfer"]
    assert told["best_update"] < told["updates"] == 8
    assert "held-out loss" in (tmp_path / "README.md").read_text()
    shutil.rmtree(tmp_path / "checkpoints" / "best")
    shutil.copytree(tmp_path / "checkpoints" / "update-00000007", tmp_path / "checkpoints" / "best")
    run(tmp_path, resume=True, keep_checkpoints=9, **how)
    told = json.loads((tmp_path / "adapter_config.json").read_text())["mlxinfer"]
    assert told["best_update"] is None
    assert "held-out loss" not in (tmp_path / "README.md").read_text()
    last = mx.load(str(tmp_path / "adapters.safetensors"))
    assert isinstance(last, dict)
    wanted = mx.load(str(tmp_path / "checkpoints" / "update-00000008" / "weights.safetensors"))
    assert all(mx.array_equal(last[name], value).item() for name, value in wanted.items())  # type: ignore[union-attr]
    assert first.best_loss is not None


def test_a_process_killed_between_the_best_checkpoint_and_the_last_goes_on_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"valid": rows(4, seed=1), "updates": 4, "learning_rate": 1e-2, "eval_every": 2}
    run(tmp_path / "whole", **how)
    write, calls = checkpoint.write_folder, [0]

    def killed(folder: Path, fill: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        write(folder, fill)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", **how)
    run(tmp_path / "cut", resume=True, **how)
    for name in ("adapters.safetensors", "adapter_config.json", "README.md"):
        wanted = (tmp_path / "whole" / name).read_bytes().replace(b"# whole", b"# cut")
        assert (tmp_path / "cut" / name).read_bytes() == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [("update", "2"), ("epoch", -1), ("position", True), ("best_loss", "1"), ("tokens", None), ("evaluated", 1.5)],
)
def test_a_checkpoint_whose_state_cannot_be_is_refused(name: str, value: object, tmp_path: Path) -> None:
    run(tmp_path, updates=1)
    path = tmp_path / "checkpoints" / "update-00000001" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ModelFileError, match=f"state.json: {name} is .*damaged"):
        run(tmp_path, updates=2, resume=True)


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_moments_that_are_not_the_optimizers_are_refused_and_the_model_stays(change: str, tmp_path: Path) -> None:
    run(tmp_path, updates=1, learning_rate=0.1)
    path = tmp_path / "checkpoints" / "update-00000001" / "optimizer.safetensors"
    held: Any = mx.load(str(path))
    held = {key: mx.array(np.array(value)) for key, value in held.items()}
    name = next(key for key in held if key.endswith(".m"))
    if change == "missing":
        del held[name]
    elif change == "extra":
        held["more"] = held[name]
    else:
        held[name] = mx.array(0.0) if change == "shape" else held[name].astype(mx.float16)
    mx.save_safetensors(str(path), held)
    net = model()
    with pytest.raises(ModelFileError, match=f"another optimizer or model: {'more' if change == 'extra' else name}"):
        run(tmp_path, net, updates=2, learning_rate=0.1, resume=True)
    held_now: dict[str, Any] = dict(tree_flatten(net.parameters()))
    assert not any(value.any().item() for key, value in held_now.items() if key.endswith("lora_b"))


def test_every_checkpoint_that_was_moved_aside_is_put_back(tmp_path: Path) -> None:
    for name in (".old-best", ".old-update-00000003"):
        (tmp_path / name).mkdir()
    checkpoint.mend_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "update-00000003"]


def test_keep_checkpoints_without_a_folder_is_without_effect() -> None:
    with pytest.raises(InvalidRequestError, match="keep_checkpoints has no effect without a folder"):
        run(None, updates=1, keep_checkpoints=3)


def test_with_other_held_out_rows_the_best_of_the_old_ones_is_forgotten(tmp_path: Path) -> None:
    how: dict[str, Any] = {"updates": 2, "eval_every": 1, "save_every": 1}
    first = run(tmp_path, valid=rows(2, seed=1), **how)
    same = run(tmp_path, valid=rows(2, seed=1), resume=True, **how)
    assert same.curve("loss", "evaluation") == first.curve("loss", "evaluation")
    other = run(tmp_path, valid=rows(2, seed=2), resume=True, **how)
    new = run(tmp_path / "new", valid=rows(2, seed=2), **how)
    assert other.curve("loss", "evaluation")[-1] == new.curve("loss", "evaluation")[-1]
    assert other.best_loss == other.curve("loss", "evaluation")[-1][1]
    assert f"{other.best_loss:.4f} after update 2" in (tmp_path / "README.md").read_text()
