"""Daemons whose states are on a real GPU."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from daemons import Daemon, start_daemon

#: 2 MiB per slot: large enough that a copy shows bandwidth, small enough for any GPU.
STATES = ("conv=bfloat16:4x512x4", "temporal=float32:4x8x128x128")


class GpuDaemons:
    """Starts daemons whose states are on the GPU."""

    def __init__(self) -> None:
        self._parent = Path(tempfile.mkdtemp(prefix="mambapool-"))
        self._started: list[Daemon] = []

    def start(self, slots: int = 8, **environment: str) -> Daemon:
        directory = self._parent / f"run-{len(self._started)}"
        options = ("--device", "cuda")
        self._started.append(
            start_daemon(directory, slots=slots, states=STATES, options=options, environment=environment)
        )
        return self._started[-1]

    def close(self) -> None:
        for daemon in self._started:
            daemon.close()
        shutil.rmtree(self._parent)
