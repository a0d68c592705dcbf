"""The real program on real models: GGUF → mlx-lm folder → GGUF, what llama.cpp makes of it, and a kill at any moment.

What needs llama.cpp runs where LLAMA_CPP_PYTHON names a Python that has the `xllamacpp` package.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
import tokenizers

from mlxinfer.formats.gguf import read_gguf
from tests.parity.make_goldens import TEXTS
from tests.unit.convert.export.from_gguf import write_from_gguf

if TYPE_CHECKING:
    from pathlib import Path

EXPORT = [sys.executable, "-m", "mlxinfer", "export"]
LLAMA_CPP = os.environ.get("LLAMA_CPP_PYTHON")
needs_llama_cpp = pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP_PYTHON names no Python with xllamacpp")
PROMPT = "The capital of France is"
PIECES = [
    "Hello", " world", "  ", "\n", "\n\n", "\t", "1234", "3.14", " the", "don't", "'LL", "é", "e\u0301", "你好",
    "Привет", " 😀", "👩‍👩‍👧", "<|im_start|>", "<bos>", "<start_of_turn>", "<unk>", "▁", "▁▁", "\u00a0", "\u200b",
    "_x", "!!!", "(a[i])", "<b>", "\r\n", "ﷺ", "Z", " ", "   ", "½", "안녕", "<table>", "\x01", "…",
]  # fmt: skip
ASK = """
import json, os, sys, urllib.request
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup = sys.argv[1], 512, False
server = xllamacpp.Server(params)
def post(path, body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
work = json.load(open(sys.argv[2]))
options = {"add_special": True, "parse_special": True}
tokens = [post("/tokenize", {"content": t, **options})["tokens"] for t in work["texts"]]
text = post("/completion", {"prompt": work["prompt"], "n_predict": 8, "temperature": 0.0})["content"]
json.dump({"tokens": tokens, "text": text}, open(sys.argv[3], "w"))
os._exit(0)
"""


def export(*args: object, **options: Any) -> dict[str, Any]:
    command = [*EXPORT, *map(str, args), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=240, check=True, **options)
    return json.loads(done.stdout)


def texts(count: int = 500) -> list[str]:
    """The tricky ones of the goldens, and more of random pieces and characters."""
    rng = random.Random(11)
    ranges = [(32, 126), (0xA0, 0x2FF), (0x370, 0x5FF), (0x3000, 0x9FFF), (0x1F300, 0x1FAFF)]
    found = list(TEXTS)
    while len(found) < count:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        found.append(text + "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.choice([0, 0, 8]))))
    return found


def ask_llama_cpp(path: Path, work: Path) -> dict[str, Any]:
    """What it tokenizes `texts` to, and how it goes on after PROMPT."""
    (work / "ask.json").write_text(json.dumps({"texts": texts(), "prompt": PROMPT}))
    command = [str(LLAMA_CPP), "-c", ASK, str(path), str(work / "ask.json"), str(work / "told.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return json.loads((work / "told.json").read_text())


def check_tokens(folder: Path, told: dict[str, Any]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = [tokenizer.encode(text).ids for text in texts()]
    assert [pair for pair in zip(texts(), ours, told["tokens"], strict=True) if pair[1] != pair[2]] == []


@pytest.fixture(scope="module")
def demo(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_from_gguf(tmp_path_factory.mktemp("demo") / "mlx", demo_gguf)


@pytest.mark.model
def test_every_tensor_of_the_demo_model_comes_back_byte_for_byte(demo: Path, demo_gguf: Path, tmp_path: Path) -> None:
    report = export(demo, tmp_path / "m.gguf")
    assert report["handling"] == {"exact": 272}
    before, after = read_gguf(demo_gguf), read_gguf(tmp_path / "m.gguf")
    assert {t.type.name for t in before.tensors.values()} == {"Q4_1", "Q8_0", "F32"}
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        assert (after.tensors[name].type, after.tensors[name].shape) == (tensor.type, tensor.shape)
        assert np.array_equal(after.tensors[name].read(), tensor.read()), name
    kept = [k for k in before.metadata if k.startswith(("llama.", "tokenizer."))]
    lost = {"tokenizer.ggml.add_space_prefix", "tokenizer.ggml.unknown_token_id"}  # of no meaning to byte-level BPE
    assert {k for k in kept if before.metadata[k] != after.metadata.get(k)} <= lost


@pytest.mark.model
@needs_llama_cpp
def test_llama_cpp_answers_from_the_exported_demo_model_and_splits_text_alike(demo: Path, tmp_path: Path) -> None:
    export(demo, tmp_path / "m.gguf")
    told = ask_llama_cpp(tmp_path / "m.gguf", tmp_path)
    assert "Paris" in told["text"]
    check_tokens(demo, told)


@pytest.mark.model
@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_llama_cpp_answers_from_the_demo_model_dequantized(demo: Path, tmp_path: Path, dtype: str) -> None:
    export(demo, tmp_path / "hf", "--dtype", "float32")
    export(tmp_path / "hf", tmp_path / "m.gguf", "--dtype", dtype)
    assert "Paris" in ask_llama_cpp(tmp_path / "m.gguf", tmp_path)["text"]


@pytest.mark.slow
@needs_llama_cpp
def test_gemma_goes_on_in_llama_cpp_and_splits_text_alike(gemma_gguf: Path, tmp_path: Path) -> None:
    folder = write_from_gguf(tmp_path / "mlx", gemma_gguf, mx.float16)
    report = export(folder, tmp_path / "m.gguf")
    assert {t["type"] for t in report["tensors"]} == {"F32", "Q4_1", "Q5_1", "Q8_0"}
    before, after = read_gguf(gemma_gguf), read_gguf(tmp_path / "m.gguf")
    eights = [n for n, t in before.tensors.items() if t.type.name == "Q8_0"]
    assert eights
    assert all(np.array_equal(before.tensors[n].read(), after.tensors[n].read()) for n in eights)
    told = ask_llama_cpp(tmp_path / "m.gguf", tmp_path)
    assert told["text"].startswith(ask_llama_cpp(gemma_gguf, tmp_path)["text"][:20])
    check_tokens(folder, told)


@pytest.fixture(scope="module")
def whole(demo: Path) -> Path:
    """Of an export that nothing disturbed."""
    export(demo, demo.parent / "whole", "--dtype", "float32")
    return demo.parent / "whole"


@pytest.mark.model
@pytest.mark.parametrize("moment", [pytest.param(0.1, marks=pytest.mark.slow), 0.5])
def test_a_kill_leaves_the_destination_absent_or_whole(demo: Path, whole: Path, tmp_path: Path, moment: float) -> None:
    size = (whole / "model.safetensors").stat().st_size
    process = subprocess.Popen(
        [*EXPORT, str(demo), str(tmp_path / "hf"), "--dtype", "float32"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def written() -> int:
        return sum(p.stat().st_size for p in tmp_path.glob(".hf.*.partial/*"))

    while process.poll() is None and written() < moment * size:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "hf").exists() or process.returncode == 0
    export(demo, tmp_path / "hf", "--dtype", "float32")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"], "what the killed one left is gone"
    for path in whole.iterdir():
        assert path.read_bytes() == (tmp_path / "hf" / path.name).read_bytes()
