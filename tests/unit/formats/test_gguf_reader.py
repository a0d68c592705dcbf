"""Hostile and sound GGUF headers."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import cursor, load_gguf, read_gguf
from tests.unit.formats.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U32,
    Blueprint,
    Tensor,
    auto,
    text,
    tiny_model,
    typed,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def small() -> Blueprint:
    """One of every kind of value and two tensors."""
    plan = Blueprint()
    plan.metadata = [
        ("general.architecture", auto("llama")),
        ("a.bool", typed(BOOL, True)),
        ("a.float", typed(F32, 0.5)),
        ("a.words", typed(STRING, ["x", "", "é"])),
        ("a.ints", typed(5, [-1, 2])),
        ("a.large", typed(10, 2**63)),
    ]
    plan.tensors = [Tensor("one", (2, 32), Kind.Q8_0, bytes(range(68))), Tensor("two", (3,), Kind.F32, bytes(12))]
    return plan


def test_values_and_tensors_arrive_as_they_were_written(tmp_path: Path) -> None:
    file = read_gguf(small().write(tmp_path / "m.gguf"))
    assert file.metadata == {
        "general.architecture": "llama",
        "a.bool": True,
        "a.float": 0.5,
        "a.words": ["x", "", "é"],
        "a.ints": [-1, 2],
        "a.large": 2**63,
    }
    one = file.tensors["one"]
    assert (one.shape, one.type, one.size, one.nbytes) == ((2, 32), Kind.Q8_0, 64, 68)
    assert one.read().tobytes() == bytes(range(68))
    assert file.tensors["two"].read().shape == (1, 12)
    assert file.weight_bytes == 80


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read(tmp_path: Path, version: int) -> None:
    plan = small()
    plan.version = version
    assert read_gguf(plan.write(tmp_path / "m.gguf")).version == version


def test_another_alignment_moves_the_data(tmp_path: Path) -> None:
    plan = small()
    plan.alignment = 4096
    plan.set("general.alignment", typed(U32, 4096))
    file = read_gguf(plan.write(tmp_path / "m.gguf"))
    assert file.tensors["one"].offset % 4096 == 0
    assert file.tensors["one"].read().tobytes() == bytes(range(68))


def _tensor(**changes: object) -> Callable[[Blueprint], None]:
    def change(plan: Blueprint) -> None:
        for name, value in changes.items():
            setattr(plan.tensors[1], name, value)

    return change


def _field(key: str, encoded: bytes) -> Callable[[Blueprint], None]:
    return lambda plan: plan.set(key, encoded)


def _plan(**changes: object) -> Callable[[Blueprint], None]:
    def change(plan: Blueprint) -> None:
        for name, value in changes.items():
            setattr(plan, name, value)

    return change


def _key_length(plan: Blueprint) -> None:
    """One more entry than there is: what follows the metadata is read as its key's length."""
    plan.metadata_count = len(plan.metadata) + 1
    plan.metadata[-1] = ("last", typed(U32, 1) + struct.pack("<Q", 2**60))


def _twice(plan: Blueprint) -> None:
    plan.metadata.append(plan.metadata[0])


def _array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + body


