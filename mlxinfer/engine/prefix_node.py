"""The nodes of the prefix cache's radix tree, and how token ids are compared."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Span = TypeVar("Span")
State = TypeVar("State")


class Node(Generic[Span, State]):
    """Positions [start, end) under its parent, and the checkpoints at positions in (start, end]."""

    __slots__ = ("children", "dirty", "end", "key", "parent", "span", "start", "states", "tokens")

    def __init__(self, key: str, parent: Node[Span, State] | None, start: int, tokens: array[int], span: Any) -> None:
        self.key = key
        self.parent = parent
        self.start = start
        self.end = start + len(tokens)
        self.tokens = tokens
        self.span: Span = span
        self.states: dict[int, State] = {}
        self.children: dict[int, Node[Span, State]] = {}
        self.dirty = True
        """Not on disk as it is now."""


def walk(root: Node[Span, State] | None, ids: array[int], limit: int) -> tuple[list[Node[Span, State]], int]:
    """The nodes below `root` that share a token with `ids[:limit]`, from the top, and how many tokens they share."""
    path: list[Node[Span, State]] = []
    at = 0
    node = root
    while node is not None and at < limit:
        node = node.children.get(ids[at])
        if node is not None:
            path.append(node)
            at += shared_length(node.tokens, ids[at : min(limit, node.end)])
            if at < node.end:
                break
    return path, at


def path_to(node: Node[Span, State]) -> list[Node[Span, State]]:
    """The nodes from the top down to `node`, without the root."""
    path: list[Node[Span, State]] = []
    above: Node[Span, State] | None = node
    while above is not None and above.parent is not None:
        path.append(above)
        above = above.parent
    return path[::-1]


def checked_nodes(key: str, root: Node[Span, State]) -> Iterator[Node[Span, State]]:
    """Every node below `root`; asserts that the links and positions of each are right."""
    assert root.children, "an empty root"
    assert (root.parent, root.end, root.key) == (None, 0, key)
    waiting = [root]
    while waiting:
        parent = waiting.pop()
        for first, node in parent.children.items():
            assert (node.parent, node.key, node.start) == (parent, key, parent.end)
            assert node.tokens[0] == first
            assert node.end == node.start + len(node.tokens)
            assert all(node.start < position <= node.end for position in node.states)
            waiting.append(node)
            yield node


def token_array(tokens: Sequence[int]) -> array[int]:
    """Token ids as the tree compares them; give it one to spare it the conversion."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two sequences of one kind share. Slices are compared: doubling, then halving."""
    end = min(len(a), len(b))
    low, step = 0, 64
    while low < end:
        high = min(low + step, end)
        if a[low:high] != b[low:high]:
            break
        low, step = high, step * 2
    else:
        return end
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
