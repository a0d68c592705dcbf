"""What a model name means. Nothing here looks at a disk except to ask whether a path exists.

./folder  /abs/folder  ~/folder  file.gguf      a path: starts with . / ~ or ends in .gguf
smollm2-135m                                    an alias of the catalogue (an alias wins over a folder of that name)
ollama:llama3.2:1b   llama.cpp:file.gguf        a file in another program's store
org/name[@revision][:file.gguf or :QUANT]       a hub id; QUANT picks a GGUF, for example :Q4_K_M
name/of/folder                                  a folder with a config.json, if the name is none of the above
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxinfer.errors import ModelNotFoundError
from mlxinfer.zoo.entries import find_entry

MAX_NAME = 512
STORES = ("ollama", "llama.cpp")
HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][\w./-]{0,127}))?"
    r"(?::(?P<file>[A-Za-z0-9][\w./-]{0,255}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A checked name, taken apart."""

    text: str
    kind: Literal["path", "alias", "store", "hub", "unknown"]
    path: Path | None = None
    repo: str = ""
    revision: str = "main"
    file: str = ""
    """A file of the repository or a quantization, for GGUF."""
    store: str = ""
    """"ollama" or "llama.cpp"; `file` is the name in it."""


def parse_name(text: str) -> ModelName:
    """Take a name apart. Raises ModelNotFoundError for one that can be no model's name."""
    check_name(text)
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or text.lower().endswith(".gguf"):
        store, _, rest = text.partition(":")
        if store in STORES and rest:
            return _store_name(text)
        hub = HUB_NAME.fullmatch(text)
        if not (hub and hub["file"]):
            try:
                return ModelName(text, "path", path=Path(text).expanduser())
            except RuntimeError:
                raise ModelNotFoundError(f"there is no model at {text!r:.160}: that home folder is not known") from None
    if find_entry(text) is not None:
        return ModelName(text, "alias")
    if text.partition(":")[0] in STORES and ":" in text:
        return _store_name(text)
    # Not Path.is_file, which raises for a name that is too long for the file system.
    if os.path.isfile(Path(text) / "config.json"):
        return ModelName(text, "path", path=Path(text))
    match = HUB_NAME.fullmatch(text)
    if match and not has_dots(text):
        return ModelName(
            text, "hub", repo=match["repo"], revision=match["revision"] or "main", file=match["file"] or ""
        )
    return ModelName(text, "unknown")


def check_name(text: str) -> None:
    """Refuse what can only be a mistake or an attack, before any file system or network sees it."""
    if not text.strip():
        raise ModelNotFoundError("the model's name is empty; see `mlxinfer ls` for what is there")
    if len(text) > MAX_NAME:
        raise ModelNotFoundError(f"a model's name has at most {MAX_NAME} characters, this one has {len(text)}")
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise ModelNotFoundError(f"a model's name holds no control characters: {text!r:.120}")


def has_dots(text: str) -> bool:
    """True when a part of a hub id, revision or store name is ".." and would climb out of a folder."""
    return any(part in ("..", ".") for part in re.split(r"[/\\:@]", text))


def _store_name(text: str) -> ModelName:
    store, _, rest = text.partition(":")
    if has_dots(rest) or rest.startswith("/") or "\\" in rest:
        raise ModelNotFoundError(f"{text!r:.120} is not a name of the {store} store")
    return ModelName(text, "store", store=store, file=rest)
