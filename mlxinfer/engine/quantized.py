"""Keys and values held in 8 or 4 bits: the leaf, and attention of single tokens over its packed form.

A token is packed by itself when it is appended, in groups along the head: what it becomes doesn't depend on chunks,
neighbours or whether it came out of the prefix cache. Heads that no group divides stay as they are.

Keys are rotated before they are packed: a few of their channels are far larger than the others and would set the scale
for their whole group. A Hadamard transform spreads them, and queries that are rotated too give the same scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxinfer.engine.kv import SeqKV, Sequence
from mlxinfer.errors import InvalidRequestError

GROUPS = (64, 32)
"""Numbers that share a scale and an offset; the first that divides both heads is taken."""
WINDOW_BITS = 8
"""Of sliding windows, always: their size is bounded, and in 4 bits they cost most of the quality."""


class QuantizedKV(SeqKV):
    """Keys and values of one sequence in one layer, packed.

    `keys` and `values` [1, kv_heads, capacity, head_dim · bits / 32] are uint32; `scales` holds the scales and offsets
    of the keys and those of the values, [1, kv_heads, capacity, head_dim / group] each.
    """

    __slots__ = ("bits", "group", "scales")

    def __init__(self, bits: int, group: int, window: int | None = None) -> None:
        super().__init__(window)
        self.bits = bits
        self.group = group
        self.scales: list[mx.array] = []

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Pack keys [1, kv_heads, L, head_dim] and values [1, kv_heads, L, value_dim] and add them at the end."""
        k, *key_scales = mx.quantize(rotated(keys), group_size=self.group, bits=self.bits)
        v, *value_scales = mx.quantize(values, group_size=self.group, bits=self.bits)
        self._add([k, v, *key_scales, *value_scales])

    def buffers(self) -> list[mx.array]:
        """Packed keys and values, then scales and offsets of each; tokens along axis 2."""
        return [*super().buffers(), *self.scales]

    def load(self, buffers: list[mx.array], start: int, end: int) -> None:
        super().load(buffers[:2], start, end)
        self.scales = [buffer[...] for buffer in buffers[2:]]

    def packed(self, length: int) -> tuple[list[mx.array], list[mx.array]]:
        """Codes, scales and offsets of the keys, and of the values, that the last `length` queries can see."""
        held = self.end - self.start
        first = held - self.visible(length)
        k, v, ks, kb, vs, vb = (buffer[..., first:held, :] for buffer in self.buffers())
        return [k, ks, kb], [v, vs, vb]

    def view(self, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values that the last `length` queries can see, unpacked."""
        keys, values = (mx.dequantize(*part, group_size=self.group, bits=self.bits) for part in self.packed(length))
        return rotated(keys), values

    def attend(
        self, query: mx.array, *, scale: float, window: int | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of the last token, [1, heads, 1, head_dim] → [1, heads, 1, value_dim].

        For one token the packed keys are read where they lie, a fraction of the bytes. A chunk unpacks them once with
        `view`: from 8 tokens on the packed product takes several times as long (measured on a CPU).
        """
        keys, values = self.packed(1)
        if window is not None:
            keys, values = ([part[..., -window:, :] for part in parts] for parts in (keys, values))
        heads, kv_heads = query.shape[1], keys[0].shape[1]
        # Scores in float32, as the fused kernel has them: rounded to half precision they cost more than 8-bit keys do.
        grouped = rotated(query.astype(mx.float32) * scale).reshape(1, kv_heads, heads // kv_heads, -1)
        scores = mx.quantized_matmul(grouped, *keys, transpose=True, group_size=self.group, bits=self.bits)
        if sinks is not None:
            # One more score per head, for a key without a value.
            scores = mx.concatenate([scores, sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1)], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True).astype(query.dtype)
        if sinks is not None:
            weights = weights[..., :-1]
        out = mx.quantized_matmul(weights, *values, transpose=False, group_size=self.group, bits=self.bits)
        return out.reshape(1, heads, 1, -1)


def rotated(array: mx.array) -> mx.array:
    """The last axis times a symmetric orthogonal matrix: twice gives the array back."""
    dim = array.shape[-1]
    # Hadamard matrices exist for every power of two; 96 is three times 32.
    blocks = array.reshape(*array.shape[:-1], -1, dim & -dim)
    return mx.hadamard_transform(blocks).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model's layers hold their keys: per SeqKV (bits, group size), or None where no group divides its heads."""

    leaves: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, sequence: Sequence, bits: int) -> Packing:
        """For sequences like this one, which holds a token or more, unpacked.

        Raises InvalidRequestError when there are keys and not one layer's can be packed.
        """
        held = [leaf for leaf in sequence.leaves() if isinstance(leaf, SeqKV)]
        leaves = tuple(_bits_and_group(leaf, bits) for leaf in held)
        if leaves and not any(leaves):
            sizes = sorted({buffer.shape[-1] for leaf in held for buffer in leaf.buffers()})
            raise InvalidRequestError(
                f"kv_bits is {bits}, but this model's keys and values are {', '.join(map(str, sizes))} wide and only "
                f"multiples of {GROUPS[-1]} can be packed; leave kv_bits out for it",
                param="kv_bits",
            )
        return cls(leaves)

    def empty(self, sequence: Sequence) -> Sequence:
        """An empty sequence like `sequence`, with packed leaves."""
        leaves = iter(self.leaves)

        def own(leaf: Any) -> Any:
            if isinstance(leaf, tuple):
                return tuple(own(part) for part in leaf)
            form = next(leaves) if isinstance(leaf, SeqKV) else None
            return leaf if form is None else QuantizedKV(*form, leaf.window)

        return Sequence([own(layer) for layer in sequence.layers])

    def __str__(self) -> str:
        """For example "8-bit, group 64, in 5 of 6 layers"."""
        forms = [form for form in self.leaves if form is not None]
        if not forms:
            return "none"
        bits, groups = (" and ".join(str(n) for n in sorted(set(part))) for part in zip(*forms, strict=True))
        part = "" if len(forms) == len(self.leaves) else f", in {len(forms)} of {len(self.leaves)} layers"
        return f"{bits}-bit, group {groups}{part}"


def check_tier(bits: int, tier: str, reason: str) -> None:
    """Raise InvalidRequestError for the sequential tier: mlx-lm's own caches are not packed."""
    if tier == "sequential":
        raise InvalidRequestError(
            f"kv_bits is {bits}, but this model runs row by row over mlx-lm's own caches, which are not packed (tier "
            f"sequential: {reason}); leave kv_bits out for it",
            param="kv_bits",
        )


def _bits_and_group(leaf: SeqKV, bits: int) -> tuple[int, int] | None:
    dims = [buffer.shape[-1] for buffer in leaf.buffers()]
    group = next((g for g in GROUPS if dims and all(dim > 0 and dim % g == 0 for dim in dims)), None)
    return None if group is None else (bits if leaf.window is None else WINDOW_BITS, group)
