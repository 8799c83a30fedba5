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

SLOTS = int(os.environ.get("GPU_REPLAY_SLOTS", "18"))
REQUESTS = int(os.environ.get("GPU_REPLAY_REQUESTS", "400"))

SCHEDULERS = 4


def _command(pool: GpuPool, requests: int, *more: str) -> list[str]:
    options = [
        "--device",
        "cuda",
        "--limit",
        str(requests),
        "--json",
        *(more or ("--schedulers", str(SCHEDULERS))),
    ]
    return ["replay", str(TRACE), "--dir", str(pool.daemon.dir), *options]


def _check(summary: dict[str, Any], requests: int) -> None:
    assert (summary["finished"], summary["mismatches"]) == (requests, 0)
    assert summary["waits"] > 0  # what one has freed is another one's as soon as its fence has passed


def test_every_state_is_its_requests_own_on_a_pool_that_is_always_full(gpu_pools: GpuPools) -> None:
    """With schedulers that are forked: each would take seconds to import torch."""
    pool = gpu_pools.start(slots=SLOTS)
    replay = pool.machine.command(*_command(pool, 40), "--elsewhere")
    schedulers = [pool.machine.command("scheduler", "--dir", pool.daemon.dir) for _ in range(SCHEDULERS)]
    summary = json.loads(replay.hear())
    assert [process.wait() for process in (replay, *schedulers)] == [0] * (SCHEDULERS + 1)
    _check(summary, 40)


def _started(pool: GpuPool, *command: str) -> dict[str, Any]:
    """With schedulers that the replay starts."""
    ended = subprocess.run(
        [sys.executable, "-m", "mambapool.service", *command],
        capture_output=True,
        text=True,
        env={**os.environ, **pool.machine.environment()},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    summary: dict[str, Any] = json.loads(ended.stdout)
    return summary


@pytest.mark.heavy
def test_a_replay_that_starts_its_schedulers_is_right_for_longer(gpu_pools: GpuPools) -> None:
    pool = gpu_pools.start(slots=SLOTS)
    _check(_started(pool, *_command(pool, REQUESTS)), REQUESTS)


@pytest.mark.heavy
@pytest.mark.parametrize("guarantee", ["0", "9"])
def test_groups_of_two_ranks_on_two_gpus_are_right(gpu_pools: GpuPools, guarantee: str) -> None:
    pool = gpu_pools.start(slots=SLOTS, options=("--tp-size", "2"))
    groups = ("--schedulers", "2", "--tp-size", "2", "--guarantee", guarantee)
    summary = _started(pool, *_command(pool, 100, *groups))
    assert (summary["finished"], summary["mismatches"]) == (100, 0)
