"""Pulling from a hub, with the real huggingface_hub client against a fake hub on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from mlxinfer import zoo
from mlxinfer.errors import (
    DownloadError,
    GatedModelError,
    ModelFileError,
    ModelNotFoundError,
    OfflineError,
    UnsupportedModelError,
)
from mlxinfer.zoo import blobs
from mlxinfer.zoo import hub as hub_module
from mlxinfer.zoo.stores import hub_cache
from tests.unit.formats.odd_files import put_odd
from tests.unit.zoo.fake_hub import FakeHub, Repo
from tests.unit.zoo.models import CONFIG, model_repo, safetensors, write_model

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.types import ProgressEvent

NAME = "org/tiny"


def weights(hub: FakeHub) -> bytes:
    return hub.repos[NAME].files["model.safetensors"]


def partials() -> list[Path]:
    return sorted(hub_cache().rglob("*.incomplete"))


def test_a_pull_fetches_the_model_and_nothing_that_could_run(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    found = zoo.pull(NAME, settings)
    assert found.kind == "folder"
    assert found.origin == "hub cache"
    assert sorted(p.name for p in found.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found.path / "model.safetensors").read_bytes() == weights(hub)
    assert found.size_bytes == len(weights(hub))


def test_a_resolved_model_is_not_asked_for_again(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    first = zoo.resolve(NAME, settings)
    hub.seen.clear()
    assert zoo.resolve(NAME, settings) == first
    assert hub.seen == []


def test_the_huggingface_client_itself_finds_what_was_pulled(hub: FakeHub, settings: Settings) -> None:
    from huggingface_hub import snapshot_download

    hub.repos[NAME] = model_repo()
    found = zoo.pull(NAME, settings)
    assert Path(snapshot_download(NAME, cache_dir=hub_cache(), local_files_only=True)) == found.path


def test_progress_counts_the_bytes_of_the_whole_model(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    events: list[ProgressEvent] = []
    zoo.pull(NAME, settings, progress=events.append)
    total = sum(len(hub.repos[NAME].files[n]) for n in ("config.json", "tokenizer.json", "model.safetensors"))
    downloads = [e for e in events if e.phase == "download"]
    assert {e.total for e in downloads} == {total}
    assert [e.done for e in downloads] == sorted(e.done for e in downloads)
    assert downloads[-1].done == total


def test_a_dropped_connection_is_resumed_in_the_same_pull(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    hub.drop_after = [700_000]
    found = zoo.pull(NAME, settings)
    assert (found.path / "model.safetensors").read_bytes() == weights(hub)
    starts = [s.range for s in hub.gets("/cdn/")]
    assert starts[0] is None
    assert starts[1] is not None
    assert int(starts[1].removeprefix("bytes=").rstrip("-")) > 0


def test_a_pull_that_broke_off_goes_on_where_it_stopped(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    monkeypatch.setattr(blobs, "TRIES", 1)
    hub.drop_after = [1_200_000]
    with pytest.raises(DownloadError, match="what arrived is kept"):
        zoo.pull(NAME, settings)
    (partial,) = partials()
    kept = partial.stat().st_size
    assert 0 < kept < len(weights(hub))
    with pytest.raises(OfflineError):
        zoo.resolve(NAME, settings, fetch=False)
    hub.seen.clear()
    found = zoo.pull(NAME, settings)
    assert [s.range for s in hub.gets("/cdn/")] == [f"bytes={kept}-"]
    assert (found.path / "model.safetensors").read_bytes() == weights(hub)
    assert partials() == []


def test_a_server_that_ignores_ranges_still_gives_the_right_bytes(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    hub.drop_after = [1_200_000]
    hub.ignore_range = True
    found = zoo.pull(NAME, settings)
    assert (found.path / "model.safetensors").read_bytes() == weights(hub)


def test_a_wrong_checksum_is_refused_and_leaves_nothing_under_a_final_name(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo(stated_sha={"model.safetensors": "0" * 64})
    with pytest.raises(DownloadError, match="SHA-256"):
        zoo.pull(NAME, settings)
    assert partials() == []
    assert not (hub_cache() / "models--org--tiny" / "blobs" / ("0" * 64)).exists()
    with pytest.raises(OfflineError):
        zoo.resolve(NAME, settings, fetch=False)


def test_a_cancelled_pull_ends_at_once_and_leaves_no_torn_file(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo(files={"model.safetensors": safetensors(weight=(2048, 1024))})
    hub.delay = 0.01
    cancel = threading.Event()

    def stop_midway(event: ProgressEvent) -> None:
        if event.phase == "download" and event.done > 2_000_000:
            cancel.set()

    with pytest.raises(zoo.CancelledError):
        zoo.pull(NAME, settings, progress=stop_midway, cancel=cancel)
    (partial,) = partials()
    assert partial.stat().st_size < len(weights(hub))
    assert list(hub_cache().rglob("*.safetensors")) == []
    hub.delay = 0
    assert zoo.pull(NAME, settings).size_bytes == len(weights(hub))


def test_a_gated_model_says_which_page_to_open_and_how_to_log_in(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo(gated=True)
    with pytest.raises(GatedModelError) as caught:
        zoo.pull(NAME, settings)
    assert f"{hub.url}/{NAME}" in str(caught.value)
    assert "hf auth login" in str(caught.value)
    assert caught.value.exit_code == 3
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert zoo.pull(NAME, settings).kind == "folder"


@pytest.mark.parametrize("name", ["org/absent", "org/tiny@no-such-branch"])
def test_an_unknown_repository_or_revision_is_not_found(hub: FakeHub, settings: Settings, name: str) -> None:
    hub.repos[NAME] = model_repo()
    with pytest.raises(ModelNotFoundError, match=r"absent|no-such-branch"):
        zoo.pull(name, settings)


def test_a_hub_that_answers_500_is_a_download_error(hub: FakeHub, settings: Settings) -> None:
    hub.status = 500
    with pytest.raises(DownloadError, match="500"):
        zoo.pull(NAME, settings)


def test_the_login_page_of_a_network_is_no_hub(hub: FakeHub, settings: Settings) -> None:
    hub.status = 200
    with pytest.raises(OfflineError, match="does not answer as a hub"):
        zoo.pull(NAME, settings)


def test_a_folder_that_may_not_be_written_is_a_download_error(
    hub: FakeHub, settings: Settings, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    (home / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "file" / "hub"))
    with pytest.raises(DownloadError, match="cannot be written"):
        zoo.pull(NAME, settings)


def test_a_model_of_another_program_is_not_fetched_again(hub: FakeHub, settings: Settings, home: Path) -> None:
    hub.repos[NAME] = model_repo()
    folder = write_model(home / ".lmstudio/models" / NAME)
    assert zoo.pull(NAME, settings).path == folder
    assert hub.seen == []


def test_an_unreachable_hub_is_offline_within_seconds(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OfflineError, match="cannot be reached"):
        zoo.resolve(NAME, settings)


def test_offline_mode_never_opens_a_connection(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE"):
        zoo.pull(NAME, settings)
    assert hub.seen == []


def test_offline_a_pulled_model_still_resolves_and_pulls(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    found = zoo.pull(NAME, settings)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert zoo.resolve(NAME, settings) == found
    assert zoo.pull(NAME, settings) == found


def test_a_name_that_climbs_out_of_the_store_is_refused(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo(files={"../../escape.json": b"{}"})
    with pytest.raises(ModelFileError, match="leave the store"):
        zoo.pull(NAME, settings)
    assert list(hub_cache().parent.parent.rglob("escape.json")) == []


def test_a_link_that_leaves_the_store_is_not_a_model(hub: FakeHub, settings: Settings, tmp_path: Path) -> None:
    hub.repos[NAME] = model_repo()
    found = zoo.pull(NAME, settings)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(safetensors(weight=(2, 2)))
    (found.path / "model.safetensors").unlink()
    (found.path / "model.safetensors").symlink_to(outside)
    with pytest.raises(OfflineError):
        zoo.resolve(NAME, settings, fetch=False)
    assert zoo.installed(settings) == []


def test_a_shard_that_the_index_names_and_the_hub_lacks_is_reported(hub: FakeHub, settings: Settings) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    repo = model_repo(files={"model.safetensors.index.json": json.dumps(index).encode()})
    repo.files["model-00001-of-00002.safetensors"] = repo.files.pop("model.safetensors")
    hub.repos[NAME] = repo
    with pytest.raises(ModelFileError, match="not whole"):
        zoo.pull(NAME, settings)


def test_a_new_revision_replaces_the_old_only_when_it_is_whole(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    old = zoo.pull(NAME, settings)
    hub.repos[NAME] = model_repo(commit="b" * 40, files={"model.safetensors": safetensors(weight=(640, 1024))})
    monkeypatch.setattr(blobs, "TRIES", 1)
    hub.drop_after = [1_000_000]
    with pytest.raises(DownloadError):
        zoo.pull(NAME, settings)
    assert zoo.resolve(NAME, settings) == old
    new = zoo.pull(NAME, settings)
    assert new.path.name == "b" * 40
    assert zoo.resolve(NAME, settings) == new


def test_a_revision_can_be_pinned(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    name = f"{NAME}@{'a' * 40}"
    assert zoo.pull(name, settings).path.name == "a" * 40
    assert zoo.resolve(name, settings, fetch=False).name == name


def test_too_little_room_is_said_before_the_first_byte(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match=r"2\.1 MB are needed and 1\.0 kB are free"):
        zoo.pull(NAME, settings)
    assert hub.gets("/cdn/") == []


def test_a_disk_that_fills_up_keeps_what_arrived(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME] = model_repo()
    append = blobs._Partial.append

    def full(self: blobs._Partial, block: bytes) -> None:
        if self.done:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(blobs._Partial, "append", full)
        with pytest.raises(DownloadError, match="disk filled up"):
            zoo.pull(NAME, settings)
    (partial,) = partials()
    assert partial.stat().st_size > 0
    assert zoo.pull(NAME, settings).size_bytes == len(weights(hub))


def gguf_repo(*names: str) -> Repo:
    return Repo(files={name: b"GGUF" + name.encode() for name in names})


def test_a_gguf_repository_gives_one_file_by_quantization_or_name(hub: FakeHub, settings: Settings) -> None:
    hub.repos["org/tiny-GGUF"] = gguf_repo("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-tiny-f16.gguf")
    found = zoo.resolve("org/tiny-GGUF:q8_0", settings)
    assert found.kind == "gguf"
    assert found.path.name == "tiny-Q8_0.gguf"
    assert found.name == "org/tiny-GGUF:tiny-Q8_0.gguf"
    assert zoo.resolve(found.name, settings, fetch=False) == found
    assert len(hub.gets("/cdn/")) == 1


def test_without_a_choice_the_gguf_that_stays_packed_is_taken(hub: FakeHub, settings: Settings) -> None:
    hub.repos["org/tiny-GGUF"] = gguf_repo("tiny-Q4_K_M.gguf", "tiny-Q4_0.gguf")
    assert zoo.resolve("org/tiny-GGUF", settings).path.name == "tiny-Q4_0.gguf"


def test_a_gguf_choice_that_is_not_there_lists_those_that_are(hub: FakeHub, settings: Settings) -> None:
    hub.repos["org/tiny-GGUF"] = gguf_repo("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    with pytest.raises(ModelNotFoundError, match="org/tiny-GGUF:Q4_K_M, org/tiny-GGUF:Q8_0"):
        zoo.resolve("org/tiny-GGUF:Q2_K", settings)


def test_a_repository_of_pickles_is_unsupported(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = Repo(files={"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": b"x"})
    with pytest.raises(UnsupportedModelError, match=r"only \.bin"):
        zoo.pull(NAME, settings)


def test_the_token_stays_with_the_hub(hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME] = model_repo()
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    zoo.pull(NAME, settings)
    assert {x.token for x in hub.seen if "/cdn/" not in x.path} == {"Bearer hf_good"}
    assert {x.token for x in hub.seen if "/cdn/" in x.path} == {None}


def test_removing_a_hub_model_frees_its_bytes_and_its_partial_files(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    zoo.pull(NAME, settings)
    assert zoo.remove(NAME, settings) >= len(weights(hub))
    assert zoo.installed(settings) == []
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        zoo.remove(NAME, settings)


def test_removing_one_gguf_leaves_the_others(hub: FakeHub, settings: Settings) -> None:
    hub.repos["org/tiny-GGUF"] = gguf_repo("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    zoo.pull("org/tiny-GGUF:Q4_K_M", settings)
    kept = zoo.pull("org/tiny-GGUF:Q8_0", settings)
    zoo.remove("org/tiny-GGUF:Q4_K_M", settings)
    assert zoo.installed(settings) == [kept]


def test_two_pulls_at_once_share_one_download(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    hub.delay = 0.005
    results: list[zoo.ModelFiles] = []
    threads = [threading.Thread(target=lambda: results.append(zoo.pull(NAME, settings))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(hub.gets("/cdn/")) == 1
    assert [p.name for p in (hub_cache() / "models--org--tiny/refs").iterdir()] == ["main"]


def test_fit_knows_a_hub_model_from_its_config_without_the_weights(hub: FakeHub, settings: Settings) -> None:
    hub.repos[NAME] = model_repo()
    report = zoo.fit(NAME, settings, bandwidth=(100.0, "given"), on_cpu=False)
    assert report.weight_bytes == len(weights(hub))
    assert report.model_context == 512
    assert hub.gets("/cdn/") == []


def test_a_ref_written_by_many_at_once_is_whole() -> None:
    errors: list[OSError] = []

    def write() -> None:
        try:
            for _ in range(200):
                hub_module._write_ref(NAME, "main", "b" * 40)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    refs = hub_cache() / f"models--{NAME.replace('/', '--')}" / "refs"
    assert [(p.name, p.read_text()) for p in refs.iterdir()] == [("main", "b" * 40)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_a_partial_file_that_is_no_file_of_ours_is_replaced(
    hub: FakeHub, settings: Settings, tmp_path: Path, kind: str
) -> None:
    hub.repos[NAME] = model_repo()
    data = weights(hub)
    mine = tmp_path / "mine"
    mine.write_bytes(b"of the user")
    name = f"{hashlib.sha256(data).hexdigest()}.mlxinfer.incomplete"
    partial = hub_cache() / f"models--{NAME.replace('/', '--')}" / "blobs" / name
    partial.parent.mkdir(parents=True)
    if kind == "link":
        partial.symlink_to(mine)
    else:
        put_odd(partial, kind)
    assert (zoo.pull(NAME, settings).path / "model.safetensors").read_bytes() == data
    assert mine.read_bytes() == b"of the user"


def test_removing_a_model_leaves_its_copy_under_another_name(hub: FakeHub, settings: Settings) -> None:
    names = [f"org/copy{number}" for number in range(6)]
    for name in names:
        hub.repos[name] = model_repo()  # all of the same commit, as a repository and its duplicates are
        zoo.pull(name, settings)
    for at, name in enumerate(names):
        zoo.remove(name, settings)
        assert [one.name for one in zoo.installed(settings)] == names[at + 1 :]
