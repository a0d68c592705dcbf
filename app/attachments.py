"""Files that go along with a message: their text, and how many tokens it takes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_BYTES = 32 << 20
MAX_CHARACTERS = 4_000_000
MAX_PAGES = 2000
"""Of a PDF."""


def read(path: Path, count: Callable[[str], int]) -> dict[str, Any]:
    """{"name", "text", "tokens"} of a text, code or PDF file; `count` is the model's number of tokens of a text.

    Nothing is cut: what is too long is an InvalidRequestError, as is what holds no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path.name} cannot be read: {error.strerror}", param="attachment") from error
    if len(data) > MAX_BYTES:
        raise InvalidRequestError(f"{path.name} is larger than {MAX_BYTES >> 20} MiB", param="attachment")
    text = _of_pdf(data, path.name) if data.startswith(b"%PDF-") else _of_text(data, path.name)
    if not text.strip():
        raise InvalidRequestError(f"{path.name} holds no text", param="attachment")
    if len(text) > MAX_CHARACTERS:
        message = f"{path.name} has {len(text):,} characters; at most {MAX_CHARACTERS:,} can be attached"
        raise InvalidRequestError(message, param="attachment")
    return {"name": path.name, "text": text, "tokens": count(text)}


def _of_text(data: bytes, name: str) -> str:
    if b"\0" in data:
        raise InvalidRequestError(f"{name} is no text file, and no PDF", param="attachment")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; convert it first",
            param="attachment",
        ) from None


def _of_pdf(data: bytes, name: str) -> str:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise InvalidRequestError(
            "PDF files need the extra: pip install 'mlxinfer[app]'", param="attachment"
        ) from error
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InvalidRequestError(f"{name} needs a password", param="attachment")
        if len(reader.pages) > MAX_PAGES:
            message = f"{name} has {len(reader.pages):,} pages; at most {MAX_PAGES:,} can be attached"
            raise InvalidRequestError(message, param="attachment")
        return "\n\n".join(page.extract_text() for page in reader.pages)
    except InvalidRequestError:
        raise
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        # What a damaged PDF makes pypdf raise is not one family.
        raise InvalidRequestError(f"{name} is no PDF that can be read: {error}", param="attachment") from error
