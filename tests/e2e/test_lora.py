"""`mlxinfer lora` as users run it: a process each, on a tiny model's folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from tests import tiny
from tests.e2e.test_cluster_serve import cluster, free_port

if TYPE_CHECKING:
    from pathlib import Path

LORA = [sys.executable, "-m", "mlxinfer", "lora"]
ROW = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    tiny.write_folder(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"text": f"{'the quick brown fox ' * (1 + n % 4)}{n}"} for n in range(12)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(*args: object, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*LORA, *map(str, args)], **(pipes | options))


def run(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LORA, *map(str, args)], capture_output=True, text=True, timeout=120, **options)


def said(*args: object) -> dict[str, Any]:
    done = run(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_flags_a_toml_and_a_yaml_file_make_the_same_weights(model: Path, data: Path, tmp_path: Path) -> None:
    same = {"updates": 3, "rank": 4, "micro_batch_size": 4, "learning_rate": 1e-3, "targets": ["q_proj", "v_proj"]}
    flags = ["--updates", 3, "--rank", 4, "--micro-batch-size", 4, "--learning-rate", 1e-3]
    flags += ["--targets", "q_proj", "--targets", "v_proj"]
    found = [said("train", model, "--data", data, "--output", tmp_path / "flags", *flags)]
    whole = same | {"model": str(model), "data": str(data)}
    (tmp_path / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in whole.items()))
    (tmp_path / "run.yaml").write_text(json.dumps(whole))
    for name in ("run.toml", "run.yaml"):
        found.append(said("train", "--config", tmp_path / name, "--output", tmp_path / name[4:]))
    assert len({one["digest"] for one in found}) == 1
    adapter = json.loads((tmp_path / "flags" / "adapter_config.json").read_text())
    assert adapter["lora_parameters"]["rank"] == 4
    assert all(key.endswith(("q_proj", "v_proj")) for key in adapter["lora_parameters"]["keys"])


def test_an_interrupted_run_resumes_to_the_bits_of_a_whole_one(model: Path, data: Path, tmp_path: Path) -> None:
    flags = ["--updates", 40, "--dropout", 0.1, "--data", data, "--save-every", 5]
    whole = said("train", model, *flags, "--output", tmp_path / "whole")
    process = start("train", model, *flags, "--output", tmp_path / "cut")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Saved"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert f"{tmp_path / 'cut'} holds a checkpoint; the same command with --resume goes on" in err
    again = run("train", model, *flags, "--output", tmp_path / "cut")
    assert again.returncode == 2
    assert "resume it, or use another folder" in again.stderr
    resumed = said("train", model, *flags, "--output", tmp_path / "cut", "--resume")
    assert resumed["digest"] == whole["digest"]
    log = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert [record["update"] for record in log] == list(range(1, 41))


def test_what_was_learnt_shows_in_eval_and_in_what_the_model_writes(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "valid", "test"):
        (data / f"{split}.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    trained = said(
        "train", model, "--data", data, "--output", tmp_path / "a", "--updates", 60, "--learning-rate", 0.01,
        "--micro-batch-size", 4, "--eval-every", 30, "--sample-prompts", "the",
    )  # fmt: skip
    assert trained["rows"] == [{"rows": 4, "trained": 4, "truncated": 0, "dropped": 0}] * 2
    found = said("eval", model, "--data", data, "--adapter", tmp_path / "a")
    assert found["adapter"]["loss"] < 0.1 < found["base"]["loss"]
    assert found["adapter"]["loss"] == pytest.approx(trained["best_loss"], abs=1e-4)
    command = [sys.executable, "-m", "mlxinfer", "run", str(model), "the cat", "--adapter", str(tmp_path / "a")]
    done = subprocess.run([*command, "--temperature", "0"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "sat on the mat"
    kinds = {json.loads(line)["kind"] for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()}
    assert kinds == {"update", "evaluation", "sample"}
    assert "<svg" in (tmp_path / "a" / "report.html").read_text()
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| rows | 4 |" in card
    assert str(model) not in card
    assert f"{trained['best_loss']:.4f} after update 60" in card


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a b"}\n{"text": \n', "bad.jsonl:2"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "reads rows to imitate"),
    ],
)
def test_rows_that_cannot_be_used_end_the_run_before_anything_is_written(
    text: str, message: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    done = run("train", model, "--data", tmp_path / "bad.jsonl", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_ranks_that_a_launcher_starts_train_one_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    (tmp_path / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]))
    for one in sockets:
        one.close()
    flags = ["train", model, "--data", data, "--epochs", 2, "--optimizer", "sgd", "--learning-rate", 0.1]
    ranks = [
        start(
            *flags, "--micro-batch-size", 2, "--output", tmp_path / "ring", "--json",
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(tmp_path / "hosts.json")},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ended = [one.communicate(timeout=120) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert [one.returncode for one in ranks] == [0, 0], ended
    assert ended[1] == ("", "")
    ring = json.loads(ended[0][0])
    alone = said(*flags, "--micro-batch-size", 4, "--output", tmp_path / "alone")
    assert ring["updates"] == alone["updates"] == 6
    assert ring["loss"] == pytest.approx(alone["loss"], abs=1e-5)


def test_the_machines_of_a_cluster_file_train_one_adapter(model: Path, data: Path, tmp_path: Path) -> None:
    file, _ = cluster(tmp_path)
    flags = ["--data", data, "--epochs", 1, "--optimizer", "sgd", "--learning-rate", 0.1]
    where = ["--cluster", file, "--port", free_port() % 30000 + 30000, "-m", "mlxinfer", "lora", "train", model, *flags]
    done = subprocess.run(
        [*LORA[:-1], "cluster", "run", *map(str, where), "--micro-batch-size", "2", "--output", str(tmp_path / "ring")],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    alone = said("train", model, *flags, "--micro-batch-size", 4, "--output", tmp_path / "alone")
    weights = [mx.load(str(tmp_path / name / "adapters.safetensors")) for name in ("ring", "alone")]
    assert alone["updates"] == 3
    for name, one in weights[1].items():  # pyright: ignore[reportAttributeAccessIssue]
        assert mx.allclose(weights[0][name], one, rtol=1e-4, atol=1e-6), name  # pyright: ignore[reportArgumentType]
