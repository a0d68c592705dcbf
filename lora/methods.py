"""LoRA, QLoRA, DoRA, rsLoRA and full fine-tuning: put on a model, switched off for a reference."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer import upstream
from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.targets import select

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.nn as nn

Method = Literal["lora", "qlora", "dora", "rslora", "full"]
ODD_BITS = (3, 5, 6)
MAX_SCALE = 3.4e38
"""What float32 holds."""
ADAPTER_LEAVES = ("lora_a", "lora_b", "m")
"""Parameters of mlx-lm's adapter layers; what they wrap has other names."""


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """What is trained. `alpha`, `rank` and `dropout` say nothing for "full"."""

    method: Method = "lora"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    num_layers: int | None = None

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied by: alpha / rank, for rsLoRA alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.method == "rslora" else self.rank)


def apply(model: nn.Module, options: MethodOptions) -> list[str]:
    """Freeze `model`, put adapters on it or unfreeze it, and return the paths of what is trained.

    New adapters take their first values from mlx's RNG. Raises InvalidRequestError.
    """
    if is_adapted(model):
        raise InvalidRequestError("the model has adapters already; fuse them, or load it afresh")
    if options.method == "full":
        return _unfreeze(model, options)
    if options.method == "qlora" and not is_quantized(model):
        raise InvalidRequestError("method is 'qlora' and the base isn't quantized; use 'lora'", param="method")
    made = _layers(model, options)
    model.freeze()
    model.update_modules(tree_unflatten(list(made.items())))
    for path in made:
        module_at(model, path).unfreeze(keys=list(ADAPTER_LEAVES), recurse=False)
    return [name for name, _ in tree_flatten(model.trainable_parameters())]


def _layers(model: nn.Module, options: MethodOptions) -> dict[str, nn.Module]:
    def adapted(module: nn.Module) -> nn.Module | None:
        dora = options.method == "dora"
        return upstream.adapter_layer(
            module, dora=dora, rank=options.rank, scale=options.scale, dropout=options.dropout
        )

    # Named from the front, so that the RNG gives each layer the same values whatever the order of a dict.
    modules = dict(sorted(model.named_modules()))
    candidates = [path for path, module in modules.items() if adaptable(module)]
    made: dict[str, nn.Module] = {}
    for path in select(model, candidates, options.targets, options.num_layers):
        if options.method == "dora" and (bits := getattr(modules[path], "bits", None)) in ODD_BITS:
            raise InvalidRequestError(
                f"{path} is packed in {bits} bits, where mlx-lm's DoRA layer miscounts its inputs: use lora, or a "
                "base of 4 or 8 bits",
                param="method",
            )
        layer = adapted(modules[path])
        if layer is None:
            raise InvalidRequestError(f"{path}: {options.method} cannot adapt a {type(modules[path]).__name__}")
        made[path] = layer
    if not made:
        raise InvalidRequestError("the model has no layer that an adapter fits", param="targets")
    return made


def adaptable(module: nn.Module) -> bool:
    """Whether mlx-lm has an adapter layer for it."""
    name = type(module).__name__.removeprefix("Quantized")
    return name in ("Linear", "SwitchLinear", "Embedding") and "weight" in module


def _unfreeze(model: nn.Module, options: MethodOptions) -> list[str]:
    if is_quantized(model):
        raise InvalidRequestError("method is 'full' and the base is quantized; use 'qlora'", param="method")
    modules = dict(model.named_modules())
    owners = [path for path, module in modules.items() if path and any(_arrays(module))]
    whole = not options.targets and options.num_layers is None
    chosen = owners if whole else select(model, owners, options.targets, options.num_layers)
    model.freeze()
    for path in chosen:
        modules[path].unfreeze(recurse=False)
    return [name for name, _ in tree_flatten(model.trainable_parameters())]


def _arrays(module: nn.Module) -> Iterator[str]:
    return (key for key, value in module.items() if hasattr(value, "dtype"))


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer is packed."""
    return any(type(module).__name__.startswith("Quantized") for module in model.modules())


def is_adapted(model: nn.Module) -> bool:
    """Whether any layer carries an adapter."""
    return any("lora_a" in module for module in model.modules())


def check_same(model: nn.Module, options: MethodOptions) -> None:
    """Raises InvalidRequestError where the adapters that `model` has aren't those of the options."""
    adapted = [path for path, module in model.named_modules() if "lora_a" in module]
    for path in adapted:
        held = module_at(model, path)
        kind = "dora" if "m" in held else "lora"
        asked = options.method if options.method in ("dora", "full") else "lora"
        for name, own, wanted in (
            ("method", kind, asked),
            ("rank", held.lora_a.shape[-1], options.rank),
            ("scale", held.scale, options.scale),
            ("dropout", round(1 - held.dropout._p_1, 6), round(options.dropout, 6)),
        ):
            if own != wanted:
                raise InvalidRequestError(
                    f"the model has adapters already, with {name} {own} on {path}, and {wanted} was asked for: train "
                    "on with the same, fuse them, or load the model afresh",
                    param="rank" if name == "scale" else name,
                )
    if options.targets or options.num_layers is not None:
        inner = {f"{path}.{name}" for path in adapted for name in ("linear", "embedding")}
        plain = [path for path, module in model.named_modules() if adaptable(module) and path not in inner]
        asked_for = set(select(model, sorted([*adapted, *plain]), options.targets, options.num_layers))
        if other := asked_for ^ set(adapted):
            raise InvalidRequestError(
                f"the model has adapters already, and targets and num_layers name others: {min(other)}. Leave them out "
                "to train on with what is there, or load the model afresh",
                param="targets",
            )


def check_magnitudes(model: nn.Module) -> None:
    """Raises InvalidRequestError where DoRA would divide by the norm of a row that is all zeros."""
    held: dict[str, Any] = {
        path: module for path, module in model.named_modules() if "m" in module and "lora_a" in module
    }
    empty = {path: (module.m == 0).any() for path, module in held.items()}
    mx.eval(empty)
    if found := [path for path, is_empty in empty.items() if is_empty.item()]:
        raise InvalidRequestError(
            f"{found[0]} has rows that are all zeros ({len(found)} such layers), without a direction for DoRA to keep: "
            "use lora, or leave the layer out of targets",
            param="method",
        )


def module_at(model: nn.Module, path: str) -> Any:
    """The module of a dotted path."""
    return dict(model.named_modules())[path]


class _Off:
    """What an adapter layer is while it is switched off: the layer that it wraps."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held: Any = self
        return (held.linear if "linear" in held else held.embedding)(*args, **kwargs)

    def as_linear(self, x: Any) -> Any:
        held: Any = self
        return held.embedding.as_linear(x)


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switch every adapter off: inside, `model` is its base, without a second copy.

    By instance and exact for every method: DoRA's magnitudes and dropout are out of the way too.
    """
    swapped: list[tuple[Any, type]] = []
    try:
        for module in model.modules():
            if "lora_a" in module:
                own = type(module)
                swapped.append((module, own))
                module.__class__ = type(f"{own.__name__}Off", (_Off, own), {})
        yield
    finally:
        for module, own in swapped:
            module.__class__ = own
