"""Several models on one machine: loaded on demand, unloaded when idle or when another needs the memory.

pool = ModelPool({"a": "smollm2-135m", "b": "./my-model"}, Machine(settings))
with pool.lease("a") as llm:
    llm.chat("…")

Only registered names are loaded: a request can't make the pool open a path or ask the network.
"""

from __future__ import annotations

from mlxinfer.pool.entries import Lease, ModelStatus
from mlxinfer.pool.loads import Loads, Machine
from mlxinfer.pool.models import ModelPool

__all__ = ["Lease", "Loads", "Machine", "ModelPool", "ModelStatus"]
