"""`python -m tests.bench.rows DIR`: the rows of docs/benchmarks.md against mlx_lm.server, on the same float32 weights.

What is made and measured goes to DIR. It takes half an hour on two cores; nothing else may compute meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "smollm2-135m"
NEVER = (4, "<reponame>")
AGAINST = {"single": 9, "mixed": 2, "shared": 2, "arrival": 3, "overtake": 3}
ALONE = {"restart": 5, "agent": 1}


def weights(folder: Path) -> tuple[Path, Path]:
    """The model in float32, and a copy whose end token never comes: mlx_lm.server can't be told to ignore it."""
    model, endless = folder / "float32", folder / "float32-endless"
    if not model.exists():
        packed = folder / "packed"
        run("convert", MODEL, str(packed))
        run("export", str(packed), str(model), "--to", "hf", "--dtype", "float32")
    if not endless.exists():
        shutil.copytree(model, endless)
        for name in ("config.json", "generation_config.json"):
            path = endless / name
            fields = json.loads(path.read_text())
            path.write_text(json.dumps({**fields, "eos_token_id": NEVER[0]}))
        path = endless / "tokenizer_config.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "eos_token": NEVER[1]}))
    return model, endless


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "mlxinfer", *arguments], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def mlx_lm_server(model: Path) -> Iterator[str]:
    """Its address, while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("mlx_lm.server did not start")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def bench(out: Path, workload: str, model: Path, rounds: int, *options: str) -> dict[str, Any]:
    """The report of one workload; its table is printed."""
    path = out / f"{workload}{'-against' if options else ''}.json"
    command = ["bench", str(model), "-w", workload, "--rounds", str(rounds), "--dtype", "float32", "--json", str(path)]
    subprocess.run([sys.executable, "-m", "mlxinfer", *command, *options], check=True)
    return json.loads(path.read_text())


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Our named figures, and of each ratio the median, the lowest and the highest."""
    [result] = report["results"]
    ours = next(iter(result["targets"].values()))
    ratios = {
        server: {
            name: [one[key] and round(one[key], 3) for key in ("median", "low", "high", "bound95")]
            for name, one in found.items()
        }
        for server, found in result["ratios"].items()
    }
    return {"figures": {name: round(value, 3) for name, value in ours["figures"].items()}, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[*AGAINST, "arrival-alone", *ALONE])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "linux" and "openblas" not in os.environ.get("LD_PRELOAD", ""):
        print("note: mlx_lm.server runs on mlx's own BLAS here; LD_PRELOAD names no OpenBLAS", file=sys.stderr)
    model, endless = weights(options.folder)
    found: dict[str, Any] = {}
    with mlx_lm_server(endless) as address:
        for name in [one for one in AGAINST if one in options.only]:
            other = ("--ignore-eos", "--against", f"mlx-lm={address}#default_model")
            found[name] = summary(bench(options.folder, name, model, AGAINST[name], *other))
    if "arrival-alone" in options.only:
        found["arrival-alone"] = summary(bench(options.folder, "arrival", model, 7))
    for name in [one for one in ALONE if one in options.only]:
        found[name] = summary(bench(options.folder, name, model, ALONE[name]))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
