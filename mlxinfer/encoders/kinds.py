"""Which models make embeddings or scores instead of text, told from their files. No mlx at import.

In this order:
1. config.json has an encoder's model_type: a reranker when it is a `…ForSequenceClassification`, else embeddings.
2. Qwen3's embedding models and rerankers are plain Qwen3 decoders by their config. One is known by its name: the one
   it was asked for under, that of its folder or repository, or one in the README's front matter (`base_model`).
3. modules.json, sentence-transformers' list of parts, lies there: embeddings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import open_regular, read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EncoderKind = Literal["embedding", "reranker"]

FAMILIES = frozenset({"bert", "camembert", "distilbert", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta"})
"""model_type of the encoders that run here."""
CLASSIFIER = "ForSequenceClassification"
README_BYTES = 16 << 10
_QWEN3 = re.compile(r"qwen3-(embedding|reranker)(?![a-z])", re.IGNORECASE)


def encoder_kind(folder: Path, *names: str) -> EncoderKind | None:
    """What the model in `folder` makes, or None for one that writes text. `names` are those it goes by.

    Raises ModelFileError for a config.json that can't be read; a missing one is None.
    """
    config = read_json_object(folder / "config.json") if folder.is_dir() else None
    if config is None:
        return None
    if config.get("model_type") in FAMILIES:
        return "reranker" if is_classifier(config) else "embedding"
    if config.get("model_type") == "qwen3" and (kind := _qwen3_kind(folder, names)):
        return kind
    return "embedding" if (folder / "modules.json").is_file() else None


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the weights end in a head that scores a sequence."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(str(name).endswith(CLASSIFIER) for name in architectures)


def is_qwen3(folder: Path, *names: str) -> bool:
    """Whether a folder holds one of Qwen3's own embedding models or rerankers."""
    return _qwen3_kind(folder, names) is not None


def _qwen3_kind(folder: Path, names: tuple[str, ...]) -> EncoderKind | None:
    # In the hub's cache a model lies in models--ORG--NAME/snapshots/COMMIT.
    repository = [part for part in folder.parts[-3:-2] if part.startswith("models--")]
    for text in (*names, folder.name, *repository, _front_matter(folder / "README.md")):
        if match := _QWEN3.search(text):
            return "embedding" if match[1].lower() == "embedding" else "reranker"
    return None


def _front_matter(readme: Path) -> str:
    """The YAML head of a model card, as text; "" where there is none."""
    try:
        file = open_regular(readme)
    except ModelFileError:
        return ""
    if file is None:
        return ""
    with file:
        head = file.read(README_BYTES).decode("utf-8", errors="replace")
    parts = head.split("\n---", 1)
    return parts[0] if head.startswith("---") and len(parts) == 2 else ""
