"""An adapter on a real model: beside its base here, beside it in llama.cpp, and in its weights, it says the same.

What needs llama.cpp runs where LLAMA_CPP_PYTHON names a Python that has the `xllamacpp` package.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers

from mlxinfer import upstream
from mlxinfer.convert.export.gguf import export_gguf
from mlxinfer.convert.export.huggingface import export_huggingface
from mlxinfer.formats.safetensors import shard_files
from mlxinfer.lora import MethodOptions, save_adapter
from mlxinfer.lora.exchange import export_adapter
from mlxinfer.lora.fuse import fuse
from tests.adapters import mlx_lm_tokens
from tests.unit.convert.export.from_gguf import write_from_gguf
from tests.unit.lora.exchange.made import adapt

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_CPP = os.environ.get("LLAMA_CPP_PYTHON")
PROMPTS = ["The capital of France is", "Once upon a time", "Water boils when"]
LENGTH = 16
ASK = """
import json, os, sys, urllib.request
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup = sys.argv[1], 512, False
if sys.argv[2]:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(sys.argv[2], 1.0)]
server = xllamacpp.Server(params)
work, said = json.load(open(sys.argv[3])), []
for prompt in work["prompts"]:
    body = {"prompt": prompt, "n_predict": work["length"], "temperature": 0.0, "return_tokens": True}
    request = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    said.append(json.load(urllib.request.urlopen(request, timeout=120))["tokens"])
json.dump(said, open(sys.argv[4], "w"))
os._exit(0)
"""


@pytest.fixture(scope="module")
def base(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in float32."""
    folder = tmp_path_factory.mktemp("base")
    export_huggingface(write_from_gguf(folder / "packed", demo_gguf), folder / "floats", dtype="float32")
    return folder / "floats"


def make_adapter(folder: Path, base: Path) -> Path:
    options = MethodOptions("rslora", rank=8, alpha=16.0)
    model: Any = upstream.load_folder(base, shard_files(base))[0]
    save_adapter(folder, adapt(model, options, size=0.02), options, {})
    return folder


def ids_of(base: Path) -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def ours(base: Path, adapter: Path | None) -> list[list[int]]:
    """Up to the end token, where llama.cpp stops."""
    end = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json")).token_to_id("<|im_end|>")
    said = [mlx_lm_tokens(base, adapter, ids, LENGTH) for ids in ids_of(base)]
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in said]


def llama_cpp(model: Path, adapter: Path | str, work: Path) -> list[list[int]]:
    (work / "ask.json").write_text(json.dumps({"prompts": PROMPTS, "length": LENGTH}))
    command = [str(LLAMA_CPP), "-c", ASK, str(model), str(adapter), str(work / "ask.json"), str(work / "told.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((work / "told.json").read_text())


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP_PYTHON names no Python with xllamacpp")
def test_llama_cpp_says_the_same_with_the_adapter_as_the_model_here_and_the_fused_one(
    base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", base)
    fuse(base, adapter, tmp_path / "fused")
    export_adapter(base, adapter, tmp_path / "adapter.gguf", "gguf")
    export_gguf(base, tmp_path / "base.gguf", floats="float32")
    said = ours(base, adapter)
    assert ours(tmp_path / "fused", None) == said
    assert llama_cpp(tmp_path / "base.gguf", tmp_path / "adapter.gguf", tmp_path) == said
    plain = llama_cpp(tmp_path / "base.gguf", "", tmp_path)
    assert plain == ours(base, None)
    assert plain != said, "the adapter does something"
