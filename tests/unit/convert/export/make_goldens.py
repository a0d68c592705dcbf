"""Make tests/fixtures/export.npz: what transformers and llama.cpp compute from the exported tiny models.

Neither belongs into this project's environment; make others beside it, and run each step where it can:

    python3 -m venv /tmp/reference && /tmp/reference/bin/pip install torch transformers xllamacpp
    python -m tests.unit.convert.export.make_goldens write FOLDER
    /tmp/reference/bin/python tests/unit/convert/export/make_goldens.py transformers FOLDER
    /tmp/reference/bin/python tests/unit/convert/export/make_goldens.py llamacpp FOLDER
    python -m tests.unit.convert.export.make_goldens collect FOLDER

Per family: digests of the exported weights, transformers' logits of IDS for every STRIDE-th token, and llama.cpp's TOP
best tokens after each of PROMPTS with their log probabilities. A tensor that is missing from an export, or that
transformers doesn't know, ends the second step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

FIXTURE = Path(__file__).parents[3] / "fixtures" / "export.npz"
IDS = [1, 40, 7, 99, 263, 12, 8, 8, 150, 201, 33, 64, 90, 17, 2, 270]
PROMPTS = [IDS[:14], IDS[:9], IDS[4:12]]
STRIDE, TOP = 8, 24
QUANTIZATION = {"bits": 4, "group_size": 32}


def digest(folder: Path) -> bytes:
    """Of safetensors."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()


def gguf_digest(path: Path) -> bytes:
    """Of tensors and metadata; not of the tokenizer, which plays no part in logits."""
    from mlxinfer.formats.gguf import read_gguf

    file = read_gguf(path)
    found = hashlib.sha256()
    for key, value in file.metadata.items():
        found.update(b"" if key.startswith("tokenizer.") else f"{key}={value!r}\n".encode())
    for name, tensor in file.tensors.items():
        found.update(f"{name}{tensor.shape}{tensor.type.name}\n".encode() + tensor.read().tobytes())
    return found.digest()


def write(root: Path) -> None:
    from mlxinfer.convert.export.gguf import export_gguf
    from mlxinfer.convert.export.huggingface import export_huggingface
    from tests.unit.convert.export import models

    for family in models.FAMILIES:
        packed = models.write(root / "packed" / family, family, quantization=QUANTIZATION)
        plain = models.write(root / "plain" / family, family)
        for folder in ("hf", "gguf"):
            (root / folder).mkdir(exist_ok=True)
        export_huggingface(packed, root / "hf" / family, dtype="float32")
        export_gguf(plain, root / "gguf" / f"{family}.gguf")


def run_transformers(root: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    arrays: dict[str, np.ndarray] = {}
    for folder in sorted((root / "hf").iterdir()):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
        )
        wrong = {kind: names for kind, names in info.items() if names}
        assert not wrong, f"{folder.name}: {wrong}"
        if folder.name == "gemma":
            for layer in model.model.layers:
                layer.mlp.act_fn = torch.nn.GELU()  # mlx-lm's Gemma 1 has the exact one, transformers an approximation
        with torch.no_grad():
            logits = model(torch.tensor([IDS])).logits[0].numpy()
        arrays[f"hf_{folder.name}"] = logits[:, ::STRIDE].astype(np.float32)
    np.savez(root / "hf.npz", **arrays)


def run_llama_cpp(root: Path) -> None:
    """One process for each file: a server can't be ended in its own."""
    found: dict[str, Any] = {}
    for path in sorted((root / "gguf").glob("*.gguf")):
        if os.fork() == 0:
            (root / "one.json").write_text(json.dumps(best_tokens(path)))
            os._exit(0)
        assert os.wait()[1] == 0, path
        found[path.stem] = json.loads((root / "one.json").read_text())
    (root / "gguf.json").write_text(json.dumps(found))


def best_tokens(path: Path) -> list[list[tuple[int, float]]]:
    """For each prompt (id, log probability) of the likeliest tokens; none where llama.cpp would end."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.warmup = 512, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    found = []
    for ids in PROMPTS:
        body = {"prompt": ids, "n_predict": 1, "n_probs": TOP, "temperature": 0.0, "cache_prompt": False}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            steps = json.load(answer).get("completion_probabilities")
        found.append([(e["id"], e["logprob"]) for e in steps[0]["top_logprobs"]] if steps else [])
    return found


def collect(root: Path) -> None:
    arrays = dict(np.load(root / "hf.npz"))
    for family, prompts in json.loads((root / "gguf.json").read_text()).items():
        assert any(prompts), f"{family}: llama.cpp ends after each prompt"
        arrays[f"hf_{family}_sha256"] = np.frombuffer(digest(root / "hf" / family), dtype=np.uint8)
        arrays[f"gguf_{family}_sha256"] = np.frombuffer(gguf_digest(root / "gguf" / f"{family}.gguf"), dtype=np.uint8)
        for index, best in enumerate(prompts):
            arrays[f"gguf_{family}_{index}"] = np.array(best, dtype=np.float64).reshape(-1, 2)
    np.savez_compressed(FIXTURE, **arrays)


if __name__ == "__main__":
    steps = {"write": write, "transformers": run_transformers, "llamacpp": run_llama_cpp, "collect": collect}
    steps[sys.argv[1]](Path(sys.argv[2]))
