"""From options and rows to the loss of a run and the units it is summed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora import losses, packable
from mlxinfer.lora.batches import JudgedBatches, UnitBatches
from mlxinfer.lora.methods import adapter_off
from mlxinfer.lora.types import Example, Judged, Pair

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.nn as nn

    from mlxinfer.lora.config import TrainConfig
    from mlxinfer.lora.types import Loss

ROW_OF = {"sft": Example, "distill": Example, "dpo": Pair, "orpo": Pair, "simpo": Pair, "kto": Judged}
SAID = {
    Example: "rows to imitate (messages, prompt and completion, or text)",
    Pair: "pairs (chosen and rejected)",
    Judged: "judged rows (completion and label)",
}


def check_rows(config: TrainConfig, items: Sequence[Any]) -> None:
    """Raises InvalidRequestError where the rows aren't of the kind that the loss reads."""
    wanted = ROW_OF[config.loss]
    if items and not isinstance(items[0], wanted):
        fitting = [name for name, row in ROW_OF.items() if isinstance(items[0], row)]
        raise InvalidRequestError(
            f"the rows are {SAID[type(items[0])]}, and {config.loss} reads {SAID[wanted]}; "
            f"they can be trained on with {' or '.join(fitting)}",
            param="loss",
        )


def build_loss(config: TrainConfig, teacher: nn.Module | None = None) -> Loss:
    """The loss that the options name. Raises InvalidRequestError for a teacher that is missing or has nothing to do."""
    if (teacher is not None) != (config.loss == "distill"):
        message = "distill needs a teacher" if teacher is None else f"a teacher has no effect with loss {config.loss}"
        raise InvalidRequestError(message, param="teacher")
    beta = {} if config.beta is None else {"beta": config.beta}
    if config.loss == "dpo":
        return losses.DpoLoss(adapter_off, label_smoothing=config.label_smoothing, **beta)
    if config.loss == "orpo":
        return losses.OrpoLoss(weight=config.odds_weight)
    if config.loss == "simpo":
        return losses.SimpoLoss(margin=config.margin, **beta)
    if config.loss == "kto":
        return losses.KtoLoss(adapter_off, **beta)
    if teacher is not None:
        return losses.DistillLoss(teacher, temperature=config.temperature, hard_weight=config.hard_weight)
    return losses.SupervisedLoss()


def is_packed(config: TrainConfig, model: nn.Module, facts: Mapping[str, Any], items: Sequence[Any]) -> bool:
    """Whether rows share a row of the batch. `facts` is the model's config.json.

    Raises InvalidRequestError where packing was asked for and the model or the loss can't.
    """
    if config.packing == "off":
        return False
    why = "kto compares whole micro-batches" if config.loss == "kto" else ""
    if not why and items:
        longest = max(sum(len(example.token_ids) for example in unit) for unit in units_of(items))
        why = packable.refusal(model, facts, max(config.max_tokens, longest))
    if why and config.packing == "on":
        raise InvalidRequestError(f"packing is on, and rows cannot be packed: {why}", param="packing")
    return not why


def units_of(items: Sequence[Any]) -> list[tuple[Example, ...]]:
    """What stays together, row by row."""
    return [_unit(item) for item in items]


def _unit(item: Any) -> tuple[Example, ...]:
    if isinstance(item, Pair):
        return item.chosen, item.rejected
    return (item.example if isinstance(item, Judged) else item,)


def batches_of(items: Sequence[Any], config: TrainConfig, *, packed: bool) -> UnitBatches:
    """The rows as updates. Raises InvalidRequestError for a row that is too long."""
    options = {
        "micro_batch_size": config.micro_batch_size,
        "steps": config.grad_accumulation_steps,
        "seed": config.seed,
        "max_tokens": config.max_tokens,
    }
    if config.loss == "kto":
        return JudgedBatches(items, **options)
    return UnitBatches(units_of(items), packed=packed, **options)
