"""Data-parallel training on a real ring over loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.lora import TrainConfig, train
from mlxinfer.lora.batches import JudgedBatches, UnitBatches
from mlxinfer.lora.types import Example, Judged
from tests.unit.lora.rows import model, rows
from tests.unit.lora.test_trainer import weights

if TYPE_CHECKING:
    from pathlib import Path


def run_ring(folder: Path, ranks: int, size: int, steps: int) -> list[dict[str, object]]:
    """One process a rank, joined by a host file, as mlx.launch starts them."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    for one in sockets:
        one.close()
    (folder / "hosts.json").write_text(json.dumps(hosts))
    command = [sys.executable, "-m", "tests.unit.lora.ring", str(folder), str(size), str(steps)]
    started = [
        subprocess.Popen(command, env=os.environ | {"MLX_RANK": str(r), "MLX_HOSTFILE": str(folder / "hosts.json")})
        for r in range(ranks)
    ]
    try:
        assert [one.wait(120) for one in started] == [0] * ranks
    finally:
        for one in started:
            one.kill()
            one.wait()
    return [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size", "steps"), [(2, 1, 4), (2, 4, 1), (4, 1, 2), (4, 2, 1)])
def test_a_ring_has_the_gradients_of_one_rank_and_trains_each_row_once(
    tmp_path: Path, ranks: int, size: int, steps: int
) -> None:
    alone = model()
    config = TrainConfig(optimizer="sgd", momentum=0.0, learning_rate=1.0, updates=1, micro_batch_size=8)
    train(alone, None, rows(8), None, config)
    found = run_ring(tmp_path, ranks, size, steps)
    for rank, one in enumerate(found):
        assert one["size"] == ranks
        other = np.load(tmp_path / f"weights-{rank}.npz")
        assert max(float(np.abs(other[name] - value).max()) for name, value in weights(alone).items()) <= 1e-6
        assert one["digest"] == found[0]["digest"]
        assert one["differ"] == "update 7: the weights of ranks [1] differ from those of rank 0"
    seen = Counter(tuple(row) for one in found for row in one["seen"])  # type: ignore[union-attr]
    wanted = Counter(row.token_ids for row in rows(11).items for _ in range(2))
    wanted.update(row.token_ids for row in rows(5).items)  # the evaluation at the end
    assert seen == wanted


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_out_each_update_without_overlap_or_gap(packed: bool, size: int) -> None:
    units = [(row,) for row in rows(23).items]
    batches = UnitBatches(units, micro_batch_size=2, steps=3, seed=5, max_tokens=64, packed=packed)
    plans = [batches.plan(1, rank, size) for rank in range(size)]
    assert len({len(plan) for plan in plans}) == 1
    updates = [[micro for plan in plans for micro in plan[at]] for at in range(len(plans[0]))]
    members = [sorted(unit for micro in update for row in micro for unit in row) for update in updates]
    assert sorted(unit for update in members for unit in update) == list(range(23))
    assert [len(update) for update in members[:-1]] == [6 * size] * (len(members) - 1)
    if packed and size > 1:
        work = [sum(len(units[u][0].token_ids) for micro in plan[0] for row in micro for u in row) for plan in plans]
        assert max(work) <= 2 * min(work)


@given(st.integers(2, 40_000), st.integers(0, 100), st.booleans())
def test_a_batch_is_hardly_wider_than_its_rows_and_has_one_of_few_widths(limit: int, seed: int, packed: bool) -> None:
    lengths = np.random.default_rng(seed).integers(2, limit + 1, 6).tolist()
    units = [(Example((1,) * length, (False,) + (True,) * (length - 1), "r"),) for length in lengths]
    batches = UnitBatches(units, micro_batch_size=2, steps=1, seed=seed, max_tokens=limit, packed=packed)
    widest = min(limit, sum(lengths)) if packed else max(lengths)
    step = 32 * -(-widest // 2048)
    for update in batches.plan(0, 0, 1):
        for micro in update:
            width = batches.batch(micro).inputs.shape[1]
            longest = max(sum(lengths[unit] for unit in row) for row in micro)
            assert longest <= width < longest + step
            assert width % step == 0
    assert -(-widest // step) <= 64


def test_judged_rows_keep_their_labels_and_one_alone_borrows_the_next_ones_answer() -> None:
    made = [
        Judged(Example((number, 10 + number, 20 + number), (False, False, True), f"r:{number}"), wanted=number != 1)
        for number in range(3)
    ]
    batches = JudgedBatches(made, micro_batch_size=2, steps=1, seed=0, max_tokens=8)
    held = batches.batch(((2,), (1,), (0,)))
    assert held.wanted is not None
    assert held.wanted.tolist() == [True, False, True]
    assert np.array(held.inputs)[:, 0].tolist() == [2, 1, 0]
    for number, answer in ((0, 21), (1, 22), (2, 20)):
        alone = batches.batch(((number,),)).mismatched
        assert alone is not None
        assert np.array(alone.inputs)[0, :3].tolist() == [number, 10 + number, answer]


@pytest.mark.parametrize("packed", [True, False])
def test_another_epoch_has_another_order(packed: bool) -> None:
    units = [(Example((1,) * 8, (False,) + (True,) * 7, "r"),) for _ in range(12)]
    batches = UnitBatches(units, micro_batch_size=2, steps=1, seed=5, max_tokens=64, packed=packed)
    first, again, second = (batches.plan(epoch, 0, 1) for epoch in (0, 0, 1))
    assert first == again != second
