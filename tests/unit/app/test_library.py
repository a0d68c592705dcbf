"""What the app knows of models, and what it does with them, on tiny models and a hub of the test's own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from mlxinfer.app.library import Library
from mlxinfer.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, ModelsBusyError
from mlxinfer.pool import Machine, ModelPool
from mlxinfer.types import SamplingParams
from tests import tiny
from tests.adapters import write_adapter
from tests.unit.zoo.conftest import home, hub, settings
from tests.unit.zoo.models import model_repo, safetensors, write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlxinfer.app.library import Offer
    from mlxinfer.app.pulls import Pull
    from mlxinfer.config import Settings
    from tests.unit.zoo.fake_hub import FakeHub

__all__ = ["home", "hub", "settings"]
BIG = safetensors(weight=(2048, 1024))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture
def pool(base: Path, settings: Settings) -> Iterator[ModelPool]:
    made = ModelPool({"base": str(base)}, Machine(settings))
    yield made
    made.close()


@pytest.fixture
def library(pool: ModelPool, settings: Settings) -> Iterator[Library]:
    made = Library(pool, settings)
    yield made
    made.close()


def offer(library: Library, name: str) -> Offer:
    return next(one for one in library.offers() if one.name == name)


def until(true: Callable[[], object], timeout: float = 60.0) -> None:
    ends = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.01)


def over(pull: Pull) -> Pull:
    until(lambda: pull.state != "running")
    return pull


def test_what_is_here_comes_before_the_catalogue_each_with_what_is_known_of_it(library: Library) -> None:
    first, *rest = library.offers()
    assert (first.name, first.here, first.state) == ("base", True, "registered")
    assert first.size_bytes > 0
    assert first.parameters * first.bits == pytest.approx(first.size_bytes * 8, rel=0.05)
    assert first.capabilities == ("chat",)
    assert not any(one.here for one in rest)
    demo = next(one for one in rest if one.name == "smollm2-135m")
    assert demo.licence
    assert demo.size_bytes > 50e6


def test_a_model_of_the_catalogue_that_is_in_the_hubs_cache_is_there_once_under_its_alias(
    library: Library, hub: FakeHub
) -> None:
    from mlxinfer import zoo

    entry = next(e for e in zoo.catalog() if e.hub and not e.package and "GGUF" not in e.hub)
    assert entry.hub is not None
    hub.repos[entry.hub] = model_repo()
    assert over(library.pull(entry.alias)).state == "done"
    assert offer(library, entry.alias).here
    assert entry.hub not in [one.name for one in library.offers()]


def test_a_model_loads_is_kept_and_goes_again(library: Library, pool: ModelPool) -> None:
    library.load("base")
    until(lambda: offer(library, "base").state == "loaded")
    assert not offer(library, "base").at_work
    library.pin("base", True)
    assert offer(library, "base").pinned
    # The engine tells the governor at its first step.
    until(lambda: library.memory().weights > 0)
    library.unload("base")
    assert offer(library, "base").state == "registered"
    assert library.memory().weights == 0


def test_a_model_at_work_is_neither_unloaded_nor_deleted(library: Library, pool: ModelPool) -> None:
    with pool.acquire("base") as lease:
        generation = lease.llm.submit([5, 6, 7], SamplingParams(max_tokens=1500, ignore_eos=True))
        until(lambda: offer(library, "base").at_work)
        with pytest.raises(ModelsBusyError, match="base is at work"):
            library.unload("base")
        with pytest.raises(ModelsBusyError, match="can be deleted when"):
            library.remove("base")
        generation.cancel()
    assert offer(library, "base").state == "loaded"


def test_loading_what_is_not_here_says_so_and_a_load_that_fails_leaves_its_reason(
    library: Library, pool: ModelPool, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        library.load("no-such-model")
    broken = write_model(tmp_path / "broken", model_type="nothing-known")
    library.load(str(broken))
    until(lambda: offer(library, str(broken)).state == "failed")
    assert "nothing-known" in offer(library, str(broken)).error


def test_a_folder_whose_files_are_wrong_is_offered_with_what_is_wrong(
    library: Library, pool: ModelPool, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "torn")
    pool.register("torn", str(folder))
    (folder / "config.json").write_text("{")
    assert "config.json" in offer(library, "torn").error
    assert "torn" not in library.fits()


def test_every_offer_whose_size_is_known_has_a_verdict_and_no_network_is_asked(library: Library, hub: FakeHub) -> None:
    fits = library.fits()
    assert fits.keys() == {one.name for one in library.offers()}
    assert fits["base"].verdict == "yes"
    assert fits["base"].tok_s > 0
    assert {report.verdict for report in fits.values()} <= {"yes", "tight", "no"}
    largest = max(fits.values(), key=lambda report: report.weight_bytes)
    assert largest.verdict == "no"
    assert largest.tok_s == 0
    assert hub.seen == []


def test_the_memory_bar_adds_up_to_what_models_may_take(library: Library) -> None:
    from mlxinfer.engine.governor import governor

    library.load("base")
    until(lambda: offer(library, "base").state == "loaded")
    bar = library.memory()
    assert min(bar.weights, bar.kv + 1, bar.cache + 1, bar.free, bar.other + 1) > 0
    assert bar.budget == governor().budget


def test_an_adapter_makes_a_name_that_can_be_chosen_and_taken_back(
    library: Library, pool: ModelPool, base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", base, seed=1)
    assert library.models() == ["base"]
    assert library.add_adapter("base", "mine", f" {folder} ") == "base:mine"
    assert library.models() == ["base", "base:mine"]
    assert offer(library, "base").adapters == ("mine",)
    library.use("base:mine")
    with pool.acquire("base:mine") as lease:
        assert lease.llm.generate("the", max_tokens=2).model.endswith(":mine")
    with pytest.raises(InvalidRequestError, match="base:mine"):
        library.add_adapter("base", "mine", str(folder))
    library.drop_adapter("base", "mine")
    assert library.models() == ["base"]
    with pytest.raises(ModelNotFoundError, match="base:mine"):
        library.drop_adapter("base", "mine")


@pytest.mark.parametrize("loaded", [False, True])
def test_a_folder_that_is_no_adapter_changes_nothing(
    loaded: bool, library: Library, pool: ModelPool, tmp_path: Path
) -> None:
    if loaded:
        pool.acquire("base").release()
    for name, folder, message in (
        ("mine", "", "name the adapter's folder"),
        ("mine", str(tmp_path / "nowhere"), "holds no adapter_config"),
        ("a/b", str(tmp_path), "can't be called"),
    ):
        with pytest.raises((InvalidRequestError, ModelNotFoundError), match=message):
            library.add_adapter("base", name, folder)
    assert library.models() == ["base"]


def test_an_adapter_of_another_model_is_refused_by_one_that_is_loaded_and_can_be_taken_back_from_one_that_is_not(
    library: Library, pool: ModelPool, tmp_path: Path
) -> None:
    other = tiny.write_folder(tmp_path / "other", hidden_size=32)
    folder = str(write_adapter(tmp_path / "a", other, seed=1))
    library.add_adapter("base", "mine", folder)
    library.load("base")
    until(lambda: offer(library, "base").state == "failed")
    library.drop_adapter("base", "mine")
    until(lambda: pool.status()["base"].state == "loaded" or _tried(library))
    with pytest.raises(ModelFileError, match="made for another"):
        library.add_adapter("base", "mine", folder)
    assert library.models() == ["base"]


def _tried(library: Library) -> bool:
    """A load that failed is answered with its error for a second."""
    try:
        library.load("base")
    except ModelFileError:
        time.sleep(0.1)
    return False


def test_a_pull_that_breaks_off_goes_on_where_it_stopped(
    library: Library, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxinfer.zoo.blobs.TRIES", 1)
    hub.repos["org/big"] = model_repo(files={"model.safetensors": BIG})
    hub.drop_after = [5_000_000]
    broken = over(library.pull(" org/big "))
    assert (broken.state, broken.name) == ("failed", "org/big")
    assert "broke off at 5000000" in broken.error
    assert broken.done >= 5_000_000
    whole = over(library.pull("org/big"))
    assert (whole.state, whole.error) == ("done", "")
    assert hub.gets("/cdn/")[-1].range == "bytes=5000000-"
    assert offer(library, "org/big").here
    assert "org/big" in library.models()
    assert [pull.state for pull in library.pulls()] == ["done"]


def test_a_pull_can_be_cancelled_gone_on_with_and_discarded(library: Library, hub: FakeHub, home: Path) -> None:
    hub.repos["org/big"] = model_repo(files={"model.safetensors": BIG})
    hub.delay = 0.01
    pull = library.pull("org/big")
    until(lambda: pull.done > 1_000_000)
    assert library.pull("org/big") is pull, "one that runs is handed out again"
    with pytest.raises(InvalidRequestError, match="on its way"):
        library.remove("org/big")
    with pytest.raises(InvalidRequestError, match="on its way"):
        library.discard("org/big")
    library.cancel("org/big")
    assert pull.cancelling or pull.state == "cancelled"
    assert over(pull).state == "cancelled"
    left = list(home.rglob("*.incomplete"))
    assert sum(path.stat().st_size for path in left) > 500_000
    library.discard("org/big")
    assert not list(home.rglob("*.incomplete"))
    assert library.pulls() == []


def test_a_pull_says_how_fast_it_is_and_how_long_it_takes(library: Library, hub: FakeHub) -> None:
    hub.repos["org/big"] = model_repo(files={"model.safetensors": BIG})
    hub.delay = 0.02
    pull = library.pull("org/big")
    until(lambda: pull.rate > 0)
    assert 0 < pull.rate < 65536 / 0.02
    assert pull.left_s is not None
    assert pull.left_s > 0
    assert over(pull).rate == 0.0


NO_MODELS = (("no-such-model", "no-such-model"), ("/nowhere/at/all", "no model at"), ("org/none", "knows no model"))


@pytest.mark.parametrize(("name", "message"), NO_MODELS)
def test_what_is_no_model_is_refused_at_once_or_fails_with_the_reason(
    name: str, message: str, library: Library, hub: FakeHub
) -> None:
    pull = over(library.pull(name))
    assert pull.state == "failed"
    assert message in pull.error
    with pytest.raises(InvalidRequestError, match="name a model"):
        library.pull(" ")


def test_a_pull_of_a_folder_of_the_users_own_makes_it_a_model_that_can_be_chosen(
    library: Library, tmp_path: Path
) -> None:
    folder = tiny.write_folder(tmp_path / "mine")
    assert over(library.pull(str(folder))).state == "done"
    assert str(folder) in library.models()


def test_deleting_frees_the_disk_and_the_memory_and_leaves_what_is_not_ours(
    library: Library, pool: ModelPool, hub: FakeHub, base: Path, tmp_path: Path
) -> None:
    folder = tiny.write_folder(tmp_path / "whole")
    hub.repos["org/tiny"] = model_repo(files={path.name: path.read_bytes() for path in folder.iterdir()})
    assert over(library.pull("org/tiny")).state == "done"
    library.load("org/tiny")
    until(lambda: offer(library, "org/tiny").state == "loaded")
    assert library.remove("org/tiny") >= (folder / "model.safetensors").stat().st_size
    assert "org/tiny" not in [one.name for one in library.offers()]
    assert pool.status()["org/tiny"].state == "registered"
    with pytest.raises(InvalidRequestError, match="your own folder"):
        library.remove("base")
    with pytest.raises(InvalidRequestError, match="another program"):
        library.remove("ollama:llama3")
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        library.remove("smollm2-135m")
    assert (base / "model.safetensors").exists()
    assert offer(library, "base").here
