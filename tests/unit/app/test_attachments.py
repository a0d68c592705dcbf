"""Files beside a message: what is read, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer.app import attachments
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.txt", b"one two", "one two"),
        ("b.md", b"\xef\xbb\xbf# T", "# T"),
        ("c.py", "x = 'ä'\n".encode(), "x = 'ä'\n"),
    ],
)
def test_texts_are_read_whole_and_counted(tmp_path: Path, name: str, data: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert attachments.read(tmp_path / name, words) == {"name": name, "text": text, "tokens": words(text)}


def test_a_pdf_gives_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf("Hello from a page"))
    assert attachments.read(tmp_path / "a.pdf", words)["text"].strip() == "Hello from a page"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.bin", b"\0\1\2", "no text file"),
        ("a.txt", b"\xff\xfe", "0xff at offset 0"),
        ("a.txt", b"  \n", "holds no text"),
        ("a.pdf", b"%PDF-1.7 and then nothing", "no PDF that can be read"),
        ("a.pdf", b"%PDF-", "no PDF that can be read"),
    ],
)
def test_what_holds_no_text_is_refused_by_name(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        attachments.read(tmp_path / name, words)
    assert name in str(caught.value)


def test_too_large_is_refused_and_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("word " * 100)
    monkeypatch.setattr(attachments, "MAX_CHARACTERS", 499)
    with pytest.raises(InvalidRequestError, match="500 characters"):
        attachments.read(tmp_path / "a.txt", words)
    monkeypatch.setattr(attachments, "MAX_BYTES", 499)
    with pytest.raises(InvalidRequestError, match="larger"):
        attachments.read(tmp_path / "a.txt", words)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"gone\.txt cannot be read"):
        attachments.read(tmp_path / "gone.txt", words)


def pdf(text: str) -> bytes:
    """A PDF of one page with one line."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return data + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
        % (len(objects) + 1, table, len(objects) + 1, len(data))
    )
