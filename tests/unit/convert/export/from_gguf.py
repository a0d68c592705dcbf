"""A GGUF file as a folder of mlx-lm, by the reader of mlxinfer.formats, so that an export can be held against it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.formats.gguf import load_gguf

if TYPE_CHECKING:
    from pathlib import Path


def write_from_gguf(folder: Path, path: Path, dtype: mx.Dtype | None = None) -> Path:
    """The model in `path` with its tokenizer; `dtype` as in load_gguf."""
    gguf = load_gguf(path, dtype=dtype)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), gguf.weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(gguf.config))
    (folder / "tokenizer.json").write_text(json.dumps(gguf.tokenizer_json))
    (folder / "generation_config.json").write_text(json.dumps(gguf.generation_config))
    named = {"bos_token": gguf.bos_token, "eos_token": gguf.eos_token, "chat_template": gguf.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in named.items() if v is not None}))
    return folder
