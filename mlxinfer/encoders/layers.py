"""Encoders on mlx: one model for all families, put together as its `Shape` says. Hidden states are [B, L, hidden]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import kernels, runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlxinfer.encoders.shape import Shape

BLOCK = 512
"""Queries whose scores are held at a time: those of a long text against all of it take more memory than the model."""
CPU_BLOCK = 1 << 18
"""Activations made at a time on a CPU. Larger arrays are fresh from the system each time, and twice as slow or more."""
MAX_DISTANCE = 128
"""Beyond it all relative positions of MPNet fall into one bucket."""


ERF = (0.0705230784, 0.0422820123, 0.0092705272, 0.0001520143, 0.0002765672, 0.0000430638)
"""Abramowitz and Stegun 7.1.28: erf(z) is 1 - 1 / (1 + a1 z + … + a6 z^6)^16 for z >= 0, to 3e-7."""


def _gelu(x: mx.array) -> mx.array:
    """x times the normal distribution function of x."""
    if not runtime.on_cpu():
        return x * (0.5 + 0.5 * mx.erf(x * math.sqrt(0.5)))
    # mlx's erf goes element by element on a CPU and takes half of an encoder's time.
    size = mx.abs(x)
    z = size * math.sqrt(0.5)
    power = 1 + z * (ERF[0] + z * (ERF[1] + z * (ERF[2] + z * (ERF[3] + z * (ERF[4] + z * ERF[5])))))
    for _ in range(4):
        power = power * power
    return mx.maximum(x, 0) - size * (0.5 / power)


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": _gelu,
    "gelu_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "tanh": mx.tanh,
}


class Bias:
    """What is added to attention scores: a huge negative number where a token must not look, and relative positions.

    Not minus infinity: padding may see nothing at all, and its NaN would spread to everything.

    Made block by block, when it is needed.
    """

    def __init__(self, lengths: Sequence[int], padded: int, dtype: mx.Dtype, relative: mx.array | None = None) -> None:
        """Row b of the batch has lengths[b] tokens of `padded`; `relative` is [heads, padded, padded]."""
        self._dtype = dtype
        self._relative = relative
        self._padding: mx.array | None = None
        if any(length != padded for length in lengths):
            keys = mx.arange(padded)[None] < mx.array(list(lengths))[:, None]
            self._padding = self._forbid(keys)[:, None, None, :]

    def block(self, queries: tuple[int, int], keys: tuple[int, int], window: int | None) -> mx.array | None:
        """[B or 1, heads or 1, queries or 1, keys], or None where nothing is added."""
        bias = None if self._padding is None else self._padding[..., keys[0] : keys[1]]
        if self._relative is not None:
            own = self._relative[None, :, queries[0] : queries[1], keys[0] : keys[1]]
            bias = own if bias is None else bias + own
        if window is not None and max(queries[1] - keys[0], keys[1] - queries[0]) > window + 1:
            distance = mx.abs(mx.arange(*queries)[:, None] - mx.arange(*keys)[None])
            own = self._forbid(distance <= window)
            bias = own[None, None] if bias is None else bias + own
        return bias

    def _forbid(self, allowed: mx.array) -> mx.array:
        # A quarter, so that two of them added up are finite.
        return mx.where(allowed, mx.array(0.0, self._dtype), mx.array(mx.finfo(self._dtype).min / 4, self._dtype))


def attend(queries: mx.array, keys: mx.array, values: mx.array, bias: Bias, window: int | None) -> mx.array:
    """Bidirectional attention; all [B, heads, L, head_dim]."""
    length, scale = queries.shape[2], queries.shape[3] ** -0.5
    parts: list[mx.array] = []
    for start in range(0, length, BLOCK):
        end = min(length, start + BLOCK)
        first, last = (0, length) if window is None else (max(0, start - window), min(length, end + window))
        mask = bias.block((start, end), (first, last), window)
        seen = keys[:, :, first:last], values[:, :, first:last]
        parts.append(mx.fast.scaled_dot_product_attention(queries[:, :, start:end], *seen, scale=scale, mask=mask))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        size = shape.hidden_size
        self.num_heads = shape.num_heads
        self.rope_base = shape.rope[layer] if shape.rope else None
        self.window = shape.windows[layer] if shape.windows else None
        self.qkv_proj = nn.Linear(size, 3 * size, bias=shape.attention_bias)
        self.o_proj = nn.Linear(size, size, bias=shape.attention_bias)

    def __call__(self, x: mx.array, bias: Bias) -> mx.array:
        batch, length, size = x.shape
        heads = self.qkv_proj(x).reshape(batch, length, 3, self.num_heads, -1).transpose(2, 0, 3, 1, 4)
        queries, keys, values = heads[0], heads[1], heads[2]
        if self.rope_base is not None:
            queries, keys = (
                mx.fast.rope(y, y.shape[-1], traditional=False, base=self.rope_base, scale=1.0, offset=0)
                for y in (queries, keys)
            )
        out = attend(queries, keys, values, bias, self.window)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, size))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide = shape.intermediate_size
        self.gated = shape.gated
        self.rows = max(32, CPU_BLOCK // wide)
        self.activation = ACTIVATIONS[shape.activation]
        self.up_proj = nn.Linear(shape.hidden_size, wide * (1 + shape.gated), bias=shape.mlp_bias)
        self.down_proj = nn.Linear(wide, shape.hidden_size, bias=shape.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        if not runtime.on_cpu():
            return self._forward(x)
        flat = x.reshape(-1, x.shape[-1])
        parts = [self._forward(flat[i : i + self.rows]) for i in range(0, len(flat), self.rows)]
        return mx.concatenate(parts, axis=0).reshape(x.shape)

    def _forward(self, x: mx.array) -> mx.array:
        up = self.up_proj(x)
        if self.gated:
            gate, linear = mx.split(up, 2, axis=-1)
            if self.activation is nn.silu and (silu_mul := kernels.kernel("silu_mul")):
                return self.down_proj(silu_mul(gate, linear))
            return self.down_proj(self.activation(gate) * linear)
        return self.down_proj(self.activation(up))


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.prenorm = shape.prenorm
        self.attention = Attention(shape, layer)
        self.mlp = FeedForward(shape)
        # ModernBERT has just normed what comes into its first layer.
        self.attention_norm = nn.Identity() if shape.prenorm and layer == 0 else _norm(shape)
        self.mlp_norm = _norm(shape)

    def __call__(self, x: mx.array, bias: Bias) -> mx.array:
        if self.prenorm:
            x = x + self.attention(self.attention_norm(x), bias)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, bias))
        return self.mlp_norm(x + self.mlp(x))


class Head(nn.Module):
    """A reranker's: [B, hidden] → logits [B]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.activation = ACTIVATIONS[shape.head_activation]
        self.dense = nn.Linear(size, size, bias=shape.head_bias)
        if shape.head_norm:
            self.norm = _norm(shape)
        self.out = nn.Linear(size, 1)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.activation(self.dense(x))
        if "norm" in self:
            x = self.norm(x)
        return self.out(x)[:, 0]


