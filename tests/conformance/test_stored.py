"""Weights as stored under the CPU kernels, for every mlx-lm architecture, against mlx's own functions in float32.

The same half-precision weights twice: kept in half precision and run through the kernels, and cast to float32 and run
by mlx alone. In the reference of the other tests here the kernels are in place on both sides.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlxinfer.engine.dtypes import apply_dtype_policy, as_stored
from mlxinfer.kernels import calls
from mlxinfer.upstream import make_cache
from tests.conformance.configs import NEEDS_METAL
from tests.conformance.examine import TOLERANCE, module_of, prompts, tiny_model
from tests.conformance.reference import difference
from tests.conformance.selection import cases


def logits(model, prompt: list[int]) -> np.ndarray:
    """Of a prompt and one more token, [L + 1, vocab]."""
    cache = make_cache(model)
    parts = [model(mx.array([part]), cache=cache)[0] for part in (prompt, [5])]
    assert all(part.dtype == mx.float32 for part in parts)
    return np.array(mx.concatenate(parts))


def halved(case: str):
    model = tiny_model(case)
    floats = (mx.float32, mx.bfloat16, mx.float16)
    model.update(tree_map(lambda w: w.astype(mx.bfloat16) if w.dtype in floats else w, model.parameters()))
    return model


@pytest.mark.parametrize("case", cases())
def test_half_precision_weights_under_the_kernels_give_the_logits_of_float32(case: str) -> None:
    if not as_stored():
        pytest.skip("the kernels are not in use here")
    if module_of(case) in NEEDS_METAL:
        pytest.skip(NEEDS_METAL[module_of(case)])
    prompt = prompts()[-1]
    kept = halved(case)
    assert apply_dtype_policy(kept, "auto") == "float32"
    ours = logits(kept, prompt)
    before = calls.in_use()
    calls.uninstall()
    try:
        plain = halved(case)
        apply_dtype_policy(plain, "auto")
        theirs = logits(plain, prompt)
    finally:
        calls.put(before)
    assert difference(ours, theirs) < TOLERANCE
