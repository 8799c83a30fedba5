"""Schedulers over a public trace, on a pool of a simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_pools import GpuPool, GpuPools

TRACE = Path(__file__).parents[2] / "bench/traces/mooncake_conversation_trace.jsonl.gz"

REQUESTS = int(os.environ.get("GPU_REPLAY_REQUESTS", "60"))


def _replay(pool: GpuPool, device: str, schedulers: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "mambapool.service", "replay", str(TRACE), "--dir", str(pool.daemon.dir)]
    options = ["--device", device, "--schedulers", str(schedulers), "--limit", str(REQUESTS), "--json"]
    ended = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        env={**os.environ, **pool.machine.environment()},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    summary: dict[str, Any] = json.loads(ended.stdout)
    return summary


@pytest.mark.parametrize(("device", "slots", "schedulers"), [("cuda", 300, 4), ("cpu", 12, 2)])
def test_every_state_is_its_requests_own(gpu_pools: GpuPools, device: str, slots: int, schedulers: int) -> None:
    """Also on a pool that is always full, where what another scheduler freed is used at once."""
    summary = _replay(gpu_pools.start(slots=slots), device, schedulers)
    assert (summary["finished"], summary["mismatches"]) == (REQUESTS, 0)
