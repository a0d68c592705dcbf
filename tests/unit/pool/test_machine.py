"""The pool over real files, real memory and the MLX thread, with tiny models."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest

from mlxinfer import runtime
from mlxinfer.config import Settings
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import ModelFileError, ModelNotFoundError, OfflineError
from mlxinfer.pool import Machine, ModelPool
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.llm import LLM

SLACK = 2**14
"""Bytes; the tiny models have 600 KB of weights."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("pool")
    return {name: str(tiny.write_folder(base / name, seed=seed)) for seed, name in enumerate("ab")}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path)


@pytest.fixture
def held() -> Iterator[int]:
    """Bytes that mlx holds before the test; nothing of a model may be left over."""
    gc.collect()
    before = mlx_thread().call(mx.get_active_memory)
    yield before
    gc.collect()
    assert mlx_thread().call(mx.get_active_memory) <= before + SLACK


def said(llm: LLM) -> str:
    return str(llm.generate("the quick", temperature=0, max_tokens=8, ignore_eos=True))


def until_unloaded(pool: ModelPool, name: str) -> None:
    end = time.monotonic() + 20
    while pool.status()[name].state != "registered":
        assert time.monotonic() < end, pool.status()
        time.sleep(0.005)


def test_an_idle_model_is_unloaded_and_its_memory_comes_back(
    folders: dict[str, str], settings: Settings, held: int
) -> None:
    pool = ModelPool(folders, Machine(settings), keep_alive=0)
    with pool.lease("a") as llm:
        first = said(llm)
        weights = pool.status()["a"].bytes
        assert mx.get_active_memory() - held >= weights > 0
    del llm
    until_unloaded(pool, "a")
    assert mlx_thread().call(mx.get_active_memory) <= held + SLACK
    with pool.lease("a") as llm:
        assert said(llm) == first, "it comes back as it was"
    pool.close()


def test_one_makes_room_for_the_other_where_both_do_not_fit(
    folders: dict[str, str], settings: Settings, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(settings)
    needed = machine.predict(folders["a"], threading.Event())
    budget = held + int(1.5 * needed)
    monkeypatch.setattr(runtime, "memory", lambda: runtime.Memory(budget, budget, budget))
    pool = ModelPool(folders, machine)
    with pool.lease("a") as a:
        # A file has a header as well.
        assert 0 <= needed - pool.status()["a"].bytes < 0.01 * needed, "the prediction is what it takes"
        assert not pool.fits_now("b")
    with pool.lease("b") as b:
        assert not a.alive
        said(b)
        assert mx.get_active_memory() <= budget
    assert [status.state for status in pool.status().values()] == ["registered", "loaded"]
    del a, b
    pool.close()


def test_a_folder_that_breaks_later_evicts_nothing_when_that_can_be_seen(
    folders: dict[str, str], settings: Settings, tmp_path: Path, held: int
) -> None:
    late = tiny.write_folder(tmp_path / "late")
    pool = ModelPool({"a": folders["a"], "late": str(late)}, Machine(settings))
    with pool.lease("a"):
        pass
    (late / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ModelFileError):
        pool.acquire("late")
    with pool.lease("a") as llm:
        said(llm)
    del llm
    pool.close()


def test_what_is_not_on_this_machine_is_not_fetched(settings: Settings) -> None:
    pool = ModelPool({"x": "some-org/some-model", "y": "/no/such/folder"}, Machine(settings))
    with pytest.raises(OfflineError):
        pool.acquire("x")
    with pytest.raises(ModelNotFoundError):
        pool.acquire("y")
    pool.close()
