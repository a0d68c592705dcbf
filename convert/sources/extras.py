"""The files of a model that aren't its weights: the tokenizer, templates, generation settings. Known names only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.convert.tokenizers import tokenizer_json
from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_EXTRA_BYTES = 256 << 20
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model", "tiktoken.model", "qwen.tiktoken", "tekken.json",
    "preprocessor_config.json", "processor_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
    "USE_POLICY.md",
)  # fmt: skip
"""Nothing else of a folder is taken: no code, no other formats of the weights."""


def other_files(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, bytes | Path], list[str]]:
    """(files by name, notes). Raises ModelFileError for one that is no regular file or too large.

    A folder without tokenizer.json gets one made from its sentencepiece or tiktoken file; where that can't be done,
    a note says why.
    """
    found: dict[str, bytes | Path] = {}
    notes: list[str] = []
    for name in COPIED:
        path = folder / name
        file = open_regular(path)
        if file is None:
            continue
        with file:
            size = file.seek(0, 2)
        if size > MAX_EXTRA_BYTES:
            raise ModelFileError(f"{path} has {size} bytes; at most {MAX_EXTRA_BYTES} are copied")
        found[name] = path
    if "tokenizer.json" not in found:
        made, note = tokenizer_json(folder, config)
        if made is not None:
            found["tokenizer.json"] = made
        notes += [note] if note else []
    return found, notes
