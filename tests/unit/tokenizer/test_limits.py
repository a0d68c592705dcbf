"""Tokenizer files that multiply text are refused, texts that cannot fit cost nothing, and encoding stops no thread."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.errors import ContextLengthError, ModelFileError
from mlxinfer.tokenizer import Tokenizer
from tests.unit.tokenizer import tiny

if TYPE_CHECKING:
    from pathlib import Path

HUNDREDFOLD = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 60}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TWICE = TEMPLATE | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [HUNDREDFOLD] * 6}},
        {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 60}] * 6}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10_000_000}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}},
        {"decoder": {"type": "Sequence", "decoders": [HUNDREDFOLD] * 2}},
        {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}},
        {"post_processor": {"type": "Sequence", "processors": [TWICE] * 40}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAGFh" + "YWFh" * 1000}},
    ],
)
def test_a_tokenizer_whose_steps_multiply_text_is_a_model_file_error(steps: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="at most"):
        Tokenizer.from_parts(tokenizer_json=tiny.byte_level() | steps)


def test_steps_as_real_tokenizers_have_them_pass() -> None:
    replace = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    steps = [{"type": "NFKC"}, {"type": "Strip", "strip_left": False, "strip_right": True}, replace]
    parts = tiny.byte_level() | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    assert Tokenizer.from_parts(tokenizer_json=parts).encode("hello")
    assert Tokenizer.from_parts(tokenizer_json=tiny.sentencepiece(adds_bos=True)).encode("a" * 100_000)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    import json

    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny.byte_level()))
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match=r"regular file|opened"):
        Tokenizer.from_folder(tmp_path)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    tok = Tokenizer.from_parts(tokenizer_json=tiny.byte_level(), chat_template=tiny.CHATML)
    text = "a" * 9_000_000
    start = time.perf_counter()
    with pytest.raises(ContextLengthError, match="9,000,000 bytes"):
        tok.encode(text, max_tokens=4096)
    with pytest.raises(ContextLengthError):
        tok.chat_ids([{"role": "user", "content": text}], 4096)
    assert time.perf_counter() - start < 0.5
    assert len(tok.encode("the cat " * 400, max_tokens=4096)) < 4096


def test_a_template_that_writes_more_than_fits_is_stopped_before_encoding() -> None:
    tok = Tokenizer.from_parts(tokenizer_json=tiny.byte_level(), chat_template="{{ 'x' * 10000000 }}")
    start = time.perf_counter()
    with pytest.raises(ContextLengthError):
        tok.chat_ids([{"role": "user", "content": "a"}], 4096)
    assert time.perf_counter() - start < 0.5


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tok = Tokenizer.from_parts(tokenizer_json=tiny.byte_level())
    text = "ab cd " * 300_000
    ends: list[float] = []
    thread = threading.Thread(target=lambda: (tok.encode(text), ends.append(time.perf_counter())))
    start = time.perf_counter()
    thread.start()
    ticks = 0
    while thread.is_alive():
        time.sleep(0.002)
        ticks += 1
    thread.join()
    assert ticks > 10 * (ends[0] - start)  # ten turns in each second, at the least; holding the GIL leaves one in all
