"""What a model on this machine is, without loading a weight: config, headers and file sizes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import open_regular, read_json_object
from mlxinfer.formats.safetensors import check_safetensors
from mlxinfer.zoo.checks import MAX_CONFIG_BYTES, read_config, weight_files
from mlxinfer.zoo.entries import CacheShape, catalog, find_entry
from mlxinfer.zoo.resolver import resolve
from mlxinfer.zoo.shapes import context_of, count_of, shape_from_config, shape_from_gguf

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from mlxinfer.config import Settings
    from mlxinfer.zoo.entries import CatalogEntry
    from mlxinfer.zoo.files import ModelFiles

MAX_LISTED_FILES = 256
MAX_WORD = 80
"""Characters of a name or licence that a file may state; more is no name."""
README_HEAD = 4096


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts `show` prints; "" and 0 mean that the files don't say."""

    name: str
    origin: str
    kind: str
    path: str
    architecture: str
    parameters: int
    context_length: int
    quantization: str
    licence: str
    size_bytes: int
    capabilities: tuple[str, ...]
    files: tuple[tuple[str, int], ...]
    """(relative name, bytes)."""
    cache: CacheShape

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def describe(name: str, settings: Settings) -> ModelCard:
    """The card of a model that is on this machine. Raises as `resolve` with fetch=False, or ModelFileError."""
    return card_of(resolve(name, settings, fetch=False))


def card_of(model: ModelFiles) -> ModelCard:
    entry = find_entry(model.name) or next((e for e in catalog() if e.hub == model.name), None)
    return _gguf_card(model, entry) if model.kind == "gguf" else _folder_card(model, entry)


def _folder_card(model: ModelFiles, entry: CatalogEntry | None) -> ModelCard:
    config = read_config(model.path / "config.json")
    weights = weight_files(model.path)
    if weights is None:
        raise ModelFileError(f"{model.path} has lost some of its weights; pull {model.name} again")
    tokenizer = read_json_object(model.path / "tokenizer_config.json", MAX_CONFIG_BYTES) or {}
    template = tokenizer.get("chat_template")
    chat = (model.path / "chat_template.jinja").is_file() or (model.path / "chat_template.json").is_file()
    return ModelCard(
        name=model.name,
        origin=model.origin,
        kind=model.kind,
        path=str(model.path),
        architecture=_word(config.get("model_type")),
        parameters=_count(weights, config),
        context_length=context_of(config),
        quantization=_quantization(config),
        licence=entry.licence if entry else _licence(model.path / "README.md"),
        size_bytes=model.size_bytes,
        capabilities=entry.capabilities if entry else _capabilities(config, chat, template, model.path),
        files=_listing(model.path),
        cache=shape_from_config(config),
    )


def _gguf_card(model: ModelFiles, entry: CatalogEntry | None) -> ModelCard:
    from mlxinfer.formats.gguf import read_gguf

    file = read_gguf(model.path)
    meta, arch = file.metadata, file.architecture
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    template = meta.get("tokenizer.chat_template")
    guessed = _template_capabilities(template) if isinstance(template, str) else ("completion",)
    return ModelCard(
        name=model.name,
        origin=model.origin,
        kind=model.kind,
        path=str(model.path),
        architecture=arch,
        parameters=sum(t.size for t in file.tensors.values()),
        context_length=count_of(meta, f"{arch}.context_length"),
        quantization="GGUF " + ", ".join(sorted(sizes, key=lambda k: -sizes[k])[:3]),
        licence=entry.licence if entry else _word(meta.get("general.license")),
        size_bytes=model.size_bytes,
        capabilities=entry.capabilities if entry else guessed,
        files=((model.path.name, model.size_bytes),),
        cache=shape_from_gguf(arch, meta),
    )


def _count(weights: Iterable[Path], config: dict[str, Any]) -> int:
    """Parameters out of the safetensors headers; packed 32-bit words are unpacked by the config's bits.

    Of torch's .bin files, whose headers are pickles, out of their sizes.
    """
    bits = _bits(config)
    total = 0
    for path in weights:
        if path.suffix == ".bin":
            total += path.stat().st_size // (
                4 if _word(config.get("torch_dtype") or config.get("dtype")) == "float32" else 2
            )
            continue
        for name, info in check_safetensors(path).items():
            count = math.prod(info.shape)
            if info.dtype == "U32" and bits:
                total += count * 32 // bits
            elif not name.endswith((".scales", ".biases")):
                total += count
    return total


def _bits(config: dict[str, Any]) -> int:
    quantization = config.get("quantization")
    bits = count_of(quantization, "bits") if isinstance(quantization, dict) else 0
    return bits if bits <= 8 else 0


def _quantization(config: dict[str, Any]) -> str:
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, dict):
        return _word(config.get("torch_dtype")) or _word(config.get("dtype")) or "none"
    mode = _word(quantization.get("mode")) or _word(quantization.get("quant_method")) or "affine"
    bits, group = count_of(quantization, "bits"), count_of(quantization, "group_size")
    return f"{mode} {bits}-bit, group {group}" if bits and group else f"{mode} {bits}-bit" if bits else mode


def _word(value: object) -> str:
    """A name that a file states; "" for what is none."""
    return value if isinstance(value, str) and len(value) <= MAX_WORD and value.isprintable() else ""


def _capabilities(config: dict[str, Any], chat: bool, template: object, folder: Path) -> tuple[str, ...]:
    if (folder / "modules.json").is_file():
        return ("embedding",)
    vision = ("vision",) if "vision_config" in config else ()
    if isinstance(template, str):
        return _template_capabilities(template) + vision
    return (("chat",) if chat else ("completion",)) + vision


def _template_capabilities(template: str) -> tuple[str, ...]:
    """What a chat template mentions is what the model was trained to answer."""
    tools = ("tools",) if "tools" in template else ()
    thinking = ("thinking",) if "enable_thinking" in template or "<think>" in template else ()
    return ("chat", *thinking, *tools)


def _licence(readme: Path) -> str:
    """The licence of a hub model card's front matter."""
    try:
        file = open_regular(readme)
        if file is None:
            return ""
        with file:
            head = file.read(README_HEAD).decode("utf-8", errors="replace")
    except (OSError, ModelFileError):
        return ""
    for line in head.splitlines()[1:60] if head.startswith("---") else ():
        if line.startswith("license:"):
            return _word(line.partition(":")[2].strip()[:MAX_WORD])
    return ""


def _listing(folder: Path) -> tuple[tuple[str, int], ...]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return tuple((p.relative_to(folder).as_posix(), p.stat().st_size) for p in files[:MAX_LISTED_FILES])
