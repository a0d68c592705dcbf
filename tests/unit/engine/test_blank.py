"""Models that are all shapes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxinfer.engine.blank import num_layers, shallow, weights_bytes
from mlxinfer.errors import UnsupportedModelError

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def test_weights_are_counted_and_not_computed() -> None:
    before = mx.get_active_memory()
    assert weights_bytes(LLAMA_70B | {"dtype": "float32"}, keep_packed=False) == 4 * 70_553_706_496
    packed = LLAMA_70B | {"quantization": {"group_size": 64, "bits": 4}}
    assert weights_bytes(packed, keep_packed=True) < 4 * 70_553_706_496 / 6
    assert mx.get_active_memory() - before < 1 << 20


def test_a_config_without_a_number_of_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="number of layers"):
        num_layers({"model_type": "llama"})


def test_a_shallow_config_keeps_one_entry_for_each_layer() -> None:
    config = {"text_config": {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "other": [1, 2]}}
    assert shallow(config, 2) == {"text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"], "other": [1, 2]}}
