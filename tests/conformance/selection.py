"""Which cases run: a slice by default, all with CONFORMANCE_CASES=all, a slice of N with CONFORMANCE_CASES=N.

What is beyond the slice is marked slow. All of them take a minute or two on two cores.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.conformance.configs import CONFIGS, NEEDS_METAL

# One for each mechanism: GQA, windows, sinks, experts, shared KV, latent attention, an index, chunks, kinds of state.
REPRESENTATIVE = (
    "llama",
    "llama/sliding",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "qwen3_moe",
    "afm7",
    "deepseek_v3",
    "deepseek_v32",
    "llama4",
    "qwen3_next",
    "nemotron_h",
    "lfm2",
    "rwkv7",
)
MORE = 6  # drawn with SEED from the rest
SEED = 20


def selected() -> list[str]:
    """The names in the slice."""
    asked = os.environ.get("CONFORMANCE_CASES", "").strip() or str(len(REPRESENTATIVE) + MORE)
    if asked == "all":
        return list(CONFIGS)
    if not asked.isdecimal():
        raise pytest.UsageError(f"CONFORMANCE_CASES={asked!r}: expected a number or 'all'")
    rest = [name for name in CONFIGS if name not in REPRESENTATIVE]
    random.Random(SEED).shuffle(rest)
    return [*REPRESENTATIVE, *rest][: int(asked)]


def cases() -> list[object]:
    """Every case as a pytest parameter, with the marks that say whether it runs here."""
    chosen = set(selected())
    return [
        pytest.param(
            name,
            id=name,
            marks=[
                *([] if name in chosen else [pytest.mark.slow]),
                *([pytest.mark.metal] if name in NEEDS_METAL else []),
            ],
        )
        for name in CONFIGS
    ]
