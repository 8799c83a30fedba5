"""``run.sh`` makes its environment and comes as far as the tests, with and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    """Not here: without one, all of its tests are skipped."""


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_script_for_a_machine_with_a_gpu_comes_to_its_end(tmp_path: Path) -> None:
    script = Path(__file__).with_name("run.sh")
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path), "PYTHONPATH": ""}
    ended = subprocess.run(
        ["sh", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    summary = ended.stdout.rstrip().rpartition("\n")[2]
    assert "11 passed" in summary or "11 skipped" in summary, summary
    assert not list(tmp_path.iterdir()), "its environment is left behind"
