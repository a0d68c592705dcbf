"""`cluster check`, `run` and `status` on real agents and real ranks of this machine; agents over a real sshd."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from mlxinfer.distributed import cluster_file
from tests import tiny
from tests.e2e.test_cluster_serve import cluster, free_port, process, ready

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


def mlxinfer(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    held = os.environ | {"MLXINFER_CACHE_DIR": str(home / "cache")} | environment
    command = [sys.executable, "-m", "mlxinfer", *arguments]
    return subprocess.run(command, env=held, capture_output=True, text=True, check=False, timeout=180)


@contextlib.contextmanager
def agent_of(home: Path, file: Path, name: str = "two") -> Iterator[None]:
    node = cluster_file.read(file).node(name)
    with process(home, "cluster", "agent", "--cluster", str(file), "--node", name):
        until = time.monotonic() + 60
        while "listens on" not in (home / "agent.log").read_text():
            assert time.monotonic() < until, f"{node} does not listen"
            time.sleep(0.05)
        yield


def test_links_are_measured_by_real_ranks_and_written_down(tmp_path: Path) -> None:
    file, _ = cluster(tmp_path)
    before = cluster_file.read(file)
    report = tmp_path / "report.json"
    with agent_of(tmp_path, file):
        done = mlxinfer(tmp_path, "cluster", "check", "--cluster", str(file), "--report", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The cluster is ready." in done.stdout
    after = cluster_file.read(file)
    [link] = after.links
    assert link.measured
    assert 1 < link.latency_us < 50_000
    assert 0.01 < link.bandwidth_gb_s < 1000
    assert (after.secret, after.nodes) == (before.secret, before.nodes)
    assert before.secret not in report.read_text() + done.stdout + done.stderr
    assert json.loads(report.read_text())["machines"].keys() == {"one", "two"}


def test_what_is_wrong_is_told_with_what_mends_it_and_ends_with_1(tmp_path: Path) -> None:
    file, _ = cluster(tmp_path)
    found = cluster_file.read(file)
    one, two = found.nodes
    [link] = found.links
    wrong = dataclasses.replace(link, addresses=("127.0.0.1", "203.0.113.7"))
    cluster_file.write(
        file, dataclasses.replace(found, nodes=(one, dataclasses.replace(two, memory_gb=9e6)), links=(wrong,))
    )
    silent = mlxinfer(tmp_path, "cluster", "check", "--cluster", str(file), "--json")
    assert silent.returncode == 1
    [missing] = [f for f in json.loads(silent.stdout)["findings"] if f["level"] == "wrong"]
    assert missing["where"] == "two"
    assert "mlxinfer cluster agent --node two" in missing["mend"]
    with agent_of(tmp_path, file):
        done = mlxinfer(tmp_path, "cluster", "check", "--cluster", str(file), "--json")
    assert done.returncode == 1
    told = [f["what"] for f in json.loads(done.stdout)["findings"] if f["level"] == "wrong"]
    assert any("9e+06 GB for models" in what for what in told), told
    assert any("two has no address 203.0.113.7" in what for what in told), told
    assert any("203.0.113.7 is no address of this machine" in what for what in told), told
    assert cluster_file.read(file).links == (wrong,)


@pytest.mark.skipif(not SSHD, reason="needs sshd: apt install openssh-server")
def test_agents_are_started_over_ssh_and_end_with_the_command(tmp_path: Path) -> None:
    file, _ = cluster(tmp_path)
    found = cluster_file.read(file)
    program = tmp_path / "mlxinfer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlxinfer "$@"\n')
    program.chmod(0o755)
    with sshd(tmp_path) as path:
        two = dataclasses.replace(found.nodes[1], ssh="somewhere", command=str(program))
        cluster_file.write(file, dataclasses.replace(found, nodes=(found.nodes[0], two)))
        done = mlxinfer(tmp_path, "cluster", "check", "--cluster", str(file), PATH=path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "over ssh" in done.stderr
        with pytest.raises(AssertionError), agent_still_there(two.port):
            pass
        # A machine that ssh reaches is asked what it is.
        made = tmp_path / "made.toml"
        asked = mlxinfer(
            tmp_path, "cluster", "init", "--host", "somewhere", "--command", str(program), "-o", str(made), PATH=path
        )
        # Both are this machine: no network has two addresses of it.
        assert asked.returncode == 2 or made.exists(), asked.stderr
        nothing = mlxinfer(tmp_path, "cluster", "init", "--host", "nowhere", "-o", str(made), PATH=path)
        assert nothing.returncode == 1
        assert "ssh nowhere" in nothing.stderr


@contextlib.contextmanager
def agent_still_there(port: int) -> Iterator[None]:
    import socket

    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            raise AssertionError("nothing listens") from None
        time.sleep(0.2)
    yield


@contextlib.contextmanager
def sshd(home: Path) -> Iterator[str]:
    """A real sshd of this user, known to ssh as `somewhere`; the PATH with which ssh finds it."""
    assert SSHD is not None
    port, bin_ = free_port(), home / "bin"
    bin_.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    (home / "keys").write_text((home / "user.pub").read_text())
    (home / "keys").chmod(0o600)
    (home / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {home}/host\nAuthorizedKeysFile {home}/keys\n"
        f"PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    (home / "ssh_config").write_text(
        f"Host somewhere\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {home}/user\n"
        f"Host *\n  UserKnownHostsFile {home}/known\n  StrictHostKeyChecking accept-new\n"
    )
    ssh = bin_ / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {home}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(home / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        assert server.poll() is None
        yield f"{bin_}:{os.environ['PATH']}"
    finally:
        server.terminate()
        server.wait(10)


SCRIPT = """
import os, sys, time
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array(float(group.rank() + 1)), group=group).item()
print(f"rank {group.rank()} of {group.size()}: {total} {sys.argv[1:]}", flush=True)
if group.rank() == 1:
    # The others are ended with it, and are to have spoken.
    time.sleep(2)
