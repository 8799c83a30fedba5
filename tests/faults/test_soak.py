"""The soak itself, for a few seconds; and that it finds a slot that two hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOAK = Path(__file__).with_name("soak.py")

RecordProperty = Callable[[str, object], None]


def run_soak(seconds: float, seed: int, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the summary, and all that was printed."""
    command = [sys.executable, str(SOAK), "--seconds", str(seconds), "--seed", str(seed)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, **environment}, check=False
    )
    printed = ended.stdout + ended.stderr
    assert ended.stdout, printed
    return ended.returncode, json.loads(ended.stdout.splitlines()[-1]), printed


def test_nothing_is_lost_or_doubled_while_processes_are_killed(record_property: RecordProperty) -> None:
    status, summary, printed = run_soak(7, seed=7)
    record_property("soak", summary)
    assert status == 0, printed
    assert list(summary) == ["seconds", "kills", "lost", "doubled", "recovery_p50_ms", "recovery_p99_ms"]
    assert (summary["lost"], summary["doubled"]) == (0, 0)
    assert summary["kills"] >= 8
    assert 0 < summary["recovery_p50_ms"] <= summary["recovery_p99_ms"]


def test_a_slot_that_is_granted_twice_is_found() -> None:
    status, summary, printed = run_soak(3, seed=1, MAMBAPOOL_FAULT="double-grant:100")
    assert status == 1, printed
    assert summary["doubled"] > 0, printed
