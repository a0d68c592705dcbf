"""Small models as bytes, folders and hub repositories."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from tests.unit.zoo.fake_hub import Repo

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 512,
}


def safetensors(**tensors: tuple[int, ...]) -> bytes:
    """A sound file of zero float32 tensors."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors.items():
        size = 4
        for axis in shape:
            size *= axis
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def model_repo(**changes: Any) -> Repo:
    """A whole small model as the hub would hold it, code and a pickle beside it."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors(weight=(512, 1024)),
        "modeling_evil.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"a second copy",
        "README.md": b"---\nlicense: mit\n---\n",
    }
    return Repo(files={**files, **changes.pop("files", {})}, **changes)


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(safetensors(weight=(4, 8)))
    return folder
