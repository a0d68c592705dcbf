"""The kernels' own tests find nothing under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "sanitize" / "run"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux with g++")
def test_the_kernel_tests_pass_with_sanitizers() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
