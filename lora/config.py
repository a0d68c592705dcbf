"""Every option of a training run, once: the fields are the Python arguments, the CLI's flags and the file's keys."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Literal

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.methods import Method, MethodOptions
from mlxinfer.lora.options import options_of
from mlxinfer.lora.schedules import Schedule  # noqa: TC001 (the options' types are read when the program runs)

OptimizerName = Literal["adamw", "adafactor", "muon", "sgd"]
LossName = Literal["sft", "dpo", "orpo", "kto", "simpo", "distill"]
Packing = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run. Raises InvalidRequestError that names the field, one without effect beside the others too."""

    method: Annotated[Method, "What is trained; qlora asks for a quantized base."] = "lora"
    rank: Annotated[int, "Rank of the adapters."] = 8
    alpha: Annotated[float, "Adapters are scaled by alpha / rank; with rslora by alpha / sqrt(rank)."] = 16.0
    dropout: Annotated[float, "Dropout before the adapters."] = 0.0
    targets: Annotated[tuple[str, ...], "A layer's name or glob, such as q_proj; all in the blocks without."] = ()
    num_layers: Annotated[int | None, "Train the last N blocks only."] = None
    loss: Annotated[LossName, "sft imitates; dpo, orpo, simpo prefer; kto judges; distill follows a teacher."] = "sft"
    beta: Annotated[float | None, "Strength of dpo and kto [0.1] and of simpo [2]."] = None
    label_smoothing: Annotated[float, "dpo: the part of pairs that may be labelled the wrong way round."] = 0.0
    odds_weight: Annotated[float, "orpo: weight of the odds ratio beside the imitation."] = 0.1
    margin: Annotated[float, "simpo: by how much the chosen answer should lead."] = 1.0
    temperature: Annotated[float, "distill: of both distributions."] = 1.0
    hard_weight: Annotated[float, "distill: weight of imitation beside the teacher, 0 to 1."] = 0.0
    packing: Annotated[Packing, "Rows share the width of a batch without seeing each other; auto: where exact."] = (
        "auto"
    )
    optimizer: Annotated[OptimizerName, "The optimizer."] = "adamw"
    learning_rate: Annotated[float, "The highest learning rate."] = 1e-4
    weight_decay: Annotated[float, "Weight decay."] = 0.0
    beta1: Annotated[float, "AdamW's first beta."] = 0.9
    beta2: Annotated[float, "AdamW's second beta."] = 0.999
    eps: Annotated[float, "AdamW's epsilon."] = 1e-8
    momentum: Annotated[float, "Momentum of muon and sgd."] = 0.95
    schedule: Annotated[Schedule, "What follows the warmup."] = "constant"
    warmup_updates: Annotated[int, "Updates in which the learning rate rises."] = 0
    min_learning_rate: Annotated[float, "Where linear and cosine end."] = 0.0
    max_grad_norm: Annotated[float | None, "Scale gradients down to this global norm."] = None
    epochs: Annotated[int | None, "Passes over the data [1, unless updates are given]."] = None
    updates: Annotated[int | None, "Stop after this many optimizer updates."] = None
    micro_batch_size: Annotated[int, "Rows of an update beside each other, on each rank."] = 1
    grad_accumulation_steps: Annotated[int, "Times as many rows make one update."] = 1
    max_tokens: Annotated[int, "Tokens of a row at most."] = 2048
    grad_checkpointing: Annotated[bool, "Recompute each block going back: less memory, more time."] = False
    seed: Annotated[int, "Seed of the order of rows, the adapters' first values and dropout."] = 0
    eval_every: Annotated[int | None, "Updates between evaluations [one at the end]."] = None
    patience: Annotated[int | None, "Stop after this many evaluations without a better one."] = None
    sample_prompts: Annotated[tuple[str, ...], "Text to continue at each evaluation."] = ()
    sample_tokens: Annotated[int, "Tokens of a sample at most."] = 64
    save_every: Annotated[int | None, "Updates between checkpoints [one at the end]."] = None
    keep_checkpoints: Annotated[int, "Checkpoints kept, the best one aside."] = 2
    verify_every: Annotated[int, "Updates between proofs that all ranks hold the same weights."] = 100

    def __post_init__(self) -> None:
        for name, option in options_of(TrainConfig).items():
            option.check(getattr(self, name))
        for name in _AT_LEAST_1:
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidRequestError(f"{name} is {value}; it is at least 1", param=name)
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise InvalidRequestError(f"{name} is {value}; it is above 0", param=name)
        for name in _FRACTIONS:
            if not 0 <= (value := getattr(self, name)) < 1:
                raise InvalidRequestError(f"{name} is {value}; it is at least 0 and below 1", param=name)
        for name in ("warmup_updates", "weight_decay", "min_learning_rate", "seed", "margin"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise InvalidRequestError(f"{name} is {value}; it is at least 0", param=name)
        if self.max_tokens < 2:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens}; a row needs at least 2", param="max_tokens")
        if not 0 <= self.hard_weight <= 1:
            raise InvalidRequestError(f"hard_weight is {self.hard_weight}; it is 0 to 1", param="hard_weight")
        if not 0 <= self.label_smoothing < 0.5:
            message = f"label_smoothing is {self.label_smoothing}; it is at least 0 and below 0.5"
            raise InvalidRequestError(message, param="label_smoothing")
        if self.seed >= 1 << 64:
            raise InvalidRequestError(f"seed is {self.seed}; it is below 2^64", param="seed")
        if self.min_learning_rate > self.learning_rate:
            raise InvalidRequestError("min_learning_rate is above learning_rate", param="min_learning_rate")
        self._check_effects()

    def _check_effects(self) -> None:
        """Refuse what was set and changes nothing."""
        for useless, names, why in (
            (self.method == "full", ("rank", "alpha", "dropout"), "method full"),
            (self.optimizer != "adamw", ("beta1", "beta2", "eps"), f"optimizer {self.optimizer}"),
            (self.optimizer not in ("muon", "sgd"), ("momentum",), f"optimizer {self.optimizer}"),
            (self.schedule == "constant", ("min_learning_rate",), "schedule constant"),
            (not self.sample_prompts, ("sample_tokens",), "no sample_prompts"),
            (self.eval_every is None, ("patience",), "no eval_every"),
            (self.loss not in ("dpo", "kto", "simpo"), ("beta",), f"loss {self.loss}"),
            (self.loss != "dpo", ("label_smoothing",), f"loss {self.loss}"),
            (self.loss != "orpo", ("odds_weight",), f"loss {self.loss}"),
            (self.loss != "simpo", ("margin",), f"loss {self.loss}"),
            (self.loss != "distill", ("temperature", "hard_weight"), f"loss {self.loss}"),
        ):
            for name in names:
                if useless and getattr(self, name) != options_of(TrainConfig)[name].default:
                    raise InvalidRequestError(f"{name} has no effect with {why}; leave it out", param=name)
        if self.method == "full" and self.loss in ("dpo", "kto"):
            why = f"{self.loss} compares with the model whose adapters are off, and method full has none"
            raise InvalidRequestError(f"{why}; use lora, or orpo or simpo", param="method")

    @property
    def method_options(self) -> MethodOptions:
        """The part that `methods.apply` takes."""
        return MethodOptions(self.method, self.rank, self.alpha, self.dropout, self.targets, self.num_layers)

    def fingerprint(self) -> str:
        """Of what a resumed run must not change; where it stops and what it reports may."""
        free = {"epochs", "updates", "eval_every", "patience", "sample_prompts", "sample_tokens", "save_every"}
        free |= {"keep_checkpoints", "verify_every"}
        if self.schedule != "constant":
            free -= {"epochs", "updates"}
        # alpha = 16 is 16.0.
        kept = {n: options_of(TrainConfig)[n].read(v) for n, v in dataclasses.asdict(self).items() if n not in free}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


_AT_LEAST_1 = ("rank", "num_layers", "epochs", "updates", "micro_batch_size", "grad_accumulation_steps", "eval_every")
_AT_LEAST_1 += ("patience", "sample_tokens", "save_every", "keep_checkpoints", "verify_every")
_POSITIVE = ("alpha", "learning_rate", "eps", "max_grad_norm", "beta", "odds_weight", "temperature")
_FRACTIONS = ("dropout", "beta1", "beta2", "momentum")
