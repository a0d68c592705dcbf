"""A coding agent from npm, unmodified, led through a tool loop: the call, its result, the answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from mlxinfer.config import load_settings
from tests import scripted
from tests.serving import served

if TYPE_CHECKING:
    from pathlib import Path

AGENT = "@qwen-code/qwen-code@0.24.4"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def agent() -> Path:
    """The agent's program, installed once into the cache."""
    npm = shutil.which("npm")
    assert npm is not None, "this needs node and npm"
    folder = load_settings().cache_dir / "test-agent"
    program = folder / "node_modules" / ".bin" / "qwen"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), AGENT], check=True)
    return program


def test_a_coding_agent_calls_a_tool_and_reads_its_result(agent: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_text("hello")
    model = scripted.write_folder(
        tmp_path / "scripted",
        after_user=scripted.call("list_directory", {"path": str(project)}),
        after_tool="There is one file, notes.txt.",
        context=1 << 18,
    )
    log = tmp_path / "access.log"
    with served([f"scripted={model}"], tmp_path, "--access-log", str(log)) as url:
        environment = os.environ | {
            "HOME": str(tmp_path), "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "scripted",
        }  # fmt: skip
        command = [str(agent), "--auth-type", "openai", "--yolo", "-p", "What files are here?"]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=240)
    assert "There is one file, notes.txt." in done.stdout, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    first, second = [line for line in lines if line["path"] == "/v1/chat/completions"][:2]
    assert first["status"] == second["status"] == 200
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["cached_tokens"] >= first["prompt_tokens"] - 1
