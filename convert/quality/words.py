"""Codes to mlx's packed words with mlx's own operations."""

from __future__ import annotations

import mlx.core as mx


def pack(codes: mx.array, bits: int) -> mx.array:
    """uint8 codes [..., n], n a multiple of 32 → uint32 words [..., n * bits / 32].

    Element i takes the i-th run of `bits` bits, low first, as mx.quantize has it.
    """
    if bits == 8:
        return codes.view(mx.uint32)
    # Eight codes lie in the bytes of a 64-bit word. Three times every field closes up to its lower neighbour.
    lanes = codes.view(mx.uint64)
    field = 8
    used = bits
    while field < 64:
        low = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * field))
        lower = mx.array(low, mx.uint64)
        upper = mx.array(low << used, mx.uint64)
        lanes = (lanes & lower) | ((lanes >> mx.array(field - used, mx.uint64)) & upper)
        field, used = 2 * field, 2 * used
    if bits == 4:
        return lanes.view(mx.uint32)[..., ::2]
    bytes_used = lanes.view(mx.uint8).reshape(*lanes.shape, 8)[..., :bits]
    return mx.contiguous(bytes_used).flatten(-2).view(mx.uint32)
