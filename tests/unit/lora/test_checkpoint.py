"""Checkpoints that a crash or a full disk cannot harm."""

from __future__ import annotations

import resource
import signal
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.errors import InvalidRequestError, ModelFileError, TrainingError
from mlxinfer.lora import Callback, TrainConfig, checkpoint, train
from tests.load.lora_kills import kills
from tests.unit.lora.rows import model, rows

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_bits_of_a_whole_one() -> None:
    assert kills(5)[0] == 5


def test_a_full_disk_at_a_checkpoint_keeps_the_one_before(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: writes fail half way, in mlx's own code."""
    config = TrainConfig(updates=4, save_every=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    class Fill(Callback):
        def on_checkpoint(self, path: Path) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))

    try:
        with pytest.raises(TrainingError, match="update-00000002: cannot be written"):
            train(model(), None, rows(6), None, config, callbacks=[Fill()], folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000001"]
    whole = train(model(), None, rows(6), None, config, folder=tmp_path.with_name("whole"))
    assert train(model(), None, rows(6), None, config, folder=tmp_path, resume=True).digest == whole.digest


def test_a_folder_moved_aside_by_a_process_that_died_is_put_back(tmp_path: Path) -> None:
    (tmp_path / ".old-best").mkdir()
    checkpoint.mend(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_checkpoint_of_other_rows_or_options_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(updates=2)
    train(model(), None, rows(4), None, config, folder=tmp_path)
    with pytest.raises(InvalidRequestError, match="holds the checkpoints of a run"):
        train(model(), None, rows(4), None, config, folder=tmp_path)
    changed: list[tuple[Any, TrainConfig]] = [
        (rows(5), config),
        (rows(4), TrainConfig(updates=2, learning_rate=1e-3)),
    ]
    for data, other in changed:
        with pytest.raises(ModelFileError, match="other options, rows or base"):
            train(model(), None, data, None, other, folder=tmp_path, resume=True)
