"""Names of a model with an adapter in the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer import InvalidRequestError, ModelFileError, ModelNotFoundError
from mlxinfer.config import Settings
from mlxinfer.pool import Machine, ModelPool
from tests import tiny
from tests.adapters import write_adapter

if TYPE_CHECKING:
    from pathlib import Path


def test_names_of_adapters_lease_one_model_and_an_unknown_one_loads_and_evicts_nothing(tmp_path: Path) -> None:
    base = tiny.write_folder(tmp_path / "tiny")
    folder = str(write_adapter(tmp_path / "a", base, seed=1))
    pool = ModelPool({"m": str(base)}, Machine(Settings()), adapters={"m": {"a": folder, "b": folder}})
    try:
        assert list(pool) == ["m"]
        assert pool.adapted() == {"m:a": "m", "m:b": "m"}
        assert "m:a" in pool
        with pytest.raises(ModelNotFoundError, match="m:a"):
            pool.request("m:c")
        assert pool.status()["m"].state == "registered"
        with pool.acquire("m:a") as adapted, pool.acquire("m") as plain:
            assert (adapted.name, plain.name) == ("m:a", "m")
            assert adapted.llm._engine is plain.llm._engine
            with pytest.raises(ModelNotFoundError):
                pool.request("m:c")
            assert adapted.llm.generate("the", max_tokens=2).model.endswith(":a")
        assert pool.status()["m"].state == "loaded"
    finally:
        pool.close()


def test_a_model_whose_adapter_does_not_fit_is_not_kept(tmp_path: Path) -> None:
    base, other = tiny.write_folder(tmp_path / "tiny"), tiny.write_folder(tmp_path / "other", hidden_size=32)
    folder = str(write_adapter(tmp_path / "a", other, seed=1))
    pool = ModelPool({"m": str(base)}, Machine(Settings()), adapters={"m": {"a": folder}})
    try:
        with pytest.raises(ModelFileError, match="made for another"):
            pool.acquire("m")
        assert pool.status()["m"].state == "failed"
        assert pool.model("m") is None
    finally:
        pool.close()


def test_a_model_and_an_adapter_cannot_have_one_name() -> None:
    with pytest.raises(InvalidRequestError, match="m:a"):
        ModelPool({"m": "x", "m:a": "y"}, Machine(Settings()), adapters={"m": {"a": "folder"}})


def test_an_adapter_offered_later_works_at_once_and_after_the_next_load(tmp_path: Path) -> None:
    base = tiny.write_folder(tmp_path / "tiny")
    first, second = (str(write_adapter(tmp_path / name, base, seed=seed)) for seed, name in enumerate("ab", start=1))
    pool = ModelPool({"m": str(base)}, Machine(Settings()))
    try:
        assert pool.offer("m", "a", first) == "m:a"
        with pool.acquire("m:a") as lease:
            assert pool.offer("m", "b", second) == "m:b"
            assert lease.llm.generate("the", max_tokens=2).model.endswith(":a")
        pool.unload("m")
        with pool.acquire("m:b") as lease:
            assert lease.llm.generate("the", max_tokens=2).model.endswith(":b")
        with pytest.raises(InvalidRequestError, match="m:a"):
            pool.offer("m", "a", second)
    finally:
        pool.close()


def test_an_adapter_that_does_not_fit_is_not_offered(tmp_path: Path) -> None:
    base, other = tiny.write_folder(tmp_path / "tiny"), tiny.write_folder(tmp_path / "other", hidden_size=32)
    folder = str(write_adapter(tmp_path / "a", other, seed=1))
    pool = ModelPool({"m": str(base)}, Machine(Settings()))
    try:
        with pool.acquire("m"), pytest.raises(ModelFileError, match="made for another"):
            pool.offer("m", "a", folder)
        assert pool.adapted() == {}
        pool.unload("m")
        with pool.acquire("m") as lease:
            assert lease.llm.adapters == ()
    finally:
        pool.close()