HOSTILE: dict[str, tuple[Callable[[Blueprint], None], str]] = {
    "a key of 2^60 bytes": (_key_length, "key of metadata"),
    "a string of 2^60 bytes": (_field("x", struct.pack("<IQ", STRING, 2**60)), "'x'"),
    "a string array of 2^40": (_field("x", _array(STRING, 2**40)), "1099511627776"),
    "a string array that the file cannot hold": (_field("x", _array(STRING, 2**22)), "does not fit"),
    "an int array of 2^62": (_field("x", _array(10, 2**62)), "'x'"),
    "an int array that the file cannot hold": (_field("x", _array(10, 2**22)), "truncated"),
    "an array of arrays": (_field("x", _array(ARRAY, 1, _array(ARRAY, 1)[4:] * 64)), "array of arrays"),
    "an unknown value type": (_field("x", struct.pack("<I", 13) + bytes(8)), "value type 13"),
    "a bool of 2": (_field("x", struct.pack("<IB", BOOL, 2)), "must be 0 or 1"),
    "text that is not UTF-8": (_field("x", struct.pack("<I", STRING) + text(b"\xff\xfe")), "UTF-8"),
    "a doubled key": (_twice, "general.architecture"),
    "2^60 metadata entries": (_plan(metadata_count=2**60), "metadata count"),
    "2^60 tensors": (_plan(tensor_count=2**60), "tensor count"),
    "more tensors than the file has": (_plan(tensor_count=9), "tensor"),
    "no dimensions": (_tensor(shape=()), "0 dimensions"),
    "100 dimensions": (_tensor(shape=(1,) * 100), "100 dimensions"),
    "a dimension of 0": (_tensor(shape=(3, 0)), "dimension of 0"),
    "dimensions whose product overflows": (_tensor(shape=(2**40, 2**40, 2**40)), "past the end"),
    "a product that wraps to 12 bytes": (_tensor(shape=(2**63 + 3, 2)), "past the end"),
    "a row that is no multiple of the block": (_tensor(shape=(33,), kind=Kind.Q4_0), "blocks of 32"),
    "an unknown tensor type": (_tensor(kind=99), "tensor type 99"),
    "a removed tensor type": (_tensor(kind=4), "tensor type 4"),
    "an offset past the end": (_tensor(offset=2**40), "past the end"),
    "an offset near 2^64": (_tensor(offset=2**64 - 32), "past the end"),
    "an offset off the alignment": (_tensor(offset=97), "alignment"),
    "overlapping tensors": (_tensor(offset=64), "overlap"),
    "a doubled tensor": (_tensor(name="one"), "twice"),
    "a tensor name of 300 bytes": (_tensor(name="n" * 300), "300 bytes"),
    "alignment 0": (_field("general.alignment", typed(U32, 0)), "general.alignment"),
    "alignment 3": (_field("general.alignment", typed(U32, 3)), "power of two"),
    "alignment 2^31": (_field("general.alignment", typed(U32, 2**31)), "65536"),
    "alignment as text": (_field("general.alignment", auto("32")), "general.alignment"),
    "another magic": (_plan(magic=b"GGML"), "magic"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_an_error_that_names_the_field(tmp_path: Path, case: str) -> None:
    change, named = HOSTILE[case]
    plan = small()
    change(plan)
    path = plan.write(tmp_path / "hostile.gguf")
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert named in str(caught.value)
    assert "hostile.gguf" in str(caught.value)
    assert peak < 2**20, f"{peak} bytes were allocated for a file of {path.stat().st_size}"


def test_a_header_longer_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ModelFileError, match="longer than 100 bytes"):
        read_gguf(small().write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_and_byte_orders_are_unsupported(tmp_path: Path, version: int, words: str) -> None:
    plan = small()
    plan.version = version
    with pytest.raises(UnsupportedModelError, match=words):
        read_gguf(plan.write(tmp_path / "m.gguf"))


def test_a_file_cut_at_any_byte_is_an_error(tmp_path: Path) -> None:
    plan = small()
    # Without padding after the last tensor, every shorter file lacks something.
    whole = plan.build()[: -(32 - 12)]
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    read_gguf(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            read_gguf(path)


def test_what_is_no_regular_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelFileError, match=r"no regular file|is missing"):
            read_gguf(path)


def _split(folder: Path, name: str, number: int, count: int, tensors: list[Tensor]) -> Path:
    plan = Blueprint([("split.no", typed(2, number)), ("split.count", typed(2, count))], tensors)
    if number == 0:
        plan.metadata.append(("general.architecture", auto("llama")))
    return plan.write(folder / name)


def test_the_parts_of_a_split_model_are_read_together(tmp_path: Path) -> None:
    one, two = small().tensors
    first = _split(tmp_path, "m-00001-of-00002.gguf", 0, 2, [one])
    second = _split(tmp_path, "m-00002-of-00002.gguf", 1, 2, [two])
    file = read_gguf(first)
    assert {name: t.path for name, t in file.tensors.items()} == {"one": first, "two": second}
    with pytest.raises(ModelFileError, match="first part, m-00001-of-00002"):
        read_gguf(second)
    second.unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00002\.gguf is missing"):
        read_gguf(first)


def test_a_split_model_with_a_wrong_part_is_refused(tmp_path: Path) -> None:
    one, two = small().tensors
    first = _split(tmp_path, "m-00001-of-00002.gguf", 0, 2, [one])
    _split(tmp_path, "m-00002-of-00002.gguf", 1, 2, [one])
    with pytest.raises(ModelFileError, match="earlier part"):
        read_gguf(first)
    _split(tmp_path, "m-00002-of-00002.gguf", 0, 2, [two])
    with pytest.raises(ModelFileError, match="part 1 of 2"):
        read_gguf(first)
    renamed = first.rename(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="-00001-of-00002"):
        read_gguf(renamed)


@pytest.fixture(scope="module")
def tiny_bytes() -> tuple[bytes, int]:
    """A loadable file and the length of its header."""
    plan = tiny_model("llama", Kind.Q4_0)
    return plan.build(), len(plan.header())


def _loads(path: Path, data: bytes) -> bool:
    """Whether it loads; any exception but the two of the contract fails the test."""
    path.write_bytes(data)
    try:
        load_gguf(path, dtype=None)
    except (ModelFileError, UnsupportedModelError):
        return False
    return True


def test_random_damage_to_the_header_never_gives_another_exception(
    tmp_path: Path, tiny_bytes: tuple[bytes, int]
) -> None:
    whole, header = tiny_bytes
    rng = random.Random(20)
    loaded = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        loaded += _loads(tmp_path / "damaged.gguf", bytes(damaged))
    # Some damage is harmless (a letter of the template) and some is not: both happened.
    assert 0 < loaded < 300


@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_cuts_and_splices_never_give_another_exception(
    tmp_path: Path, tiny_bytes: tuple[bytes, int], data: st.DataObject
) -> None:
    whole, header = tiny_bytes
    at = data.draw(st.integers(0, header - 1))
    patch = data.draw(
        st.one_of(
            st.binary(max_size=16), st.sampled_from([struct.pack("<Q", v) for v in (0, 2**31, 2**40, 2**63, 2**64 - 1)])
        )
    )
    keep = data.draw(st.sampled_from([0, len(patch), len(patch) + 1]))
    _loads(tmp_path / "spliced.gguf", whole[:at] + patch + whole[at + keep :])
