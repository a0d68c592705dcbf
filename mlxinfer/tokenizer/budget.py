"""What one rendering of a chat template may cost, and how large its values may get.

Lists that hold the same list twice, again and again, are small in memory and endless as text, in a comparison or as a
hash. So every container is weighed when it is built, as if each reference were a copy; what weighs little is cheap in
every later use. Weights of containers are remembered, so that building on a large one costs nothing.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_VALUE_SIZE = 16 << 20
"""Longest string an expression may build, and the weight of the heaviest container."""
NODE_WEIGHT = 16
"""What an item of a container weighs besides its characters."""
MAX_DEPTH = 100
"""Containers inside containers; hashing a tuple recurses in C."""
MAX_VOLUME = 512 << 20
"""Characters and weights that all expressions of a rendering may build together."""
MAX_STEPS = 300_000
"""Loop and macro bodies that one rendering may run."""
MAX_SECONDS = 3.0
MAX_INT_BITS = 8192
"""Division of longer integers takes time that grows with their square, in one call that nothing can interrupt."""
CLOCK_EVERY = 4096

CONTAINERS = (list, tuple, set, frozenset)


class TemplateLimitError(Exception):
    """A template went past one of the limits."""


@dataclass(slots=True)
class Budget:
    """One rendering's account."""

    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)
    steps: int = MAX_STEPS
    volume: int = MAX_VOLUME
    known: dict[int, tuple[int, int, Any]] = field(default_factory=dict)
    """id → (weight, depth, the container itself: an id is only good while it lives)."""

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError(f"its loops ran more than {MAX_STEPS:,} times")
        self.clock()

    def clock(self) -> None:
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it took longer than {MAX_SECONDS:g} s")

    def build(self, size: int) -> None:
        """Account for a string or container of this size."""
        check_size(size)
        self.volume -= size
        if self.volume < 0:
            raise TemplateLimitError(f"it builds more than {MAX_VOLUME:,} characters in all")

    def weigh(self, value: Any) -> tuple[int, int]:
        """(weight, depth) of a value; each reference counts as a copy. Raises TemplateLimitError beyond the limits."""
        if isinstance(value, str | bytes):
            return NODE_WEIGHT + len(value), 0
        if not isinstance(value, (*CONTAINERS, Mapping)):
            return NODE_WEIGHT, 0
        # Children before parents, without recursion.
        stack = [value]
        while stack:
            node = stack[-1]
            if id(node) in self.known:
                stack.pop()
                continue
            pending = self._add(node)
            if pending:
                stack += pending
                if len(stack) > MAX_VALUE_SIZE // NODE_WEIGHT:
                    raise TemplateLimitError("it nests its values too deeply")
            else:
                stack.pop()
        weight, depth, _ = self.known[id(value)]
        return weight, depth

    def _add(self, node: Any) -> list[Any]:
        """Remember the node's weight, or return the children that have to be weighed first."""
        weight, depth, pending = NODE_WEIGHT, 0, []
        for count, child in enumerate(_children(node)):
            if count % CLOCK_EVERY == CLOCK_EVERY - 1:
                self.clock()
            if isinstance(child, str | bytes):
                weight += NODE_WEIGHT + len(child)
            elif isinstance(child, (*CONTAINERS, Mapping)):
                found = self.known.get(id(child))
                if found is None:
                    pending.append(child)
                    continue
                weight += found[0]
                depth = max(depth, found[1])
            else:
                weight += NODE_WEIGHT
            if weight > MAX_VALUE_SIZE:
                raise TemplateLimitError(f"it builds a value of more than {MAX_VALUE_SIZE:,} characters")
        if depth >= MAX_DEPTH:
            raise TemplateLimitError(f"it nests its values more than {MAX_DEPTH} deep")
        if not pending:
            self.known[id(node)] = (weight, depth + 1, node)
        return pending

    def account(self, value: Any) -> Any:
        """Account for a value that an expression built; returns it."""
        self.clock()
        if isinstance(value, str | bytes):
            self.build(len(value))
        elif isinstance(value, (*CONTAINERS, Mapping)):
            if id(value) not in self.known:
                self.build((len(value) + 1) * NODE_WEIGHT)
            self.weigh(value)
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateLimitError(f"it builds an integer of {value.bit_length():,} bits; at most {MAX_INT_BITS:,}")
        return value

    def clocked(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, with a look at the clock before each."""
        for item in items:
            self.clock()
            yield item


def _children(node: Any) -> Any:
    if isinstance(node, Mapping):
        return (part for pair in node.items() for part in pair)
    return node


_budget: contextvars.ContextVar[Budget | None] = contextvars.ContextVar("chat_template_budget", default=None)


def current() -> Budget:
    """The account of the rendering that runs; a fresh one outside of any (Jinja may evaluate while it compiles)."""
    return _budget.get() or Budget()


class rendering:  # noqa: N801 (used as `with rendering() as budget`)
    """Makes a new Budget the current one for a `with` block."""

    def __enter__(self) -> Budget:
        budget = Budget()
        self._token = _budget.set(budget)
        return budget

    def __exit__(self, *_: object) -> None:
        _budget.reset(self._token)


def check_size(size: int) -> None:
    if size > MAX_VALUE_SIZE:
        raise TemplateLimitError(f"it builds a value of {size:,} characters; at most {MAX_VALUE_SIZE:,}")


def weight(value: Any) -> int:
    """The weight of any value, at least its characters as text."""
    return current().weigh(value)[0]
