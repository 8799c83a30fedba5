"""Schedulers over a public trace, on a pool of a simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_pools import GpuPool, GpuPools

TRACE = Path(__file__).parents[2] / "bench/traces/mooncake_conversation_trace.jsonl.gz"

SLOTS = int(os.environ.get("GPU_REPLAY_SLOTS", "18"))
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


def test_every_state_is_its_requests_own_on_a_pool_that_is_always_full(gpu_pools: GpuPools) -> None:
    """So that what one scheduler has freed is another one's as soon as its fence has passed."""
    summary = _replay(gpu_pools.start(slots=SLOTS), "cuda", 4)
    assert (summary["finished"], summary["mismatches"]) == (REQUESTS, 0)
