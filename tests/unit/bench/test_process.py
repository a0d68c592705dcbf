"""Child processes: found, watched, waited for and stopped by pid."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from mlxinfer.bench.process import (
    OwnServer,
    PeakMemory,
    command_line,
    find_pid,
    resident_bytes,
    wait_ready,
    without_secrets,
)
from mlxinfer.errors import EngineError, ModelNotFoundError
from tests.unit.bench.fake import serving


def fine() -> None:
    """Nothing is wrong with the server."""


def test_ready_is_asked_first_and_health_where_there_is_no_ready() -> None:
    with serving() as server:
        server.pages["/health"] = (200, {})
        wait_ready(server.url, fine, 5.0)
        server.pages["/ready"] = (503, {})
        with pytest.raises(EngineError, match=r"not ready after 0\.2 s"):
            wait_ready(server.url, fine, 0.2)
        server.pages["/ready"] = (200, {})
        server.pages["/health"] = (503, {})
        wait_ready(server.url, fine, 5.0)


def test_waiting_ends_when_the_server_has_ended() -> None:
    def gone() -> None:
        raise EngineError("it ended")

    with pytest.raises(EngineError, match="it ended"):
        wait_ready("http://127.0.0.1:9", gone, 5.0)


def test_a_server_that_cannot_start_ends_with_its_own_words_and_leaves_no_process(tmp_path: object) -> None:
    server = OwnServer(f"{tmp_path}/no-such-model", start_s=60.0)
    with pytest.raises(ModelNotFoundError, match="no-such-model"), server:
        pass
    assert server.pid is None
    assert not [p for p in psutil.Process().children() if "no-such-model" in " ".join(p.cmdline())]


def test_the_process_that_listens_at_a_url_is_found_on_this_machine_only() -> None:
    with serving() as server:
        assert find_pid(server.url) == os.getpid()
    assert find_pid("http://192.0.2.1:80") is None


def test_secrets_are_left_out_of_a_command_line() -> None:
    words = ["serve", "m", "--api-key", "s1", "--hf-token=s2", "--port", "1", "key", "--password", "--x"]
    assert without_secrets(words) == [
        "serve",
        "m",
        "--api-key",
        "…",
        "--hf-token=…",
        "--port",
        "1",
        "key",
        "--password",
        "…",
    ]
    assert command_line(None) is None
    assert sys.executable.rsplit("/", 1)[-1] in (command_line(os.getpid()) or "")


def test_peak_memory_counts_the_children_too() -> None:
    code = "x = bytearray(64 << 20); print(1, flush=True); input()"
    alone = resident_bytes(os.getpid())
    assert alone is not None
    with (
        PeakMemory(os.getpid(), every_s=0.01) as memory,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        with_child = resident_bytes(os.getpid())
        child.communicate(b"\n", timeout=30)
    assert with_child is not None
    assert with_child - alone > 60 << 20
    assert memory.peak is not None
    assert memory.peak >= alone


@pytest.mark.parametrize("pid", [None, 2**22 + 1])
def test_memory_of_a_process_that_cannot_be_seen_is_not_known(pid: int | None) -> None:
    with PeakMemory(pid) as memory:
        pass
    assert memory.peak is None