if "fail" in sys.argv and group.rank() == 1:
    sys.exit(7)
if "die" in sys.argv and group.rank() == 1:
    os.kill(os.getpid(), 9)
"""


def test_a_script_runs_on_each_machine_and_its_failures_count(tmp_path: Path) -> None:
    file, _ = cluster(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for arguments, code in ((["--fine", "1"], 0), (["fail"], 7), (["die"], 1)):
        port = str(free_port() % 30000 + 30000)
        done = mlxinfer(tmp_path, "cluster", "run", "--cluster", str(file), "--port", port, str(script), *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
            f"rank {rank} of 2: 3.0 {arguments}" for rank in range(2)
        ]
        assert "mlxinfer-rank-" not in done.stdout + done.stderr


def test_status_tells_nodes_ranks_and_plan_while_it_serves(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "m")
    file, _ = cluster(tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    before = json.loads(mlxinfer(tmp_path, "cluster", "status", "--cluster", str(file), "--json").stdout)
    assert "error" in before["nodes"]["two"]
    assert before["serving"] == []
    with agent_of(tmp_path, file):
        arguments = ["--cluster", str(file), "--port", str(port), "--kind", "tensor", "--access-log", "off"]
        with process(tmp_path, "cluster", "serve", str(source), *arguments) as server:
            ready(url, server, tmp_path)
            assert httpx.get(f"{url}/ready").status_code == 200
            done = mlxinfer(tmp_path, "cluster", "status", "--cluster", str(file), "--json")
            told = json.loads(done.stdout)
            [rank] = told["nodes"]["two"]["ranks"]
            assert (rank["rank"], rank["ended"]) == (1, "")
            assert rank["bytes"] > 1 << 20
            [serving] = told["serving"]
            assert (serving["plan"]["kind"], serving["plan"]["nodes"]) == ("tensor", ["one", "two"])
            assert (serving["begun_again"], serving["url"], serving["status"]) == (0, url, "ok")
            words = mlxinfer(tmp_path, "cluster", "status", "--cluster", str(file)).stdout
            assert "tensor over one, two" in words
            assert "rank 1 (" in words
    after = json.loads(mlxinfer(tmp_path, "cluster", "status", "--cluster", str(file), "--json").stdout)
    assert after["serving"] == []
