"""`mlxinfer serve` as a process of its own, for tests that speak to it from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx

from mlxinfer.config import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

READY_S = 120


@contextlib.contextmanager
def served(models: Sequence[str], home: Path, *options: str) -> Iterator[str]:
    """The URL of a server on `models`, with a cache of its own in `home`; stopped at the end.

    Asserts that it lived until then and that nothing unforeseen is in its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kernels = os.environ.get("MLXINFER_KERNELS_DIR") or str(load_settings().cache_dir / "kernels")
    environment = os.environ | {"MLXINFER_CACHE_DIR": str(home / "cache"), "MLXINFER_KERNELS_DIR": kernels}
    command = [sys.executable, "-m", "mlxinfer", "serve", *models, "--port", str(port), *options]
    file = home / "server.log"
    with file.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + READY_S
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"the server is not ready: {file.read_text()[-2000:]}")
        yield url
        alive = process.poll() is None
    finally:
        process.terminate()
        code = process.wait(60)
    text = file.read_text(errors="replace")
    assert alive, f"the server is gone: {code}\n{text[-3000:]}"
    assert "Traceback" not in text, text[-3000:]
