"""Agents that are started over ssh, and end with whoever started them."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed import cluster_file
from mlxinfer.distributed.there import AgentError, There

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.distributed.cluster_file import Cluster, Node

START_S = 30.0
"""Until an agent that was started over ssh answers: a Python with its imports, on a machine that may sleep."""
LOOK_S = 0.2
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""Keys only: nobody is there to type a password. Ports, users and keys come from ~/.ssh/config."""


def reached(node: Node, cluster: Cluster, say: Callable[[str], None]) -> There:
    """The agent of `node`, started over ssh where none answers and the cluster's file says how. Raises AgentError."""
    try:
        return There(node, cluster.secret)
    except AgentError:
        if not node.ssh:
            raise
    say(f"Starting the agent of {node.name} over ssh")
    started = _Started(node, cluster)
    ends = time.monotonic() + START_S
    while True:
        try:
            return There(node, cluster.secret, ended=started.end)
        except AgentError as error:
            why = started.failed()
            if why or time.monotonic() > ends:
                started.end()
                raise AgentError(f"{node.name}: ssh {node.ssh}: {why or error}") from error
        time.sleep(LOOK_S)


def ask(target: str, command: list[str], timeout: float = START_S) -> str:
    """What a command prints on the machine that ssh calls `target`. Raises AgentError with what it complains of."""
    try:
        done = subprocess.run(
            [*SSH, "--", target, shlex.join(command)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise AgentError("there is no ssh on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise AgentError(f"ssh {target}: {command[0]} has not answered for {timeout:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}").splitlines()[-1]
        raise AgentError(f"ssh {target}: {said:.300}")
    return done.stdout


class _Started:
    """`mlxinfer cluster agent --cluster -` at the other end of an ssh: the file is on its stdin; it ends with it."""

    def __init__(self, node: Node, cluster: Cluster) -> None:
        self._said: Any = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        command = shlex.join([node.command or "mlxinfer", "cluster", "agent", "--node", node.name, "--cluster", "-"])
        try:
            self._process = subprocess.Popen(
                [*SSH, "--", node.ssh, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"{node.name}: ssh cannot be run: {error.strerror}") from error
        data = cluster_file.dumps(cluster).encode()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{len(data)}\n".encode() + data)
            self._process.stdin.flush()

    def failed(self) -> str:
        """What ssh or the agent complained of, when it has ended; "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        self._said.seek(0)
        lines = self._said.read(100_000).decode(errors="replace").strip().splitlines()
        return f"{lines[-1]:.300}" if lines else f"it ended with {code}"

    def end(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()