class EncoderModel(nn.Module):
    """Embeddings and layers, and with `scores` a reranker's head."""

    def __init__(self, shape: Shape, *, scores: bool) -> None:
        super().__init__()
        self.shape = shape
        size = shape.hidden_size
        self.words = nn.Embedding(shape.vocab_size, size)
        if shape.positions:
            self.positions = nn.Embedding(shape.positions, size)
        if shape.types:
            self.types = nn.Embedding(shape.types, size)
        if shape.relative_buckets:
            self.relative_bias = nn.Embedding(shape.relative_buckets, shape.num_heads)
        self.embedding_norm = _norm(shape)
        self.layers = [Layer(shape, i) for i in range(shape.num_layers)]
        if shape.prenorm:
            self.final_norm = _norm(shape)
        if scores:
            self.head = Head(shape)

    def embed(self, ids: mx.array, types: mx.array | None) -> mx.array:
        """Token ids, and types where a text has a second part, [B, L] → [B, L, hidden]."""
        x = self.words(ids)
        if "positions" in self:
            x = x + self.positions(mx.arange(ids.shape[1]) + self.shape.position_offset)
        if "types" in self:
            # A family without a second type gives all tokens the first.
            x = x + self.types(mx.zeros_like(ids[:1]) if types is None or self.shape.types < 2 else types)
        return self.embedding_norm(x)

    def run(
        self, ids: mx.array, types: mx.array | None, lengths: Sequence[int], pieces: int
    ) -> Iterator[tuple[int, mx.array] | None]:
        """None after each of about `pieces` parts of the layers but the last, then (0, hidden states)."""
        x = self.embed(ids, types)
        bias = Bias(lengths, ids.shape[1], x.dtype, self._relative(ids.shape[1]))
        every = max(1, math.ceil(len(self.layers) / pieces))
        for number, layer in enumerate(self.layers):
            if number and number % every == 0:
                mx.eval(x)
                yield None
            x = layer(x, bias)
        yield 0, self.final_norm(x) if "final_norm" in self else x

    def _relative(self, length: int) -> mx.array | None:
        if not self.shape.relative_buckets:
            return None
        return self.relative_bias(_buckets(length, self.shape.relative_buckets)).transpose(2, 0, 1)


def _norm(shape: Shape) -> nn.LayerNorm:
    return nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps, bias=shape.norm_bias)


def _buckets(length: int, count: int) -> mx.array:
    """T5's buckets of the distance from query to key [L, L]: half of them for keys that come later, and of each half
    one part exact, the rest on a logarithmic scale up to MAX_DISTANCE."""
    half = count // 2
    exact = half // 2

    def bucket(distance: int) -> int:
        n = abs(distance)
        if n >= exact:
            n = min(half - 1, exact + int(math.log(n / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)))
        return n + (half if distance > 0 else 0)

    table: Any = mx.array([bucket(d) for d in range(1 - length, length)])
    return table[mx.arange(length)[None] - mx.arange(length)[:, None] + length - 1]
