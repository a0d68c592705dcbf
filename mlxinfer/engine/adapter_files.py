"""An adapter's folder, as mlx-lm writes it: adapter_config.json and adapters.safetensors. Checked; no array is made.

Nothing in it is trusted: both files are read within limits, and only numbers and names come out of the config.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from mlxinfer.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from mlxinfer.formats.files import open_regular, read_json_object
from mlxinfer.formats.safetensors import TensorInfo, check_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"
NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}", re.ASCII)
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16
MAX_SCALE = 3.4e38
"""What float32 holds; an integer of the config may have hundreds of digits."""
MAX_KEYS = 10_000
FLOATS = frozenset({"F16", "BF16", "F32"})
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What an adapter's folder says."""

    name: str
    folder: Path
    num_layers: int
    """The last so many layers have it; -1 or less: all."""
    rank: int
    scale: float
    keys: tuple[str, ...] | None
    """Paths of the adapted modules, within a layer or from the model; None: all that can be."""
    dora: bool
    tensors: Mapping[str, TensorInfo]
    digest: str
    """SHA-256 of the weights and of what the config says, in hexadecimal."""

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


def read_adapter(name: str, folder: Path) -> AdapterFiles:
    """Check the folder of an adapter that requests will call `name`. Reads the weights once, for their digest.

    Raises InvalidRequestError for the name, ModelNotFoundError when there is no adapter there, ModelFileError for files
    that are wrong, UnsupportedModelError for a kind of adapter that can't be used.
    """
    if not NAME.fullmatch(name):
        message = f"an adapter can't be called {name!r:.80}; up to 64 letters, digits and . _ + - make a name"
        raise InvalidRequestError(message, param="adapter")
    path = folder / CONFIG
    config = read_json_object(path, MAX_CONFIG_BYTES)
    if config is None:
        raise ModelNotFoundError(f"{folder} holds no {CONFIG}; the folder of an adapter is expected")
    dora = _is_dora(path, config)
    num_layers = config.get("num_layers")
    if not _is_int(num_layers) or abs(num_layers) > 1 << 20:
        raise ModelFileError(f"{path}: num_layers is {num_layers!r:.80}; an integer is expected")
    rank, scale, keys = _parameters(path, config)
    tensors = check_safetensors(folder / WEIGHTS)
    if not tensors:
        raise ModelFileError(f"{folder / WEIGHTS} holds no tensor")
    _check_belongs(path, config, folder / WEIGHTS)
    says = json.dumps([num_layers, rank, scale, keys, dora])
    digest = digest_of(folder / WEIGHTS, says)
    return AdapterFiles(name, folder, num_layers, rank, scale, keys, dora, tensors, digest)


def digest_of(path: Path, says: str) -> str:
    """SHA-256 of a file and of a text. Raises ModelFileError for a file that can't be read."""
    digest = hashlib.sha256(len(says).to_bytes(8, "little") + says.encode())
    file = open_regular(path)
    if file is None:
        raise ModelFileError(f"{path} is missing")
    try:
        with file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _check_belongs(path: Path, config: Mapping[str, Any], weights: Path) -> None:
    """The trainer writes into the config which weights it is of: other ones would run with a wrong scale."""
    ours = config.get("mlxinfer")
    wanted = ours.get("weights_sha256") if isinstance(ours, dict) else None
    file: Any = open_regular(weights) if wanted is not None else None
    if file is None:
        return
    with file:
        if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
            raise ModelFileError(
                f"{path} is the config of other weights than {weights.name}: mlxinfer.weights_sha256 differs. The "
                "folder was copied or saved in part; copy it anew, or delete that key if the weights were changed on "
                "purpose"
            )


def _is_dora(path: Path, config: Mapping[str, Any]) -> bool:
    if "peft_type" in config:
        raise UnsupportedModelError(f"{path} is PEFT's; convert it first: mlxinfer lora import")
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise UnsupportedModelError(
            f"{path}: fine_tune_type is 'full': these are weights of the model itself and no adapter beside it; "
            "make a model of them with mlxinfer lora fuse, and load that"
        )
    if kind not in ("lora", "dora"):
        raise UnsupportedModelError(f"{path}: fine_tune_type is {kind!r:.80}; lora and dora can be used")
    return kind == "dora"


def _parameters(path: Path, config: Mapping[str, Any]) -> tuple[int, float, tuple[str, ...] | None]:
    """(rank, scale, keys)."""
    given = config.get("lora_parameters")
    if not isinstance(given, dict):
        raise ModelFileError(f"{path}: lora_parameters is {given!r:.80}; an object with rank and scale is expected")
    rank, scale, keys = given.get("rank"), given.get("scale"), given.get("keys")
    if not _is_int(rank) or not 1 <= rank <= MAX_RANK:
        raise ModelFileError(f"{path}: lora_parameters.rank is {rank!r:.80}; it must be between 1 and {MAX_RANK}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) < MAX_SCALE:
        hint = " (mlx-lm's scale is what others call alpha / rank)" if "alpha" in given else ""
        raise ModelFileError(f"{path}: lora_parameters.scale is {scale!r:.80}; a number is expected{hint}")
    if keys is None:
        return rank, float(scale), None
    if not isinstance(keys, list) or len(keys) > MAX_KEYS or not all(isinstance(k, str) for k in keys):
        raise ModelFileError(f"{path}: lora_parameters.keys must be a list of up to {MAX_KEYS} module names")
    return rank, float(scale), tuple(keys)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
