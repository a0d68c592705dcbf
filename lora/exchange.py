"""Adapters out to PEFT and llama.cpp, and in from them, by the paths of base, adapter and destination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlxinfer.errors import InvalidRequestError, ModelFileError
from mlxinfer.formats.files import read_json_object
from mlxinfer.lora import adapter as folders
from mlxinfer.lora.bases import open_base
from mlxinfer.lora.card import CARD, adapter_card
from mlxinfer.lora.gguf import read_adapter_gguf, write_adapter_gguf
from mlxinfer.lora.peft import LEFT_OUT, NOTE, read_peft
from mlxinfer.lora.peft_write import write_peft
from mlxinfer.lora.places import new_folder, put_text

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.lora.adapter import Adapter

Form = Literal["peft", "gguf"]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What was written."""

    path: Path
    form: Literal["peft", "gguf", "mlx"]
    method: str
    rank: int
    scale: float
    layers: int
    nbytes: int
    """Of its tensors."""
    notes: tuple[str, ...] = ()


def export_adapter(base: Path, adapter: Path, destination: Path, form: Form, *, base_name: str = "") -> Exchanged:
    """Write `adapter`, a folder of mlx-lm's for the model at `base`, for PEFT or llama.cpp.

    `destination` must not exist. `base_name` is what the base is published under. Raises as read_adapter, write_peft
    and write_adapter_gguf do.
    """
    opened = open_base(base)
    found = folders.read_adapter(adapter, opened.model)
    if form == "gguf":
        nbytes = write_adapter_gguf(destination, found, opened.model, opened.config)
    else:
        card = adapter_card(found.options, name=destination.name, base=base_name, base_folder=base, library="peft")
        nbytes = write_peft(destination, found, opened.model, base=base_name, card=card)
    return _exchanged(destination, form, found, nbytes, ())


def import_adapter(base: Path, source: Path, destination: Path, *, base_name: str = "") -> Exchanged:
    """Write `source`, PEFT's folder or llama.cpp's GGUF file for the model at `base`, as a folder of mlx-lm's.

    `destination` must not exist. Raises as read_peft and read_adapter_gguf do.
    """
    if source.is_dir() and _is_ours(source):
        raise InvalidRequestError(f"{source} is an adapter of mlx-lm's already", param="adapter")
    opened = open_base(base)
    if source.is_dir():
        found = read_peft(source, opened.model)
    else:
        found = read_adapter_gguf(source, opened.model, opened.config)
    nbytes = sum(array.nbytes for array in found.weights.values())
    card = adapter_card(found.options, name=destination.name, base=base_name, base_folder=base)
    with new_folder(destination, nbytes) as work:
        folders.write_adapter(work, found, opened.model)
        put_text(work / CARD, card)
    return _exchanged(destination, "mlx", found, nbytes, _notes(found))


def _is_ours(folder: Path) -> bool:
    config = read_json_object(folder / folders.CONFIG)
    if config is None:
        raise ModelFileError(f"{folder / folders.CONFIG} is missing; is {folder} an adapter?")
    return "peft_type" not in config and "fine_tune_type" in config


def _notes(adapter: Adapter) -> tuple[str, ...]:
    notes: list[str] = []
    if uneven := adapter.notes.get(NOTE):
        notes.append(
            f"{len(uneven)} layers had a rank or scale of their own; they are padded with zeros to rank "
            f"{adapter.options.rank} and scaled in lora_b"
        )
    if copies := adapter.notes.get(LEFT_OUT):
        notes.append(f"left out, as the base has them: {', '.join(copies)}")
    return tuple(notes)


def _exchanged(
    path: Path, form: Literal["peft", "gguf", "mlx"], adapter: Adapter, nbytes: int, notes: tuple[str, ...]
) -> Exchanged:
    options = adapter.options
    layers = len(options.targets)
    return Exchanged(path, form, options.method, options.rank, options.scale, layers, nbytes, notes)
