"""Any program over the machines of a cluster, by `mlx.launch`."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.distributed.cluster_file import Cluster, Node

LAUNCH = "from mlx._distributed_utils.launch import main; main()"
"""mlx.launch, by this Python and not by what the path has."""
LOCAL = "127.0.0.1"
"""What mlx.launch takes for this machine; whatever else it gives to ssh."""


def hostfile(cluster: Cluster, *, wifi: bool) -> dict[str, Any]:
    """mlx.launch's file: every node, and where the one before it in the ring reaches it.

    Raises InvalidRequestError where a machine has no `ssh` or nothing joins two neighbours.
    """
    hosts = []
    for rank, node in enumerate(cluster.nodes):
        before = cluster.nodes[rank - 1]
        address = cluster.end(node.name, before.name, wifi=wifi) if len(cluster.nodes) > 1 else node.host
        if not address:
            raise InvalidRequestError(
                f"nothing joins {node.name} and {before.name}, neighbours in the ring", param="links"
            )
        hosts.append({"ssh": _ssh(node, first=rank == 0), "ips": [address]})
    return {"backend": "ring", "hosts": hosts}


def _ssh(node: Node, *, first: bool) -> str:
    if first or node.host.startswith("127."):
        return LOCAL
    if not node.ssh:
        raise InvalidRequestError(f"{node.name} has no `ssh` in the cluster's file: how is it reached?", param="ssh")
    return node.ssh


def run(cluster: Cluster, command: Sequence[str], *, wifi: bool = False, port: int = 32323, python: str = "") -> int:
    """Run `command` (a script and its arguments, or -m and a module) as one rank on each node; 0 if each ended with 0.

    Output comes as it is made. Raises InvalidRequestError where the cluster's file doesn't do.
    """
    mark = f"mlxinfer-rank-{secrets.token_hex(8)}"
    with tempfile.NamedTemporaryFile("w", prefix="mlxinfer-hosts-", suffix=".json") as file:
        json.dump(hostfile(cluster, wifi=wifi), file)
        file.flush()
        launch = [sys.executable, "-c", LAUNCH, "--hostfile", file.name, "--backend", "ring"]
        launch += ["--starting-port", str(port), "--python", python or sys.executable, "--"]
        wrapped = ["-m", "mlxinfer.distributed.launched", mark, *command]
        # Its own stdin at its end would keep it spinning; this one has no end.
        process = subprocess.Popen([*launch, *wrapped], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        ended = False
        try:
            codes = _ends(process, mark)
            ended = True
        finally:
            if not ended:
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
    bad = [code for code in codes.values() if code]
    if bad:
        return bad[0]
    # Killed, or never begun: there is nothing to say how.
    return 0 if len(codes) == len(cluster.nodes) else 1


def _ends(process: subprocess.Popen[bytes], mark: str) -> dict[int, int]:
    """How each rank that told ended, by its number; the rest of stderr goes on to ours."""
    found: dict[int, int] = {}
    told = re.compile(re.escape(mark).encode() + rb" (\d+) (-?\d+)\r?\n?")
    assert process.stderr is not None
    for line in process.stderr:
        if match := told.search(line):
            found[int(match[1])] = int(match[2])
            line = told.sub(b"", line)
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    return found
