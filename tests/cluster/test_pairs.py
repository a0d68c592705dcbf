"""What pairs of a ring say to each other, whatever its size: four real ranks, two and two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from mlxinfer.distributed.ranks import Here

if TYPE_CHECKING:
    from pathlib import Path

RANK = """
import mlx.core as mx
from mlxinfer.distributed.groups import AT_ONCE, Pair

group = mx.distributed.init(strict=True, backend="ring")
pair = Pair(group)
stage, own = group.rank() // 2, group.rank() % 2
assert (pair.rank(), pair.size()) == (own, 2)
for numbers in (1, AT_ONCE // 4, AT_ONCE // 4 + 1, 24 << 20, 3):
    x = mx.full((numbers,), 1.0 + group.rank())
    summed, both = pair.all_sum(x), pair.all_gather(x[None])
    assert mx.all(summed == 4.0 * stage + 3.0).item()
    assert both.shape == (2, numbers)
    assert both[:, 0].tolist() == [2.0 * stage + 1.0, 2.0 * stage + 2.0]
    # The second stage hands over what it made of both, and the first goes on with it.
    given = pair.give(summed) if stage else pair.take(x.shape, x.dtype)
    after = pair.all_sum(given * (1 + own))
    assert mx.all(after == 3 * 7.0).item()
"""


def test_sums_and_hand_overs_of_one_number_and_of_a_hundred_megabytes_arrive(tmp_path: Path) -> None:
    ports = [Here().free_port() for _ in range(4)]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env=os.environ | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
        )
        for rank in range(4)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
