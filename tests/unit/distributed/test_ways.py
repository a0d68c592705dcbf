"""What can't be split is refused, with the numbers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxinfer import upstream
from mlxinfer.distributed.groups import PretendGroup
from mlxinfer.distributed.shards import Part, split
from mlxinfer.errors import InvalidRequestError
from tests import tiny


def split_into(size: int, kind: Any = "tensor", layers: tuple[int, ...] = (), **config: object) -> set[str]:
    model = upstream.empty_model(tiny.config(**config))
    mx.eval(mx.random.state)
    return split(model, Part(kind, 0, size, layers), PretendGroup(0, size))


def test_heads_that_leave_a_rest_are_refused_where_mlx_lm_would_divide_and_forget_it() -> None:
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192}
    with pytest.raises(InvalidRequestError, match=r"llama can't be split 2 ways: 3 n_kv_heads of .* can't be shared"):
        split_into(2, **heads)
    assert split_into(3, **heads)


def test_an_architecture_without_a_split_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="mlx-lm's code for gemma3_text has no split by heads"):
        split_into(2, model_type="gemma3_text")
    with pytest.raises(InvalidRequestError, match="mlx-lm's code for llama has no split by layers"):
        split_into(2, "pipeline", (2, 1))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must be positive and sum to 3 layers"):
        split_into(2, "pipeline", (3, 0), model_type="qwen2")
