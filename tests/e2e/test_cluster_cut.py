"""A cable that is pulled: another machine as a network namespace, its agent and the collectives on networks apart."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from mlxinfer.distributed import cluster_file
from tests import tiny
from tests.e2e.test_cluster_serve import free_port, process, ready, text_of
from tests.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPACE = f"mlxinfer-{os.getpid()}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, list[str]]]:
    """(the device that is the cable, what runs a command on the other machine).

    This machine has 10.77.1.1 and 10.77.2.1, the other 10.77.1.2 and 10.77.2.2.
    """
    there = ["ip", "netns", "exec", SPACE]
    try:
        ip("netns", "add", SPACE)
        for number in (1, 2):
            own, other = f"mlxa{number}", f"mlxb{number}"
            ip("link", "add", own, "type", "veth", "peer", "name", other)
            ip("link", "set", other, "netns", SPACE)
            ip("addr", "add", f"10.77.{number}.1/24", "dev", own)
            ip("link", "set", own, "up")
            subprocess.run([*there, "ip", "addr", "add", f"10.77.{number}.2/24", "dev", other], check=True)
            subprocess.run([*there, "ip", "link", "set", other, "up"], check=True)
        subprocess.run([*there, "ip", "link", "set", "lo", "up"], check=True)
        yield "mlxa2", there
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], check=False, capture_output=True)
        for number in (1, 2):
            subprocess.run(["ip", "link", "del", f"mlxa{number}"], check=False, capture_output=True)


def allowed() -> bool:
    if sys.platform != "linux" or os.getuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"{SPACE}-try"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made


@pytest.mark.skipif(not allowed(), reason="needs root and network namespaces")
def test_a_cable_that_is_pulled_in_mid_stream_costs_no_character(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "m")
    alone = tmp_path / "alone"
    alone.mkdir()
    with served([f"m={source}"], alone) as url:
        wanted = text_of(url)
    file, port = tmp_path / "cluster.toml", free_port()
    url = f"http://127.0.0.1:{port}"
    nodes = ["--node", f"one=10.77.1.1:4:50:{free_port()}", "--node", f"two=10.77.1.2:4:50:{free_port()}"]
    init = [sys.executable, "-m", "mlxinfer", "cluster", "init", *nodes, "-o", str(file)]
    subprocess.run(init, check=True, capture_output=True)
    made = cluster_file.read(file)
    cable = dataclasses.replace(made.links[0], addresses=("10.77.2.1", "10.77.2.2"))
    cluster_file.write(file, dataclasses.replace(made, links=(cable,)))
    arguments = ["--cluster", str(file), "--port", str(port), "--kind", "tensor", "--access-log", "off"]
    with two_networks() as (device, there):
        agent = [*there, sys.executable, "-m", "mlxinfer", "cluster", "agent", "--cluster", str(file), "--node", "two"]
        environment = os.environ | {"MLXINFER_CACHE_DIR": str(tmp_path / "there")}
        with (tmp_path / "agent.log").open("wb") as log:
            running = subprocess.Popen(agent, env=environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while "listens" not in (tmp_path / "agent.log").read_text() and time.monotonic() < until:
                time.sleep(0.05)
            with process(tmp_path, "cluster", "serve", str(source), *arguments) as server:
                ready(url, server, tmp_path)
                assert text_of(url) == wanted
                cut: list[float] = []

                def pull() -> None:
                    ip("link", "set", device, "down")
                    cut.append(time.monotonic())

                assert text_of(url, pull) == wanted
                log_text = (tmp_path / "serve.log").read_text()
                assert "carries nothing" in log_text, log_text[-2000:]
                assert "Plan: one over one" in log_text, log_text[-2000:]
                # With what starting anew takes on a busy machine.
                assert time.monotonic() - cut[0] < 30
        finally:
            running.terminate()
            running.wait(10)
        until = time.monotonic() + 20
        while left := ranks_of("10.77.1.1"):
            assert time.monotonic() < until, f"ranks outlive their agent: {left}"
            time.sleep(0.2)


def ranks_of(address: str) -> list[list[str]]:
    """Command lines of ranks that were told to connect there."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        line = one.info["cmdline"] or []
        if "mlxinfer.distributed.rank" in line and any(part.startswith(f"{address}:") for part in line):
            found.append(line)
    return found
