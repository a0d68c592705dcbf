"""Shapes of the tiny Llamas that goldens were made of: for the scripts that make them with torch, and for the tests."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TRAINED: dict[str, Any] = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 48,
    "attention_bias": True,
}
"""Of lora_torch.npz."""
EXCHANGED: dict[str, Any] = _COMMON | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "vocab_size": 40,
}
"""Of peft.npz."""
