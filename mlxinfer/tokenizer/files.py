"""What a tokenizer's files say: the backend, the chat templates, the special tokens. Nothing in them is trusted."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object, read_regular
from mlxinfer.tokenizer import limits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import tokenizers

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_JSON_BYTES = 256 << 20
OTHER_FORMATS = ("tokenizer.model", "*.tiktoken", "tekken.json", "spiece.model", "vocab.json")
"""Files that only transformers can turn into a tokenizer."""


def load_backend(folder: Path) -> tuple[tokenizers.Tokenizer, int]:
    """The tokenizer, and how much its steps may multiply a text."""
    path = folder / "tokenizer.json"
    if (text := read_text(path)) is not None:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{path} is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ModelFileError(f"{path} must hold a JSON object, not {type(parsed).__name__}")
        growth = limits.check_steps(parsed, str(path))
        del parsed
        return parse_backend(text, str(path)), growth
    if found := [path for pattern in OTHER_FORMATS for path in folder.glob(pattern)]:
        if odd := next((path for path in found if not path.is_file()), None):
            raise ModelFileError(f"{odd} is no regular file")
        return backend_from_transformers(folder), 1
    names = ", ".join(("tokenizer.json", *OTHER_FORMATS))
    raise ModelFileError(f"{folder} has no tokenizer: looked for {names}")


def parse_backend(text: str, where: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        raise mapped(error, f"{where} is not a sound tokenizer") from error


def mapped(error: BaseException, what: str) -> BaseException:
    """The Rust side raises Exception itself, and for its own panics a BaseException that no module exports."""
    if isinstance(error, TypeError | OverflowError):  # the caller's: ids that are no ids
        return error
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ModelFileError(f"{what}: {error}")
    return error


def backend_from_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Convert a SentencePiece or tiktoken file; slow to import, so only for folders without a tokenizer.json."""
    import transformers

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelFileError(f"{folder}: transformers cannot read this tokenizer: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"{folder}: {type(loaded).__name__} has no fast form; convert it to a tokenizer.json first"
        )
    return backend


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named templates; a file of its own wins over tokenizer_config.json."""
    value: Any = config.get("chat_template")
    if (text := read_text(folder / "chat_template.jinja")) is not None:
        value = text
    elif (parsed := read_json_object(folder / "chat_template.json")) is not None:
        value = parsed.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, str] = {}
    if isinstance(value, dict):
        templates = {k: v for k, v in value.items() if isinstance(v, str)}
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = entry["template"]
    if templates and "default" not in templates:
        templates["default"] = next(iter(templates.values()))
    return templates


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", …}; each value is a string or an object with "content"."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token") and _NAME.fullmatch(key):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[key] = content
    return found


def token_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def read_text(path: Path) -> str | None:
    data = read_regular(path, MAX_JSON_BYTES)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
