"""Seeded weights whose output depends on the context.

Plain random weights make a test that cannot fail: attention is nearly uniform, the residual stream is the last token's
embedding, and the same token comes out whatever the context was. So projections are scaled up, embeddings down, routers
spread, norms and biases are not trivial, and decays of recurrent states lie where a state lasts some ten tokens.
`tests/conformance/test_conformance.py` checks that the result varies and that it notices one changed token.
"""

from __future__ import annotations

import importlib
import re

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

# First match wins; each pattern is searched in the parameter's path.
_ROUTER = re.compile(
    r"(^|\.)(gate|router|router\.gate|router\.layer|gate\.wg|router\.proj|router\.classifier)\.weight$"
)
_EMBEDDING = re.compile(r"(embed|wte|wpe|word_emb|tok_emb)[^.]*(\.\d+)?\.weight$")
_QUERY_KEY = re.compile(
    r"(^|\.)(q|k|qk|qkv|query|key|query_key_value|c_attn|Wqkv|q_b|kv_b|att)_?(proj|attn)?[^.]*\.weight$"
)

# Through a sigmoid or softplus these say how much of the state is lost per token.
_DECAY = ("dt_bias", "dt_proj.bias", "w_lora.lora.2.bias", "a_lora.lora.2.bias", "recurrent_param")


def build(
    module: str, config: dict[str, object], *, seed: int = 0, gain: float = 1.0, embedding: float = 0.5
) -> nn.Module:
    """A tiny model of mlx-lm's `module` with weights from `seed`, in float32 and ready to run."""
    arch = importlib.import_module(f"mlx_lm.models.{module}")
    # mlx draws the first biases of its linear layers from the global generator.
    mx.random.seed(seed)
    # sanitize and load_weights are mlx-lm's; here only the forward pass is at stake.
    model = arch.Model(arch.ModelArgs.from_dict({**config, "model_type": module}))
    model.eval()
    key = mx.random.key(seed)
    drawn: list[tuple[str, mx.array]] = []
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # pyright: ignore
    for path, old in parameters:
        key, own = mx.random.split(key)
        drawn.append((path, _draw(path, old, own, gain, embedding)))
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())
    return model


def _draw(path: str, old: mx.array, key: mx.array, gain: float, embedding: float) -> mx.array:
    shape, name = old.shape, path.rsplit(".", 1)[-1]
    if old.dtype == mx.uint32:  # packed 2-bit codes
        return mx.random.randint(0, 2**31 - 1, shape, mx.int32, key=key).astype(mx.uint32)
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    normal = mx.random.normal(shape, key=key)
    if name == "signs":
        return mx.sign(normal)
    if name == "scales":
        return (0.1 * mx.abs(normal)).astype(old.dtype)
    if name == "A_log":
        return mx.log(mx.random.uniform(0.5, 4.0, shape, key=key))
    if path.endswith(_DECAY):
        return mx.random.uniform(-4.0, -2.0, shape, key=key)
    if old.ndim < 2 or "norm" in path.lower():
        # Around what the model starts with: ones for norms, zeros for biases.
        return (old.astype(mx.float32) + 0.2 * normal).astype(mx.float32)
    if _EMBEDDING.search(path):
        return embedding * normal
    fan_in = 1
    for size in shape[1:] if "conv" in path else shape[-1:]:
        fan_in *= size
    scale = gain / fan_in**0.5
    if _ROUTER.search(path) or _QUERY_KEY.search(path):
        scale *= 2.0
    if path.endswith(("w_lora.lora.2.weight", "a_lora.lora.2.weight")):
        scale *= 0.2  # or it drowns the bias that sets the decay
    if name == "r_k":
        scale *= 0.1  # RWKV's bonus for the current token, beside which the state would not show
    return scale * normal
