"""`mlxinfer convert` as a process: killed, interrupted, twice at once, on a full disk, and what it makes is run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest

from mlxinfer.convert.places import work_folder
from mlxinfer.engine.loading import load_model
from tests.load.convert_kills import campaign
from tests.tiny import write_folder
from tests.unit.convert.fake import folder_bytes

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 50 MB, so that a conversion takes a moment."""
    return write_folder(
        tmp_path_factory.mktemp("models") / "tiny", hidden_size=512, intermediate_size=2048, head_dim=128
    )


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mlxinfer", "convert", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)


def test_kills_at_random_moments_leave_all_or_nothing_and_a_rerun_gives_the_same_bytes(tmp_path: Path) -> None:
    tally = campaign(KILLS, seed=7, folder=tmp_path)
    assert tally.unfinished >= KILLS // 4, "the kills come too late to show anything"
    assert tally.resumed >= 1


def test_what_it_makes_loads_in_the_engine(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "out", "--bits", "4", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["dtype"] == "float32"
    loaded = load_model("folder", tmp_path / "out")
    assert loaded.quantization == "affine 4-bit, group 64"
    forward = loaded.model
    assert mx.all(mx.isfinite(forward(mx.array([[1, 2, 3]])))).item()  # pyright: ignore


def started(*arguments: object, folder: Path) -> subprocess.Popen[str]:
    """A conversion that has begun to write."""
    child = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    shards = work_folder(folder)
    deadline = time.monotonic() + 60
    while not any(shards.glob("*.safetensors")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return child


def test_ctrl_c_says_where_the_rest_is_and_the_same_command_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = started(model, out, "--bits", "4", folder=out)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130, said
    assert str(work_folder(out)) in said
    assert not out.exists()
    assert run(model, out, "--bits", "4").returncode == 0
    assert run(model, tmp_path / "whole", "--bits", "4").returncode == 0
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")


def test_a_second_conversion_into_the_same_place_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = started(model, out, "--bits", "4", folder=out)
    os.kill(child.pid, signal.SIGSTOP)
    second = run(model, out, "--bits", "4", "--json")
    os.kill(child.pid, signal.SIGCONT)
    assert json.loads(second.stdout)["error"]["code"] == "conversion_failed"
    assert "another conversion is writing" in second.stdout
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert (out / "config.json").is_file()


def test_a_full_disk_is_one_line_and_the_destination_is_absent(model: Path, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    result = subprocess.run(
        command(model, tmp_path / "out"), capture_output=True, text=True, preexec_fn=small_files, check=False
    )
    assert result.returncode == 1
    assert "Error: the disk of" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    assert run(model, tmp_path / "out").returncode == 0
