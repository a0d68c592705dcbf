"""The loop: micro-batches add up to an update, updates to epochs; evaluations and checkpoints stand between updates.

Everything random is a function of the seed and the update, so a checkpoint needs no more than the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer import runtime
from mlxinfer.errors import TrainingError
from mlxinfer.lora import checkpoint, methods, objectives, runs
from mlxinfer.lora.callbacks import Callback, JsonLog, Record, read_log
from mlxinfer.lora.evaluate import evaluate, sample
from mlxinfer.lora.gradients import Gradients, is_number
from mlxinfer.lora.history import History
from mlxinfer.lora.interrupt import Interrupt
from mlxinfer.lora.optimizers import build_optimizer, clip, global_norm
from mlxinfer.lora.recompute import recomputed
from mlxinfer.lora.result import write_result
from mlxinfer.lora.schedules import learning_rate
from mlxinfer.lora.state import State, digest_of_rows, fingerprint_of, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.lora.batches import Batches, Micro
    from mlxinfer.lora.config import TrainConfig
    from mlxinfer.lora.parallel import Ranks
    from mlxinfer.lora.types import Loss
    from mlxinfer.tokenizer import Tokenizer

MAX_NAMED = 20
"""Rows that one message names."""
RUN_AHEAD = 0.05
"""Of the peak: memory that a CPU may use to issue operations ahead of those that free their inputs."""


class Run:
    """One call of `trainer.train`: `prepare`, then `restore` where there is a folder, then `go`."""

    batches: Batches
    valid: Batches | None = None
    state: State
    loss: Loss
    gradients: Gradients
    _settle: Callable[[], None]

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer | None, config: TrainConfig, ranks: Ranks, folder: Path | None
    ) -> None:
        self.model, self.tokenizer, self.config, self.ranks, self.folder = model, tokenizer, config, ranks, folder
        self.history = History()
        self.callbacks: list[Callback] = []
        self.extra: dict[str, Any] = {}
        self.optimizer = build_optimizer(config)
        self.interrupt = Interrupt()
        self.held_out = ""
        self.saved = -1
        self._total = 0

    def prepare(
        self,
        items: Sequence[Any],
        valid: Sequence[Any] | None,
        facts: Mapping[str, Any],
        loss: Loss | None,
        teacher: nn.Module | None,
    ) -> None:
        """Put the method on the model, and rows and loss together."""
        config = self.config
        mx.random.seed(config.seed)
        if methods.is_adapted(self.model):
            methods.check_same(self.model, config.method_options)
        else:
            methods.apply(self.model, config.method_options)
            methods.check_magnitudes(self.model)
        packed = objectives.is_packed(config, self.model, facts, items)
        self.loss = loss or objectives.build_loss(config, teacher)
        self.batches = objectives.batches_of(items, config, packed=packed)
        if valid is not None:
            self.valid = objectives.batches_of(valid, config, packed=packed)
            self.held_out = digest_of_rows(valid, objectives.units_of(valid))
        units = objectives.units_of(items)
        size = self.ranks.size
        self.state = State(fingerprint_of(config, items, units, size, self.model, teacher, packed=packed))
        self.state.held_out = self.held_out
        self.gradients = Gradients(self.model, self.loss, self.batches, self.ranks, self.interrupt)
        self._total = self._total_updates()
        self.history.facts = {"packed": packed, "rows": len(items), "updates": self._total}

    def restore(self, folder: Path) -> None:
        """Put the last checkpoint back, if there is one."""
        checkpoint.mend_all(folder)
        found = checkpoint.checkpoints(folder)
        if not found:
            return
        held = checkpoint.load(found[-1], self.model, self.optimizer, self.state.fingerprint)
        self.state = State.restored(held, str(found[-1])).with_held_out(self.held_out)
        self.saved = self.state.update
        past = read_log(folder.parent / runs.LOG)
        self.history.records = [r for r in past if r["update"] <= self.state.update]
        self.history.best_loss = self.state.best_loss

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
            log = [JsonLog(self.folder / runs.LOG, self.state.update)] if self.folder else []
            self.callbacks = [*log, *callbacks]
        self._tell("on_begin", self._total, dataclasses.asdict(self.config))
        self.ranks.check_equal(self._weights(), self.state.update)
        checkpointing = recomputed(self.model) if self.config.grad_checkpointing else contextlib.nullcontext()
        self.model.train()
        try:
            with self.interrupt, checkpointing, runtime.least_memory(RUN_AHEAD) as self._settle:
                self._updates()
            if self.folder is not None and not self.ranks.rank:
                write_result(self.folder, self.model, self.config, self.state, self.history, self.extra)
        finally:
            self.model.eval()
            self._tell("on_end")
        self.history.digest = self.ranks.check_equal(self._weights(), self.state.update)
        return self.history

    def _updates(self) -> None:
        state = self.state
        if self._is_early():
            self.history.stopped_early = True
            return
        # Broken off in the evaluation after its last update.
        if state.update and state.evaluated != state.update and self._is_evaluated() and self._between():
            return
        while state.update < self._total:
            plan = self.batches.plan(state.epoch, self.ranks.rank, self.ranks.size)
            for update in plan[state.position :]:
                self._step(update)
                if self._between():
                    return
            state.epoch, state.position = state.epoch + 1, 0

    def _step(self, update: Sequence[Micro]) -> None:
        """One optimizer update. Until its last lines nothing of the run has changed."""
        state, config = self.state, self.config
        began = time.perf_counter()
        mx.random.seed(seed_of(config.seed, state.update, self.ranks.rank))
        with self._keeping():
            sums = self.gradients.sums(update)
        if sums.interrupted:
            self._break_off()
        if not sums.count:
            self._fail("no token of these rows is supervised", update)
        gradients = {name: value / sums.count for name, value in sums.gradients.items()}
        held: Any = global_norm(gradients).item()
        norm = float(held)
        if not is_number(sums.loss, norm):
            self._fail(f"the loss is {sums.loss / sums.count}, the gradients' norm {norm}", update)
        if config.max_grad_norm is not None:
            gradients = clip(gradients, norm, config.max_grad_norm)
        rate = self._rate()
        self.optimizer.learning_rate = rate
        self.optimizer.update(self.model, tree_unflatten(list(gradients.items())))
        mx.eval(self.model.trainable_parameters(), self.optimizer.state)
        self._settle()
        state.update, state.position, state.tokens = state.update + 1, state.position + 1, state.tokens + sums.tokens
        self._record(
            "update",
            epoch=state.epoch,
            loss=sums.loss / sums.count,
            learning_rate=rate,
            grad_norm=norm,
            tokens=state.tokens,
            tokens_per_second=sums.tokens / (time.perf_counter() - began),
            peak_memory_bytes=mx.get_peak_memory(),
        )

    def _rate(self) -> float:
        config = self.config
        return learning_rate(
            self.state.update,
            peak=config.learning_rate,
            schedule=config.schedule,
            total=self._total,
            warmup=config.warmup_updates,
            floor=config.min_learning_rate,
        )

    def _break_off(self) -> None:
        self._save()
        raise KeyboardInterrupt

    def _fail(self, what: str, update: Sequence[Micro]) -> None:
        """Keep the last good state and say which rows it was."""
        self._save()
        rows = self.gradients.guilty(update)
        more = f" and {len(rows) - MAX_NAMED} more" if len(rows) > MAX_NAMED else ""
        raise TrainingError(f"update {self.state.update + 1}: {what}, in {', '.join(rows[:MAX_NAMED])}{more}")

    def _between(self) -> bool:
        """Evaluate, save and verify as the config says; whether this was the last update."""
        state, config = self.state, self.config
        last = state.update >= self._total
        better = False
        if self.valid is not None and self._is_evaluated():
            with self._keeping():
                better = self._evaluate(self.valid)
        early = self._is_early()
        self.history.stopped_early = early and not last
        if self.ranks.size > 1 and (last or state.update % config.verify_every == 0):
            self.ranks.check_equal(self._weights(), state.update)
        due = config.save_every is not None and state.update % config.save_every == 0
        if last or early or due or better:
            self._save(best=better)
        return last or early

    def _is_evaluated(self) -> bool:
        """Whether the last update is one after which held-out rows are looked at."""
        every, update = self.config.eval_every, self.state.update
        return self.valid is not None and (update >= self._total or (every is not None and update % every == 0))

    def _is_early(self) -> bool:
        return self.config.patience is not None and self.state.evaluations_since_best >= self.config.patience

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """What fails inside, where nothing of the run changes, leaves a checkpoint."""
        with contextlib.ExitStack() as failed:
            failed.callback(self._save)
            yield
            failed.pop_all()

    def _evaluate(self, valid: Batches) -> bool:
        alone = self.ranks.size == 1
        found = evaluate(self.model, valid, self.loss, self.ranks, lambda: alone and self.interrupt.asked)
        if found is None:
            self._break_off()
            return False
        state = self.state
        state.evaluated = state.update
        better = state.best_loss is None or found.loss < state.best_loss
        if better:
            state.best_loss, state.best_update, state.evaluations_since_best = found.loss, state.update, 0
        else:
            state.evaluations_since_best += 1
        self.history.best_loss = state.best_loss
        imitates = {"perplexity": found.perplexity} if self.config.loss == "sft" else {}
        self._record("evaluation", loss=found.loss, **imitates, targets=found.num_targets)
        for prompt in self.config.sample_prompts if self.tokenizer else ():
            assert self.tokenizer is not None
            stops = list(self.tokenizer.eos_token_ids)
            text = sample(self.model, self.tokenizer, prompt, self.config.sample_tokens, stops)
            self._record("sample", prompt=prompt, text=text)
        return better

    def _save(self, *, best: bool = False) -> None:
        if self.folder is None or self.ranks.rank or (self.saved == self.state.update and not best):
            return
        state = dataclasses.asdict(self.state)
        keep = self.config.keep_checkpoints
        path = checkpoint.save(self.folder / checkpoint.FOLDER, self.model, self.optimizer, state, keep=keep, best=best)
        self.saved = self.state.update
        self._tell("on_checkpoint", path)

    def _weights(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.model.trainable_parameters()))

    def _record(self, kind: str, **values: Any) -> None:
        record: Record = {"kind": kind, "update": self.state.update, **values}
        self.history.records.append(record)
        with self._keeping():
            self._tell("on_record", record)

    def _tell(self, event: str, *what: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*what)
