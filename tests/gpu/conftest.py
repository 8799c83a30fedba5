"""Skips everything here, with the reason, where there is no GPU that torch and cuda-bindings can use."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, start_daemon
from processes import children, zygote  # noqa: F401  (fixtures)

#: 2 MiB per slot: large enough that a copy shows bandwidth, small enough for any GPU.
STATES = ("conv=bfloat16:4x512x4", "temporal=float32:4x8x128x128")


def _why_not() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "needs a GPU and a build of torch for it"
    if importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: pip install 'mambapool[cuda]'"
    return None


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if reason := _why_not():
        pytest.skip(reason)


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


@pytest.fixture
def gpu_daemons() -> Iterator[GpuDaemons]:
    daemons = GpuDaemons()
    yield daemons
    daemons.close()
