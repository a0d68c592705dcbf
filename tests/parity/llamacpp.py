"""llama.cpp's tokenizer, out of the `xllamacpp` package of another environment (see make_goldens.py)."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def tokenizer_of(path: Path) -> Callable[[str, bool], list[int]]:
    """llama.cpp's (text, add BOS?) to ids; special tokens in the text count."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.warmup = False
    server = xllamacpp.Server(params)

    def ids(text: str, add_special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": add_special, "parse_special": True}).encode()
        address = f"{server.listening_address}/tokenize"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]

    return ids
