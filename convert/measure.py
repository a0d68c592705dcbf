"""What a conversion cost: the converted model against its source, token by token over the same text.

Both models are loaded and run on the calling thread; arrays belong to the thread that makes them. A row of text runs in
pieces through a cache, so that the logits that exist at any time stay below LOGITS_BYTES whatever the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer import upstream
from mlxinfer.convert.calibration import documents, rows
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import mlx.nn as nn

    from mlxinfer.convert.calibration import Document
    from mlxinfer.tokenizer import Tokenizer

LOGITS_BYTES = 64 << 20
"""Of one model's logits of one piece, in float32."""
LARGEST_PIECE = 256
"""Tokens of one forward."""
DEFAULT_MAX_TOKENS = 512
"""Of one document."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the converted model's next-token distributions are from the source's. In nats, over all positions."""

    tokens: int
    """Positions compared."""
    kl_mean: float
    kl_p50: float
    kl_p99: float
    kl_max: float
    """KL divergence of the converted model from the source: sum of p log(p / q)."""
    flips: float
    """Share of positions at which another token is the most likely."""
    perplexity_source: float
    perplexity_converted: float
    """exp of the mean negative log-likelihood of the text's own next token."""
    by_kind: tuple[tuple[str, float], ...]
    """Mean KL divergence for prose, code and chat."""

    def exceeds(self, max_kl: float) -> bool:
        """Whether the mean KL divergence is above a limit, or no number at all."""
        return not self.kl_mean <= max_kl


def compare(
    source: nn.Module,
    converted: nn.Module,
    tokenizer: Tokenizer,
    *,
    texts: Sequence[Document] | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run both models over `texts` (the package's evaluation texts), each cut to `max_tokens`.

    `progress`: documents done and in all. Raises InvalidRequestError when the models' vocabularies differ or no text
    has two tokens.
    """
    texts = documents("evaluation") if texts is None else texts
    divergences: dict[str, list[np.ndarray]] = {}
    flips, likelihoods = 0, np.zeros(2)
    for done, document in enumerate(texts):
        for row in rows([document], tokenizer, max_tokens):
            for kl, flipped, nll in _compare_row(source, converted, row):
                divergences.setdefault(document.kind, []).append(kl)
                flips += flipped
                likelihoods += nll
        if progress is not None:
            progress(done + 1, len(texts))
    if not divergences:
        raise InvalidRequestError("nothing to compare: no text has two tokens")
    kinds = {kind: np.concatenate(values) for kind, values in divergences.items()}
    every = np.concatenate(list(kinds.values()))
    p50, p99 = np.quantile(every, [0.5, 0.99])
    source_nll, converted_nll = likelihoods / every.size
    return Comparison(
        tokens=every.size,
        kl_mean=float(every.mean()),
        kl_p50=float(p50),
        kl_p99=float(p99),
        kl_max=float(every.max()),
        flips=flips / every.size,
        perplexity_source=_exp(source_nll),
        perplexity_converted=_exp(converted_nll),
        by_kind=tuple((kind, float(values.mean())) for kind, values in sorted(kinds.items())),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _compare_row(
    source: nn.Module, converted: nn.Module, row: Sequence[int]
) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Per piece: KL divergence of each position, positions whose top token differs, both negative log-likelihoods."""
    runs = _logits(source, row), _logits(converted, row)
    for (start, left), (_, right) in zip(*runs, strict=True):
        if left.shape != right.shape:
            raise InvalidRequestError(
                f"the models give logits of {left.shape[-1]} and {right.shape[-1]} tokens; they can't be compared"
            )
        targets = mx.array(list(row[start + 1 : start + 1 + left.shape[0]]))[:, None]
        p, q = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (left, right))
        # Where p underflows to nothing q may be minus infinity, as masked tokens are.
        terms = mx.where(p > -100, mx.exp(p) * (p - q), 0)
        # The exact value is never below zero; sums of float32 are, by their rounding.
        kl = mx.maximum(terms.sum(axis=-1), 0)
        flipped = (left.argmax(axis=-1) != right.argmax(axis=-1)).sum()
        nll = [-mx.take_along_axis(values, targets, axis=-1).sum() for values in (p, q)]
        mx.eval(kl, flipped, nll)
        yield np.array(kl, dtype=np.float64), int(np.array(flipped)), np.array([np.array(n) for n in nll], np.float64)


def _logits(model: nn.Module, row: Sequence[int]) -> Iterator[tuple[int, mx.array]]:
    """Position of the first token and float32 logits [tokens, vocabulary] of one piece after the other."""
    forward: Any = model
    cache = upstream.make_cache(model)
    start, size = 0, 1
    while start < len(row) - 1:
        piece = row[start : min(start + size, len(row) - 1)]
        logits = forward(mx.array([piece]), cache=cache)[0].astype(mx.float32)
        yield start, logits
        start += len(piece)
        # The first piece tells how wide the vocabulary is.
        size = max(1, min(LARGEST_PIECE, LOGITS_BYTES // (4 * logits.shape[-1])))
