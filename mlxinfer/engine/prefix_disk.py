"""Moves idle prefixes between the tree in memory and the disk tier. On the MLX thread, but for the writing itself.

Written are entries that leave memory and those that have been idle for a while, so that an SSD isn't worn by every turn
of a conversation. Nothing here may fail a request: what can't be stored or read isn't there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine.disk_arrays import restored, stored
from mlxinfer.engine.disk_writer import DiskJob, DiskWriter
from mlxinfer.engine.kv import arrays_in
from mlxinfer.engine.prefix import Evicted
from mlxinfer.engine.prefix_store import Span, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlxinfer.engine.disk import DiskTier
    from mlxinfer.engine.prefix_store import PrefixStore

log = logging.getLogger(__name__)

MIN_TOKENS = 128
"""Shorter prefixes are computed again faster than they are worth a file."""
MAX_LAST = 64
"""Entries that are written at the end of a model."""
MIN_GAIN = 64
"""Tokens that reading a file must spare …"""
MIN_SHARE = 8
"""… and at least this part of what is in it, since a file is read whole."""


class PrefixDisk:
    """The disk tier of one engine's prefix cache."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.writer = DiskWriter(tier)

    def lookup(self, store: PrefixStore, key: str, tokens: Sequence[int], limit: int) -> int:
        """How many of the first `limit` tokens a file could restore; without reading it."""
        found = self.tier.lookup(key, tokens, limit, store.needs_state)
        return 0 if found is None else found[1]

    def fetch(self, store: PrefixStore, key: str, tokens: Sequence[int], limit: int, held: int) -> None:
        """Bring into memory what is on disk of `tokens`, when it is worth more than the `held` ones that are there."""
        found = self.tier.lookup(key, tokens, limit, store.needs_state)
        if found is None:
            return
        entry, length = found
        if length - held < max(MIN_GAIN, len(entry.tokens) // MIN_SHARE):
            return
        if entry.nbytes > store.tree.max_bytes or (arrays := self.tier.read(entry)) is None:
            return
        named = restored(arrays)
        try:
            span, states = unpacked(entry.meta, named, len(entry.tokens))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            log.warning("%s does not hold what this model remembers: %s", entry.path.name, error)
            return

        def part(start: int, end: int) -> Span:
            return span if (start, end) == (0, span.length) else span.part(start, end)

        store.insert(key, entry.tokens, part, states)
        store.tree.mark_written(Evicted(key, entry.tokens, [], states, dirty=False))

    def offer(
        self, entry: Evicted[Span, State], done: Callable[[bool], None] | None = None, *, last: bool = False
    ) -> bool:
        """Queue an entry for writing; False when it is too short, there already, or the disk is busy (but `last`)."""
        if not entry.dirty or len(entry.tokens) < MIN_TOKENS or not (last or self.writer.free):
            return False
        try:
            arrays, meta = packed(entry)
            job = DiskJob(entry.key, entry.tokens, stored(arrays), meta, sorted(entry.states), done)
        except Exception:
            # The worker's edge: whoever makes room in the cache has nothing to do with what is in it.
            log.exception("a prefix could not be packed for the disk")
            return False
        return self.writer.submit(job, last=last)

    def write_idle(
        self, store: PrefixStore, post: Callable[[Callable[[], None]], None], idle: Callable[[], bool]
    ) -> None:
        """Queue the next entry that isn't on disk; when it is written, `post` brings us back for another, if `idle`."""
        for entry in store.tree.iter_idle():

            def written(ok: bool, entry: Evicted[Span, State] = entry) -> None:
                if ok:
                    post(lambda: self._note(store, entry, post, idle))

            if self.offer(entry, written):
                return

    def _note(
        self,
        store: PrefixStore,
        entry: Evicted[Span, State],
        post: Callable[[Callable[[], None]], None],
        idle: Callable[[], bool],
    ) -> None:
        store.tree.mark_written(entry)
        if idle():
            self.write_idle(store, post, idle)

    def close(self, store: PrefixStore) -> None:
        """Queue what isn't on disk yet, newest first. Returns at once; `wait` is for another thread."""
        for entry in list(store.tree.iter_idle())[: -MAX_LAST - 1 : -1]:
            self.offer(entry, last=True)
        self.writer.finish()

    def wait(self, timeout: float) -> bool:
        """After `close`: wait until all is written, up to `timeout` seconds; what is left then is dropped."""
        return self.writer.close(timeout)


def packed(entry: Evicted[Span, State]) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """(arrays by name, the rest as JSON values): all spans as one, and the checkpoints."""
    arrays: dict[str, mx.array] = {}
    layers = entry.spans[0].layers if entry.spans else []
    for layer, buffers in enumerate(layers):
        for index in range(len(buffers)):
            parts = [span.layers[layer][index][..., : span.length, :] for span in entry.spans]
            whole = mx.concatenate(parts, axis=2) if len(parts) > 1 else mx.contiguous(parts[0])
            arrays[f"span.{layer}.{index}"] = whole
    states = {str(p): _plain(state.leaves, f"state.{p}", arrays) for p, state in entry.states.items()}
    return arrays, {"layers": [len(buffers) for buffers in layers], "states": states}


def unpacked(meta: dict[str, Any], arrays: dict[str, mx.array], length: int) -> tuple[Span, dict[int, State]]:
    """What `packed` took apart. Raises KeyError, TypeError, ValueError or IndexError for anything else."""
    layers = [[arrays[f"span.{i}.{j}"] for j in range(count)] for i, count in enumerate(meta["layers"])]
    for buffers in layers:
        if any(b.ndim != 4 or b.shape[2] != length for b in buffers):
            raise ValueError(f"buffers of {[b.shape for b in buffers]} for {length} tokens")
    states: dict[int, State] = {}
    for position, leaves in meta["states"].items():
        held = [_built(leaf, arrays) for leaf in leaves]
        states[int(position)] = State(held, sum(a.nbytes for a in arrays_in(held)))
    return Span(layers, length), states


def _plain(value: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """A state as JSON values; its arrays go to `arrays`, under names that begin with `name`."""
    if isinstance(value, mx.array):
        arrays[name] = mx.contiguous(value)
        return {"array": name}
    if isinstance(value, tuple):
        return {"tuple": [_plain(part, f"{name}.{i}", arrays) for i, part in enumerate(value)]}
    if isinstance(value, list):
        return [_plain(part, f"{name}.{i}", arrays) for i, part in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name} is a {type(value).__name__}, which is not stored")


def _built(value: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(value, dict):
        if "array" in value:
            return arrays[value["array"]]
        return tuple(_built(part, arrays) for part in value["tuple"])
    if isinstance(value, list):
        return [_built(part, arrays) for part in value]
    return value
