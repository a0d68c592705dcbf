"""The loop: micro-batches add up to an update, updates to epochs; evaluations and checkpoints stand between updates.

Everything random is a function of the seed and the update, so a checkpoint needs no more than the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer.errors import InvalidRequestError, TrainingError
from mlxinfer.lora import checkpoint, methods
from mlxinfer.lora.adapter import save_adapter
from mlxinfer.lora.batches import PaddedBatches
from mlxinfer.lora.callbacks import Callback, JsonLog, Record, read_log
from mlxinfer.lora.evaluate import Evaluation, cross_entropy, evaluate, sample
from mlxinfer.lora.history import History
from mlxinfer.lora.interrupt import Interrupt
from mlxinfer.lora.optimizers import build_optimizer, clip, global_norm
from mlxinfer.lora.parallel import Ranks
from mlxinfer.lora.recompute import recomputed
from mlxinfer.lora.schedules import learning_rate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mlxinfer.lora.batches import Batches
    from mlxinfer.lora.config import TrainConfig
    from mlxinfer.lora.types import Example, Loss
    from mlxinfer.tokenizer import Tokenizer


class Rows(Protocol):
    """What a data set is to the trainer."""

    @property
    def items(self) -> Sequence[Any]: ...


@dataclasses.dataclass(slots=True)
class State:
    """Where a run stands; saved with every checkpoint."""

    fingerprint: str
    update: int = 0
    """Updates that are done."""
    epoch: int = 0
    position: int = 0
    """Updates of this epoch that are done."""
    tokens: int = 0
    best_loss: float | None = None
    best_update: int = 0
    evaluations_since_best: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """An update's gradients of the summed loss, over all ranks."""

    gradients: dict[str, mx.array]
    loss: float
    count: float
    tokens: int
    interrupted: bool


def train(
    model: nn.Module,
    tokenizer: Tokenizer | None,
    train: Rows,
    valid: Rows | None,
    config: TrainConfig,
    group: mx.distributed.Group | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    folder: Path | None = None,
    resume: bool = False,
    loss: Loss = cross_entropy,
    batches: Batches | None = None,
    valid_batches: Batches | None = None,
) -> History:
    """Train `model` in place and return what happened.

    With `folder`, the adapter, the log and the checkpoints go there; with `resume`, its last checkpoint is where the
    run goes on, to the same bits. `batches` replace one padded example a row.

    Raises InvalidRequestError for what cannot be trained, TrainingError for a loss or a gradient that is no number, for
    ranks that differ and for a checkpoint that cannot be written. KeyboardInterrupt comes after a checkpoint.
    """
    if not train.items:
        raise InvalidRequestError("there is no row to train on")
    if valid is None and valid_batches is None:
        for name in ("eval_every",):
            if getattr(config, name) is not None:
                raise InvalidRequestError(f"{name} has no effect without rows to evaluate on", param=name)
    if folder is None and (resume or config.save_every is not None):
        raise InvalidRequestError("save_every and resume need a folder", param="folder")
    run = _Run(model, tokenizer, config, Ranks(group), folder, loss)
    run.batches = batches or _padded(train.items, config)
    if valid is not None or valid_batches is not None:
        run.valid = valid_batches or _padded(valid.items if valid else (), config)
    run.prepare(_fingerprint(config, train.items, run.ranks.size), resume)
    return run.go(callbacks)


def _padded(items: Sequence[Example], config: TrainConfig) -> PaddedBatches:
    return PaddedBatches(
        items,
        micro_batch_size=config.micro_batch_size,
        steps=config.grad_accumulation_steps,
        seed=config.seed,
        max_tokens=config.max_tokens,
    )


def _fingerprint(config: TrainConfig, items: Sequence[Any], ranks: int) -> str:
    """Of the options, the rows and the number of ranks: what a resumed run shares with the one before."""
    digest = hashlib.sha256(f"{config.fingerprint()} {ranks} ".encode())
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()


