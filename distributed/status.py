"""What a running `cluster serve` is doing, for `cluster status`: a file of its process, and what the agents say."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed.there import AgentError, There
from mlxinfer.formats.files import json_bytes, read_json_object, replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.distributed.cluster_file import Cluster, Node
    from mlxinfer.distributed.planning import Plan

FOLDER = "clusters"


class StatusFile:
    """Of this process, from its first plan until `close`."""

    def __init__(self, cache_dir: Path, model: str) -> None:
        self._path = cache_dir / FOLDER / f"{os.getpid()}.json"
        self._model, self._begun = model, 0

    def write(self, plan: Plan, why: str) -> None:
        """`plan` runs from now on; `why` is what ended the one before, "" for the first.

        A full disk is no reason to stop.
        """
        self._begun += 1
        about = {
            "model": self._model,
            "plan": dataclasses.asdict(plan),
            "since": time.time(),
            "begun_again": self._begun - 1,
            "why": why,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._path, json_bytes(about), mode=0o600)
        except OSError:
            return

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def of_process(cache_dir: Path, pid: int) -> dict[str, Any] | None:
    """What the `cluster serve` of a process says; None where it is none."""
    return read_json_object(cache_dir / FOLDER / f"{pid}.json")


def of_nodes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Of each node but the first: what its agent says, or {"error": why it can't be asked}. Disturbs no coordinator."""
    return {node.name: _of_node(node, cluster.secret) for node in cluster.nodes[1:]}


def _of_node(node: Node, secret: str) -> dict[str, Any]:
    try:
        there = There(node, secret)
    except AgentError as error:
        return {"error": str(error)}
    try:
        start = time.perf_counter()
        ranks = there.ask("ranks", timeout=5.0)
        answered = time.perf_counter() - start
        return {"answered_s": round(answered, 4), "ranks": ranks}
    except AgentError as error:
        return {"error": str(error)}
    finally:
        there.close()
