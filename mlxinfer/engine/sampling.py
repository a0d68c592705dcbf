"""Sampling for a whole batch in one call, with parameters and randomness per row.

Randomness is one number in [0, 1) per token, made on the host from (seed, position): a row draws the same token
alone or in any batch, and a step can be replayed from plain data. Rows are grouped by what they need, so a row's
arithmetic doesn't depend on its neighbours' parameters, and greedy rows pay for nothing but an argmax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from mlxinfer.types import SamplingParams

Sampler = Callable[[mx.array, Sequence[float], Mapping[int, bytes] | None], mx.array]
"""As BatchSampler is called."""


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed's output token at `position`; 24 bits, exact in float32."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=3).digest()
    return int.from_bytes(digest, "big") / 2**24


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Resolved parameters of one row: no None left."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, p: SamplingParams) -> RowSampling:
        """From parameters, with the library's defaults where they say None."""
        chosen = {
            name: value
            for name in cls.__dataclass_fields__
            if name != "logit_bias" and (value := getattr(p, name)) is not None
        }
        bias = tuple(sorted((int(k), float(v)) for k, v in p.logit_bias.items()))
        return cls(**chosen, logit_bias=bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Needs the distribution sorted."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def counts_tokens(self) -> bool:
        """Needs to know which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class RowState:
    """What sampling remembers of one row; arrays only where the parameters need them.

    `prompt` [vocab] bool: the token is in the prompt. `counts` [vocab] float32: occurrences in the output.
    """

    __slots__ = ("bias", "counts", "prompt", "sampling")

    def __init__(
        self, sampling: RowSampling, prompt: Sequence[int], vocab_size: int, output: Sequence[int] = ()
    ) -> None:
        self.sampling = sampling
        self.bias: mx.array | None = None
        self.prompt: mx.array | None = None
        self.counts: mx.array | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                # mlx doesn't check indices: a stray one would write into someone else's memory.
                raise ValueError(f"logit_bias ids {min(ids)} to {max(ids)}; the vocabulary has {vocab_size}")
            self.bias = mx.zeros(vocab_size).at[mx.array(ids)].add(mx.array(values, mx.float32))
        if sampling.counts_tokens:
            self.prompt = mx.zeros(vocab_size, mx.bool_)
            if known := sorted({t for t in prompt if 0 <= t < vocab_size}):
                self.prompt[mx.array(known)] = True
            self.counts = mx.zeros(vocab_size)
            if output:
                self.counts = self.counts.at[mx.array(list(output))].add(1.0)


def only_allowed(logits: mx.array, allowed: Mapping[int, bytes]) -> mx.array:
    """Logits [B, vocab], minus infinity for the tokens that a row of `allowed` may not choose.

    A row's bytes have one bit per token, the lowest first. They are unpacked here: on a CPU mlx would take longer for
    that than for the rest of a small model's step.
    """
    rows, vocab = logits.shape
    width = max(map(len, allowed.values()))
    words = b"".join([allowed.get(row, b"\xff" * width) for row in range(rows)])
    bits = np.frombuffer(words, np.uint8).reshape(rows, width)
    flags = np.unpackbits(bits, axis=1, count=vocab, bitorder="little").view(np.bool_)
    return mx.where(mx.array(flags), logits, -mx.inf)  # pyright: ignore[reportArgumentType] (any buffer)


class BatchSampler:
    """Samples for a fixed list of rows; made anew when rows join or leave."""

    def __init__(self, rows: Sequence[RowState]) -> None:
        self.rows = list(rows)
        kinds = [0 if r.sampling.greedy else 2 if r.sampling.filtered else 1 for r in rows]
        self._groups = [[i for i, kind in enumerate(kinds) if kind == wanted] for wanted in range(3)]
        self._adjusted = [i for i, r in enumerate(rows) if r.bias is not None or r.counts is not None]
        order = [i for group in self._groups for i in group]
        self._restore = None if order == list(range(len(order))) else mx.argsort(mx.array(order))
        self._filters = _Filters([rows[i].sampling for i in self._groups[2]]) if self._groups[2] else None

    def __call__(
        self, logits: mx.array, uniforms: Sequence[float], allowed: Mapping[int, bytes] | None = None
    ) -> mx.array:
        """Logits [B, vocab] and one uniform number per row → token ids [B]. Nothing is evaluated."""
        if self._adjusted:
            logits = self._adjust(logits.astype(mx.float32))
        if allowed:
            logits = only_allowed(logits, allowed)
        greedy, plain, filtered = self._groups
        if len(greedy) == len(self.rows):
            tokens = mx.argmax(logits, axis=-1)
        else:
            parts: list[mx.array] = []
            if greedy:
                parts.append(mx.argmax(_take(logits, greedy), axis=-1))
            if plain:
                parts.append(_draw(self._scaled(logits, plain), _column(uniforms, plain)))
            if filtered and self._filters is not None:
                parts.append(self._filters.draw(self._scaled(logits, filtered), _column(uniforms, filtered)))
            tokens = mx.concatenate([p.astype(mx.uint32) for p in parts]) if len(parts) > 1 else parts[0]
            if self._restore is not None:
                tokens = tokens[self._restore]
        for i in self._adjusted:
            if (counts := self.rows[i].counts) is not None:
                self.rows[i].counts = counts.at[tokens[i]].add(1.0)
        return tokens

    def _scaled(self, logits: mx.array, indices: list[int]) -> mx.array:
        """Probabilities [len(indices), vocab] after the temperature."""
        temperature = mx.array([[self.rows[i].sampling.temperature] for i in indices], mx.float32)
        picked = _take(logits, indices).astype(mx.float32)
        # The largest logit is taken off first: a tiny temperature must not overflow.
        return mx.softmax((picked - mx.max(picked, axis=-1, keepdims=True)) / temperature, axis=-1, precise=True)

    def _adjust(self, logits: mx.array) -> mx.array:
        """Bias and penalties, row by row: few rows have any."""
        rows = [logits[i] for i in range(len(self.rows))]
        for i in self._adjusted:
            state, s = self.rows[i], self.rows[i].sampling
            row = rows[i]
            if state.bias is not None:
                row = row + state.bias
            if state.counts is not None and state.prompt is not None:
                present = state.counts > 0
                if s.repetition_penalty != 1.0:
                    penalised = mx.where(row > 0, row / s.repetition_penalty, row * s.repetition_penalty)
                    row = mx.where(present | state.prompt, penalised, row)
                row = row - s.presence_penalty * present - s.frequency_penalty * state.counts
            rows[i] = row
        return mx.stack(rows)


class _Filters:
    """top_k, top_p and min_p of several rows, applied to probabilities in descending order."""

    def __init__(self, rows: Sequence[RowSampling]) -> None:
        self.top_k = mx.array([[r.top_k if r.top_k > 0 else 2**31 - 1] for r in rows])
        self.top_p = mx.array([[r.top_p] for r in rows], mx.float32)
        self.min_p = mx.array([[r.min_p] for r in rows], mx.float32)

    def draw(self, probs: mx.array, u: mx.array) -> mx.array:
        """Probabilities [R, vocab], u [R, 1] → token ids [R]."""
        order = mx.argsort(-probs, axis=-1)
        sorted_probs = mx.take_along_axis(probs, order, axis=-1)
        rank = mx.arange(probs.shape[-1])
        kept = mx.where(rank < self.top_k, sorted_probs, 0.0)
        kept = kept / mx.sum(kept, axis=-1, keepdims=True)
        before = mx.cumsum(kept, axis=-1) - kept
        keep = (before < self.top_p) & (kept >= self.min_p * kept[:, :1])
        kept = mx.where(keep | (rank == 0), kept, 0.0)
        return mx.take_along_axis(order, _draw(kept, u)[:, None], axis=-1)[:, 0]


def _draw(weights: mx.array, u: mx.array) -> mx.array:
    """Inverse transform: weights [R, n] ≥ 0, u [R, 1] in [0, 1) → index [R] with probability ∝ weight."""
    cumulative = mx.cumsum(weights, axis=-1)
    threshold = u * cumulative[:, -1:]
    # The first index whose cumulative weight exceeds the threshold; zero weights are never first.
    index = mx.sum(cumulative <= threshold, axis=-1)
    last = weights.shape[-1] - 1 - mx.argmax(weights[:, ::-1] > 0, axis=-1)
    return mx.minimum(index, last)


def _take(logits: mx.array, indices: list[int]) -> mx.array:
    return logits if len(indices) == logits.shape[0] else logits[mx.array(indices)]


def _column(uniforms: Sequence[float], indices: list[int]) -> mx.array:
    return mx.array([[uniforms[i]] for i in indices], mx.float32)