class _Run:
    """One call of `train`."""

    batches: Batches
    valid: Batches | None = None
    state: State

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None,
        config: TrainConfig,
        ranks: Ranks,
        folder: Path | None,
        loss: Loss,
    ) -> None:
        self.model, self.tokenizer, self.config, self.ranks = model, tokenizer, config, ranks
        self.folder, self.loss = folder, loss
        self.history = History()
        self.callbacks: list[Callback] = []
        self.optimizer = build_optimizer(config)
        self.interrupt = Interrupt()
        self.saved = -1

    def prepare(self, fingerprint: str, resume: bool) -> None:
        """Put the method on the model, and the last checkpoint when the run is resumed."""
        mx.random.seed(self.config.seed)
        if not methods.is_adapted(self.model):
            methods.apply(self.model, self.config.method_options)
        self.state = State(fingerprint)
        self._total = self._total_updates()
        if self.folder is None:
            return
        checkpoint.mend(self._checkpoints / checkpoint.BEST)
        found = checkpoint.checkpoints(self._checkpoints)
        if found and not resume:
            message = f"{self._checkpoints} holds the checkpoints of a run: resume it, or use another folder"
            raise InvalidRequestError(message, param="folder")
        if found:
            held = checkpoint.load(found[-1], self.model, self.optimizer, fingerprint)
            self.state = State(**{one.name: held[one.name] for one in dataclasses.fields(State)})
            self.saved = self.state.update
            past = read_log(self.folder / "log.jsonl")
            self.history.records = [r for r in past if r["update"] <= self.state.update]
            self.history.best_loss = self.state.best_loss

    @property
    def _checkpoints(self) -> Path:
        assert self.folder is not None
        return self.folder / "checkpoints"

    def _total_updates(self) -> int:
        epochs = self.config.epochs or (1 if self.config.updates is None else None)
        each = len(self.batches.plan(0, self.ranks.rank, self.ranks.size))
        limits = [self.config.updates] if self.config.updates else []
        if epochs:
            limits.append(epochs * each)
        return min(limits)

    def go(self, callbacks: Sequence[Callback]) -> History:
        """Train to the end; what is broken off leaves a checkpoint of its last update."""
        if self.ranks.rank == 0:
            log = [JsonLog(self.folder / "log.jsonl", self.state.update)] if self.folder else []
            self.callbacks = [*log, *callbacks]
        self._tell("on_begin", self._total, dataclasses.asdict(self.config))
        self.ranks.check_equal(self._weights(), self.state.update)
        checkpointing = recomputed(self.model) if self.config.grad_checkpointing else contextlib.nullcontext()
        self.model.train()
        try:
            with self.interrupt, checkpointing:
                self._updates()
            if self.folder is not None:
                self._finish(self.folder)
        finally:
            self.model.eval()
            self._tell("on_end")
        self.history.digest = self.ranks.check_equal(self._weights(), self.state.update)
        return self.history

    def _updates(self) -> None:
        state = self.state
        while state.update < self._total:
            plan = self.batches.plan(state.epoch, self.ranks.rank, self.ranks.size)
            for update in plan[state.position :]:
                self._step(update)
                if self._between():
                    return
            state.epoch, state.position = state.epoch + 1, 0

    def _step(self, update: Sequence[tuple[int, ...]]) -> None:
        """One optimizer update. Until its last line nothing of the run has changed."""
        state, config = self.state, self.config
        began = time.perf_counter()
        mx.random.seed(_seed_of(config.seed, state.update, self.ranks.rank))
        rate = learning_rate(
            state.update,
            peak=config.learning_rate,
            schedule=config.schedule,
            total=self._total,
            warmup=config.warmup_updates,
            floor=config.min_learning_rate,
        )
        sums = self._sums(update)
        if sums.interrupted:
            self._save()
            raise KeyboardInterrupt
        if not sums.count:
            self._fail("no token of these rows is supervised", update)
        gradients = {name: value / sums.count for name, value in sums.gradients.items()}
        norm = global_norm(gradients)
        if not math.isfinite(sums.loss) or not math.isfinite(norm.item()):
            self._fail(f"the loss is {sums.loss / sums.count}, the gradients' norm {norm.item()}", update)
        if config.max_grad_norm is not None:
            gradients = clip(gradients, norm, config.max_grad_norm)
        self.optimizer.learning_rate = rate
        self.optimizer.update(self.model, tree_unflatten(list(gradients.items())))
        mx.eval(self.model.trainable_parameters(), self.optimizer.state)
        state.update, state.position, state.tokens = state.update + 1, state.position + 1, state.tokens + sums.tokens
        self._record(
            {
                "kind": "update",
                "update": state.update,
                "epoch": state.epoch,
                "loss": sums.loss / sums.count,
                "learning_rate": rate,
                "grad_norm": norm.item(),
                "tokens": state.tokens,
                "tokens_per_second": sums.tokens / (time.perf_counter() - began),
                "peak_memory_bytes": mx.get_peak_memory(),
            }
        )

    def _sums(self, update: Sequence[tuple[int, ...]]) -> Sums:
        """Sums over micro-batches and ranks; nothing is divided here, so that no split of the rows matters."""
        weights = self.model.trainable_parameters()
        total = {name: mx.zeros(value.shape, mx.float32) for name, value in tree_flatten(weights)}
        step = nn.value_and_grad(self.model, lambda batch: self.loss(self.model, batch))
        loss, count, tokens = mx.array(0.0), mx.array(0.0), 0
        for items in update:
            if self.interrupt.asked and self.ranks.size == 1:
                break
            batch = self.batches.batch(items)
            (found, supervised), gradients = step(batch)
            # The trace leaves its own arrays in the model, and with them its graph.
            self.model.update(weights)
            for name, value in tree_flatten(gradients):
                total[name] = total[name] + value.astype(mx.float32)
            loss, count, tokens = loss + found, count + supervised, tokens + batch.num_tokens
            mx.eval(total, loss, count)
        total = self.ranks.sum(total)
        sums = self.ranks.sums(loss.item(), count.item(), tokens, float(self.interrupt.asked))
        mx.eval(total)
        return Sums(total, sums[0], sums[1], int(sums[2]), bool(sums[3]))

    def _fail(self, what: str, update: Sequence[tuple[int, ...]]) -> None:
        """Keep the last good state and say which rows it was."""
        guilty = [items for items in update if not self._is_finite(items)] or list(update)
        rows = [row for items in guilty for row in self.batches.where(items)]
        if self.folder is not None:
            self._save()
        more = f" and {len(rows) - 20} more" if len(rows) > 20 else ""
        raise TrainingError(f"update {self.state.update + 1}: {what}, in {', '.join(rows[:20])}{more}")

    def _is_finite(self, items: tuple[int, ...]) -> bool:
        return math.isfinite(self.loss(self.model, self.batches.batch(items))[0].item())

    def _between(self) -> bool:
        """Evaluate, save and verify as the config says; whether this was the last update."""
        state, config = self.state, self.config
        last = state.update >= self._total
        better = False
        if self.valid is not None and (last or (config.eval_every and state.update % config.eval_every == 0)):
            better = self._evaluate(self.valid)
        patience = config.patience
        early = patience is not None and state.evaluations_since_best >= patience
        self.history.stopped_early = early and not last
        if self.ranks.size > 1 and (last or state.update % config.verify_every == 0):
            self.ranks.check_equal(self._weights(), state.update)
        due = config.save_every is not None and state.update % config.save_every == 0
        if self.folder is not None and (last or early or due or better):
            self._save(best=better)
        return last or early

    def _evaluate(self, valid: Batches) -> bool:
        found = evaluate(self.model, valid, self.loss, self.ranks)
        state = self.state
        better = state.best_loss is None or found.loss < state.best_loss
        if better:
            state.best_loss, state.best_update, state.evaluations_since_best = found.loss, state.update, 0
        else:
            state.evaluations_since_best += 1
        self.history.best_loss = state.best_loss
        self._record({"kind": "evaluation", "update": state.update, **_numbers(found)})
        for prompt in self.config.sample_prompts if self.tokenizer else ():
            assert self.tokenizer is not None
            text = sample(self.model, self.tokenizer, prompt, self.config.sample_tokens)
            self._record({"kind": "sample", "update": state.update, "prompt": prompt, "text": text})
        return better

    def _save(self, *, best: bool = False) -> None:
        if self.folder is None or self.ranks.rank or (self.saved == self.state.update and not best):
            return
        state = dataclasses.asdict(self.state)
        keep = self.config.keep_checkpoints
        path = checkpoint.save(self._checkpoints, self.model, self.optimizer, state, keep=keep, best=best)
        self.saved = self.state.update
        self._tell("on_checkpoint", path)

    def _finish(self, folder: Path) -> None:
        """The adapter is the best one where rows were held out, else the last."""
        if self.ranks.rank:
            return
        last = self._weights()
        best = self._checkpoints / checkpoint.BEST
        if self.state.best_loss is not None and best.is_dir() and self.state.best_update != self.state.update:
            weights = checkpoint.read_tensors(best / "weights.safetensors")
            checkpoint.load_weights(self.model, weights, str(best))
        extra = {"mlxinfer": {"updates": self.state.update, "best_update": self.state.best_update or None}}
        save_adapter(folder, self.model, self.config.method_options, extra)
        self.model.load_weights(list(last.items()), strict=False)
        self.history.write_report(folder / "report.html", f"Training of {folder.name}")

    def _weights(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.model.trainable_parameters()))

    def _record(self, record: Record) -> None:
        self.history.records.append(record)
        self._tell("on_record", record)

    def _tell(self, event: str, *what: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*what)


def _numbers(found: Evaluation) -> Record:
    return {"loss": found.loss, "perplexity": found.perplexity, "targets": found.num_targets}


def _seed_of(seed: int, update: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed} {update} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
