"""Adapters of a model over ranks: the same tokens as in one process, adapters in turns, and after a rank was killed."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.distributed import adapter_parts, shards
from mlxinfer.engine.adapter_files import read_adapter
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import UnsupportedModelError
from tests.adapters import write_adapter
from tests.cluster.architectures import write
from tests.cluster.test_prefixes import ROOM, check_in_step, text
from tests.clusters import Lent, answers, engine_here, parts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlxinfer.engine.adapter_files import AdapterFiles
    from mlxinfer.engine.engine import Engine

CASES: dict[str, tuple[str, str, int, tuple[int, ...], str]] = {
    # Every place that mlx-lm adapts by default: attention, MLP, experts and their router, the embedding.
    "heads": ("llama", "tensor", 2, (), "lora"),
    "layers": ("qwen3_moe", "pipeline", 3, (1, 2, 1), "lora"),
    "experts": ("qwen3_moe", "tensor", 2, (), "lora"),
    # Weights of several parts, each shared out, and recurrent states.
    "segments": ("qwen3_5", "tensor", 2, (), "lora"),
    "dora": ("qwen3_moe", "pipeline", 2, (3, 1), "dora"),
    "pairs": ("qwen3_5", "both", 4, (3, 1), "lora"),
}
MORE = {"layers", "experts"}
"""Beyond CI's slice."""
KILLED = {"dora", "pairs"}
"""Where a rank is killed at the end."""
ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")


def on_thread(function: Any, *arguments: Any, **named: Any) -> Any:
    return mlx_thread().call(functools.partial(function, *arguments, **named))


def bring(config: Mapping[str, Any], target: Path, parts: Sequence[shards.Part], files: AdapterFiles) -> list[str]:
    return [str(adapter_parts.cut_adapter(config, files, part, target) or "") for part in parts]


def tokens(engine: Engine, prompts: Sequence[Sequence[int]], adapters: Sequence[str]) -> list[list[int]]:
    return [reply for reply, _ in answers(engine, prompts, 10, adapters=adapters)]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in MORE else []) for c in CASES])
def test_an_adapter_over_ranks_gives_the_tokens_of_one_process(
    case: str, lent: dict[int, Lent], tmp_path: Path
) -> None:
    name, kind, size, split, method = CASES[case]
    source, keys = tmp_path / "m", None if method == "lora" else ATTENTION
    on_thread(write, name, source)
    folders = {
        one: on_thread(write_adapter, tmp_path / one, source, seed=seed, kind=method, keys=keys)
        for seed, one in enumerate(("first", "second"))
    }
    parts = [shards.Part(kind, rank, size, split) for rank in range(size)]  # pyright: ignore[reportArgumentType]
    config = json.loads((source / "config.json").read_text())
    how = (config, functools.partial(bring, config, tmp_path / "parts", parts))
    prompts = [text(i, 20 + 7 * i) for i in range(4)]
    asked = ["first", "second", "", "first"]
    with engine_here(source) as alone:
        for one, folder in folders.items():
            alone.add_adapter(read_adapter(one, folder))
        wanted = tokens(alone, prompts, asked)
        cut = alone.thread.call(lambda: parts_of(source, tmp_path / "parts", kind, size, split))
    assert len({tuple(reply) for reply in wanted}) == 4
    with lent[size].engine(cut, how, prefix_bytes=ROOM) as engine:
        for one, folder in folders.items():
            engine.add_adapter(read_adapter(one, folder))
        assert tokens(engine, prompts, asked) == wanted
        # What one adapter computed is of no use to another, and of use to itself.
        again = answers(engine, [prompts[0]] * 3, 10, adapters=["first", "second", ""])
        assert again[0] == (wanted[0], len(prompts[0]) - 1 if engine.state.needs_checkpoints is False else again[0][1])
        assert len({tuple(reply) for reply, _ in again}) == 3
        check_in_step(engine)
        runner: Any = engine.runner
        if case in KILLED:
            os.kill(runner.ranks.pids[1], signal.SIGKILL)
            assert tokens(engine, prompts, asked) == wanted


def test_what_cannot_be_shared_by_heads_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "m"
    on_thread(write, "llama", source)
    files = read_adapter("d", on_thread(write_adapter, tmp_path / "d", source, seed=0, kind="dora"))
    config = json.loads((source / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=r"the adapter d is a DoRA one.*--kind pipeline\) takes it"):
        on_thread(adapter_parts.cut_adapter, config, files, shards.Part("tensor", 0, 2), tmp_path)
    assert not list(tmp_path.glob("*rank*"))


def test_a_stage_without_an_adapted_layer_and_an_adapter_that_is_gone_when_a_rank_is_lost(
    lent: dict[int, Lent], tmp_path: Path
) -> None:
    source = tmp_path / "m"
    on_thread(write, "qwen3_moe", source)
    folder = on_thread(write_adapter, tmp_path / "last", source, seed=3, num_layers=1, size=0.5)
    parts = [shards.Part("pipeline", rank, 3, (1, 2, 1)) for rank in range(3)]
    config = json.loads((source / "config.json").read_text())
    how = (config, functools.partial(bring, config, tmp_path / "parts", parts))
    prompts, asked = [text(0, 20), text(1, 30)], ["last", ""]
    with engine_here(source) as alone:
        alone.add_adapter(read_adapter("last", folder))
        wanted = tokens(alone, prompts, asked)
        assert wanted[0] != tokens(alone, prompts[:1], [""])[0]
        cut = alone.thread.call(lambda: parts_of(source, tmp_path / "parts", "pipeline", 3, (1, 2, 1)))
    with lent[3].engine(cut, how) as engine:
        engine.add_adapter(read_adapter("last", folder))
        assert tokens(engine, prompts, asked) == wanted
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "parts")
        on_thread(parts_of, source, tmp_path / "parts", "pipeline", 3, (1, 2, 1))
        runner: Any = engine.runner
        os.kill(runner.ranks.pids[1], signal.SIGKILL)
        assert tokens(engine, prompts[1:], [""]) == wanted[1:]
        with pytest.raises(AssertionError, match="no adapter 'last' here"):
            tokens(engine, prompts[:1], ["last"])
        assert tokens(engine, prompts[1:], [""]) == wanted[1:]
