"""Which ways of splitting mlx-lm's code for an architecture has, and doing it.

docs/cluster-architectures.md says what came out for each.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed.groups import Pair, PretendGroup
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.nn as nn

NOT_BY_HEADS: dict[str, str] = {
    "prism_hadamard_qwen35": "mlx has no sharded form of its rotated packed layers",
}
"""mlx-lm's modules whose `shard()` doesn't give the same model, and why."""

_FAILURES = (ValueError, IndexError, TypeError, ZeroDivisionError, AttributeError, AssertionError, KeyError)
"""Of mlx-lm's code over a model that doesn't go into so many parts."""


def module_of(model: nn.Module) -> str:
    """The name of mlx-lm's file for it."""
    return type(model).__module__.rpartition(".")[2]


def pipelined(model: nn.Module) -> Any:
    """The module that holds the layers and can let go of some, or None."""
    inner: Any = getattr(model, "model", None) or getattr(model, "language_model", None)
    return inner if inner is not None and hasattr(inner, "pipeline") else None


def no_tensor(model: nn.Module) -> str:
    """Why the model can't be split by heads, in words; "" where it can."""
    name = module_of(model)
    if not hasattr(model, "shard"):
        return f"mlx-lm's code for {name} has no split by heads"
    wrong = NOT_BY_HEADS.get(name)
    return f"mlx-lm's split by heads doesn't do for {name}: {wrong}" if wrong else ""


def no_pipeline(model: nn.Module) -> str:
    """Why the model can't be split by layers, in words; "" where it can."""
    return "" if pipelined(model) is not None else f"mlx-lm's code for {module_of(model)} has no split by layers"


def split_model(model: nn.Module, kind: str, layers: Sequence[int], group: Any) -> None:
    """Split `model` in place for the rank that `group` says: by heads ("tensor"), by `layers` for each stage
    ("pipeline"), or by layers for pairs that share them by heads ("both").

    Raises InvalidRequestError where that can't be.
    """
    if group.size() == 1:
        return
    if refused := (kind != "pipeline" and no_tensor(model)) or (kind != "tensor" and no_pipeline(model)):
        raise InvalidRequestError(refused)
    sharing, stages = group, group
    if kind == "both":
        pretended = isinstance(group, PretendGroup)
        sharing = PretendGroup(group.rank() % 2, 2) if pretended else Pair(group)
        stages = PretendGroup(group.rank() // 2, group.size() // 2)
    try:
        # Heads first: a stage has no layers where others have theirs.
        if kind != "pipeline":
            by_heads(model, sharing)
        if kind != "tensor":
            _by_layers(model, stages, list(layers))
    except _FAILURES as error:
        raise InvalidRequestError(f"{module_of(model)} can't be split {group.size()} ways: {error}") from error


def by_heads(model: nn.Module, group: Any) -> None:
    """Have mlx-lm share out heads. Raises what its code raises, or InvalidRequestError for numbers that leave a rest:
    it divides and forgets it."""
    whole: Any = model
    before = _counts(model)
    whole.shard(group)
    size = group.size()
    for (path, name), count in _counts(model).items():
        held = before.get((path, name), count)
        # qwen3_5 gives several ranks the same keys where there are fewer than ranks.
        repeated = count == 1 and held < size and size % held == 0
        if count != held and count * size != held and not repeated:
            raise InvalidRequestError(
                f"{module_of(model)} can't be split {size} ways: {held} {name} of {path or 'the model'} can't be shared"
            )


def _by_layers(model: nn.Module, group: Any, split: list[int]) -> None:
    stack = pipelined(model)
    layers = len(stack.layers)
    if "split" in inspect.signature(stack.pipeline).parameters:
        stack.pipeline(group, split)
        return
    # kimi_k3 shares out evenly, and isn't asked.
    stack.pipeline(group)
    held = sum(layer is not None for layer in stack.layers)
    if held != split[group.rank()]:
        rank = group.rank()
        raise ValueError(f"mlx-lm shares {layers} layers out evenly, {held} for rank {rank}, not {split[rank]}")


def _counts(model: nn.Module) -> dict[tuple[str, str], int]:
    """Every whole number that a module of the model knows, by the module's path and its name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and not name.startswith("_")
    }
