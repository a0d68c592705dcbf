"""Kill conversions at random moments, run them again, and compare every byte.

python -m tests.load.convert_kills --times 200
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxinfer.convert import writing
from mlxinfer.convert.job import ConvertOptions, convert
from mlxinfer.convert.places import work_folder
from mlxinfer.convert.sources.base import Packing
from tests.unit.convert.fake import FakeSource, fake_source, folder_bytes, moe_config

OPTIONS = ConvertOptions(packing=Packing(4, 64), max_shard_bytes=600_000)


@dataclass
class Tally:
    """What the kills met."""

    unfinished: int = 0
    """Kills after which the destination was absent."""
    resumed: int = 0
    """Of those, where part of the weights was kept."""
    finished: int = 0
    """Kills that came after the last rename."""


def source() -> FakeSource:
    """Some 8 MB, the same in every process."""
    config = moe_config(hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=3)
    made = fake_source(config)
    made.extras = {"tokenizer.json": b"{}" * 50_000}
    return made


def work(destination: Path) -> None:
    """The process that is killed. It waits for a line, so that its start takes no part in the timing."""
    writing.SYNC_BYTES = 100_000
    made = source()
    print("ready", flush=True)
    sys.stdin.readline()
    convert(made, destination, OPTIONS)
    print("done", flush=True)


def campaign(times: int, seed: int, folder: Path, say: Any = lambda text: None) -> Tally:
    """Kill `times` conversions. Raises AssertionError when one leaves half a folder or comes out differently."""
    writing.SYNC_BYTES = 100_000
    convert(source(), folder / "whole", OPTIONS)
    whole = folder_bytes(folder / "whole")
    span = min(_time_of_one(folder / "timed") for _ in range(3))
    rng, tally = random.Random(seed), Tally()
    made = source()
    for number in range(times):
        out = folder / f"out{number}"
        moment = rng.uniform(0, span)
        _kill_one(out, moment)
        if out.exists():
            tally.finished += 1
            assert folder_bytes(out) == whole, f"seed {seed}, kill {number}: the destination is not whole"
        else:
            state = writing._read_state(work_folder(out)) if work_folder(out).is_dir() else None
            tally.unfinished += 1
            tally.resumed += bool(state and state["done"])
            convert(made, out, OPTIONS)
            assert folder_bytes(out) == whole, f"seed {seed}, kill {number} after {moment:.3f} s: other bytes"
        left = [path.name for path in folder.iterdir() if path.name not in (out.name, "whole")]
        assert left == [], f"seed {seed}, kill {number}: {left} are left behind"
        shutil.rmtree(out)
        say(f"{number + 1}/{times}: {tally}")
    return tally


def _started(out: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.load.convert_kills", "--work", str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.flush()
    return child


def _time_of_one(out: Path) -> float:
    """Seconds that a conversion takes in a process of its own."""
    with _started(out) as child:
        began = time.monotonic()
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        span = time.monotonic() - began
    shutil.rmtree(out)
    return span


def _kill_one(out: Path, moment: float) -> None:
    with _started(out) as child:
        time.sleep(moment)
        child.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked.work)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(campaign(asked.times, asked.seed, Path(folder), say=print))


if __name__ == "__main__":
    main()
