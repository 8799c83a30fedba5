"""Goal 11: the allocator process, from exec to ready, its memory, and what it imports.

Started as ``serve`` starts it, with a pool of 65,536 slots, against an interpreter that imports its three libraries.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measuring.cores import client_core, pinned
from measuring.figures import Effort, Figure, run_script, say

from mambapool.service.config import AllocatorConfig, PoolConfig

SLOTS = 65_536
LIBRARIES = "import zmq, msgpack, numpy"
NEVER_IMPORTED = ("torch", "rich", "typer", "prometheus_client")

READY_LIMIT = 1.4
RSS_LIMIT_MB = 35.0


def measure(effort: Effort) -> list[Figure]:
    pairs = 3 if effort.quick else 15
    # The libraries' bytecode came with their installation: ours is compared when it is kept, too.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with pinned(client_core()), started():  # once before: bytecode is written, files are cached
        pass
    ratios, sizes_mb = [], []
    for _ in range(pairs):
        with pinned(client_core()):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", LIBRARIES], check=True)
            libraries_s = time.perf_counter() - began
            with started() as (seconds, process):
                sizes_mb.append(rss_mb(process.pid))
                ratios.append(seconds / libraries_s)
    say(f"the libraries alone: {libraries_s * 1e3:.0f} ms, in the last of {pairs} pairs")
    return [
        Figure(11, "exec to ready, × import of its libraries", statistics.median(ratios), READY_LIMIT),
        Figure(11, f"resident at {SLOTS} slots, MB", statistics.median(sizes_mb), RSS_LIMIT_MB),
        Figure(11, f"imports of {', '.join(NEVER_IMPORTED)}", len(imported()), 0),
    ]


@contextlib.contextmanager
def started(*interpreter_options: str) -> Iterator[tuple[float, subprocess.Popen[str]]]:
    """Seconds from exec to ready, and the process; ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="mambapool-bench-") as directory:
        config = AllocatorConfig(Path(directory), (PoolConfig("default", SLOTS),), parent_pid=os.getpid())
        reading, writing = os.pipe()
        command = [sys.executable, *interpreter_options, "-m", "mambapool.service.allocator_process"]
        began = time.perf_counter()
        with subprocess.Popen(
            [*command, config.to_json(), str(writing)], pass_fds=[writing], stderr=subprocess.PIPE, text=True
        ) as process:
            os.close(writing)
            try:
                with os.fdopen(reading) as pipe:
                    told = json.loads(pipe.readline())
                assert told.get("ready"), told
                yield time.perf_counter() - began, process
            finally:
                process.terminate()


def rss_mb(pid: int) -> float:
    """What ``VmRSS`` says, in MB of 1000² bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"process {pid} has ended")


def imported() -> set[str]:
    """Of the modules that it shall never import, those that it did."""
    with started("-X", "importtime") as (_, process):
        process.terminate()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "zmq" in names, "not the process that was meant"
    return names & set(NEVER_IMPORTED)


if __name__ == "__main__":
    run_script(measure, __doc__)
