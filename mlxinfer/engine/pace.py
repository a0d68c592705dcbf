"""How long a step will take: a small linear model, fitted while the engine runs.

seconds = a · forwards + b · prompt tokens + c · decode rows + d · (query, key) pairs, none of them negative. Old
steps are forgotten, so the model follows a machine that gets busy or hot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FORGET = 0.95
"""Weight of the past at each new step: about the last 20 steps count."""
SCALES = (1.0, 64.0, 8.0, 65536.0)
"""Typical sizes of the four features, so that one sweep of the solver treats them alike."""
SWEEPS = 12
TOKENS_A_FORWARD = 16.0
"""A forward costs about as much as so many prompt tokens, and a row as one, until something else was seen: a belief of
little weight, which tells the features apart where the observed steps don't, say when all chunks have the same size, or
when none had a prompt for a while."""
LIKELY = (2.0, 1024.0)
PRIOR_WEIGHT = 0.02
PLAIN_STEPS = 3.0
LEARN = 0.2
"""Of what a step with a prompt says, so much goes into the belief, which isn't forgotten."""
TRUST = 2
"""No chunk is more than this many times as large as those that were seen: beyond, the line is a guess."""
FIRST_CHUNK = 32
"""Prompt tokens to try when nothing is known yet."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes."""

    forwards: int
    tokens: int
    """Prompt tokens."""
    rows: int
    """Decode rows."""
    pairs: int
    """Keys looked at, summed over all prompt tokens and decode rows."""


def _zeros() -> list[float]:
    return [0.0] * len(SCALES)


def _belief(tokens_a_forward: float) -> list[list[float]]:
    rows = ((1.0, -tokens_a_forward / 64, 0.0, 0.0), (0.0, -8 / 64, 1.0, 0.0))
    return [[PRIOR_WEIGHT * sum(p[i] * p[j] for p in rows) for j in range(len(SCALES))] for i in range(len(SCALES))]


def _matrix() -> list[list[float]]:
    return [_zeros() for _ in SCALES]


@dataclass(slots=True)
class Pace:
    """Predicts steps. `observe` each finished one."""

    _a: list[list[float]] = field(default_factory=_matrix)
    _b: list[float] = field(default_factory=_zeros)
    _cost: list[float] = field(default_factory=_zeros)
    """Seconds per scaled unit of each feature."""
    _tokens_a_forward: float = TOKENS_A_FORWARD
    _believed: list[list[float]] = field(default_factory=lambda: _belief(TOKENS_A_FORWARD))
    observed: int = 0
    _plain: float = 0.0
    """Of the steps that count, those without a prompt."""
    _stale: bool = False
    _largest: float = 0.0
    """The largest number of prompt tokens in a recent step."""

    def observe(self, load: Load, seconds: float) -> None:
        """Take in what a step of this load took."""
        if seconds <= 0 or not load.forwards:
            return
        x = [f / s for f, s in zip((load.forwards, load.tokens, load.rows, load.pairs), SCALES, strict=True)]
        # Errors count relative to the step's length. A step that was noticed late makes the next one look short: such
        # a one must not weigh more than what was expected of it.
        expected = sum(c * xi for c, xi in zip(self._cost, x, strict=True))
        weight = 1 / max(seconds, expected) ** 2
        for i, (row, belief, xi) in enumerate(zip(self._a, self._believed, x, strict=True)):
            self._a[i] = [a * FORGET + weight * (xi * xj + b) for a, xj, b in zip(row, x, belief, strict=True)]
            self._b[i] = self._b[i] * FORGET + weight * xi * seconds
        self.observed += 1
        self._largest = max(float(load.tokens), self._largest * FORGET)
        self._stale = True
        self._plain = self._plain * FORGET + (not load.tokens)
        if load.tokens and self._plain > PLAIN_STEPS:
            self._learn()

    def _learn(self) -> None:
        """What a forward costs beside a prompt token differs between machines and models, and hardly with time. Steps
        with and without a prompt tell it."""
        self._solve()
        forward, token = self._cost[0] / SCALES[0], self._cost[1] / SCALES[1]
        if forward > 0 and token > 0:
            seen = min(max(forward / token, LIKELY[0]), LIKELY[1])
            self._tokens_a_forward += LEARN * (seen - self._tokens_a_forward)
            self._believed = _belief(self._tokens_a_forward)

    def _solve(self) -> None:
        """Non-negative least squares by coordinate descent from the last solution; when somebody asks, not before."""
        if not self._stale:
            return
        self._stale = False
        cost = self._cost
        for _ in range(SWEEPS):
            for i, row in enumerate(self._a):
                if row[i] > 0:
                    rest = sum(row[j] * cost[j] for j in range(len(cost)) if j != i)
                    cost[i] = max(0.0, (self._b[i] - rest) / row[i])

    def seconds(self, load: Load) -> float:
        """The predicted length of a step; 0 while nothing is known."""
        self._solve()
        x = (load.forwards, load.tokens, load.rows, load.pairs)
        return sum(c * f / s for c, f, s in zip(self._cost, x, SCALES, strict=True))

    def tokens_within(self, seconds: float, beside: Load, context: int) -> int:
        """Prompt tokens after `context` others that fit into a step of `seconds` beside what it computes already."""
        if not self.observed:
            return max(0, FIRST_CHUNK - beside.tokens)
        left = seconds - self.seconds(beside)
        if left <= 0:
            return 0
        per_token = self._cost[1] / SCALES[1]
        per_pair = self._cost[3] / SCALES[3]
        # The tokens see each other as well: one refinement is enough.
        first = left / max(per_token + per_pair * context, 1e-9)
        size = int(left / max(per_token + per_pair * (context + min(first, 4096.0) / 2), 1e-9))
        return min(size, max(FIRST_CHUNK, TRUST * int(self._largest)))
