"""One or more tiny configs for every architecture of the installed mlx-lm.

A case is named like mlx-lm's module, or `module/variant` where one config cannot reach all of a model's mechanisms.
"""

from __future__ import annotations

from typing import Any

from tests.conformance.configs.dense import DENSE
from tests.conformance.configs.hybrid import HYBRID
from tests.conformance.configs.latent import LATENT
from tests.conformance.configs.moe import EXPERTS
from tests.conformance.configs.wrapped import WRAPPED

CONFIGS: dict[str, dict[str, object]] = DENSE | EXPERTS | LATENT | HYBRID | WRAPPED

# Where the plain draw of weights.py gives an output that hardly depends on the context: another seed or scale, found by
# trying. The test that the output depends on the context says whether they are still needed.
WEIGHTS: dict[str, dict[str, Any]] = {
    "hunyuan": {"seed": 1},
    "openelm": {"embedding": 0.1, "seed": 1},
    "rwkv7": {"seed": 2},
    "gemma3n": {"seed": 3},
    "gemma4_text/moe": {"seed": 1},
    "llama/tied": {"seed": 1},
    "apertus": {"seed": 1},
    "cohere": {"embedding": 0.1},
    "gemma": {"embedding": 0.1},
    "gemma2": {"embedding": 0.1},
    "olmo3": {"seed": 1},
    "phi3small": {"gain": 2.0, "embedding": 0.1},
    "qwen3": {"seed": 2},
    "talkie": {"seed": 1},
    "afm7": {"seed": 2},
    "dots1": {"seed": 1},
    "baichuan_m1": {"seed": 1},
    "gear": {"embedding": 0.1},
    "lfm2-vl": {"seed": 2},
    "lfm2_moe": {"seed": 1},
    "mamba2": {"seed": 1},
    "recurrent_gemma": {"seed": 1},
    "qwen3_vl": {"seed": 2},
}

# Modules with a Model class for which no tiny model can be run here, and why.
UNBUILDABLE: dict[str, str] = {
    "olmo": "mlx-lm's module ends the process at import unless ai2-olmo is installed",
}

# mlx-lm's code for these is a Metal kernel and nothing else.
NEEDS_METAL: dict[str, str] = {
    "bitnet": "its packed ternary linear layer is a Metal kernel",
    "muse_spark": "its fused norm and RoPE of queries and keys is a Metal kernel",
}

# mlx-lm itself gives another result for a prompt in chunks than for the whole prompt, so the whole prompt is no
# reference. The value is the chunk that mlx-lm is run with instead.
REFERENCE_CHUNK: dict[str, int] = {
    "phi3small": 7,
    "plamo3": 1,
}

NOT_CHUNK_INVARIANT: dict[str, str] = {
    "phi3small": "mlx-lm aligns the block-sparse mask to the chunk, not to the sequence",
    "plamo3": "mlx-lm's mask lets a query see window + 1 keys, its cache keeps window of them",
}

# Nothing in these depends on the position of a token, so a shifted position cannot show.
NO_POSITIONS: dict[str, str] = {
    "granitemoehybrid/dense": "position_embedding_type is nope",
    "jamba": "its attention has no position embedding",
    "kimi_k3": "its attention has no position embedding",
    "kimi_linear": "its attention has no position embedding",
    "mamba": "recurrent only",
    "mamba/falcon": "recurrent only",
    "mamba2": "recurrent only",
    "nemotron_h": "its attention has no position embedding",
    "nemotron_h/moe": "its attention has no position embedding",
    "rwkv7": "recurrent only",
}
