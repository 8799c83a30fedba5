"""Daemons whose pool is on a simulated GPU, and what scripts on that machine begin with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemons import SMALL_STATE, Daemon, start_daemon, wait_until
from processes import Child
from simulated_gpu import SimulatedMachine
from zygote import Zygote

#: Of scripts: ``lib`` is the simulated driver, ``argv[1]`` the daemon's directory.
PRELUDE = """
import ctypes, os, sys, time, torch
from mambapool.client import connect, errors
from mambapool.pool import cuda, cuda_tensors
directory = sys.argv[1]
lib = ctypes.CDLL("libcuda.so.1")
lib.simAllocated.restype = lib.simCalls.restype = lib.simSynchronisingCalls.restype = ctypes.c_long
def say(*what):
    print(*what, flush=True)
def hear():
    return sys.stdin.readline().strip()
def until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.002)
class Gpu:
    def __init__(self, ordinal=0):
        self.context = cuda.primary_context(cuda.visible_devices()[ordinal])
        cuda.call("cuCtxSetCurrent", self.context.handle)
    def stream(self):
        return cuda.call("cuStreamCreate", 1)
    def delay(self, stream, seconds):
        assert lib.simDelay(ctypes.c_void_p(int(stream)), int(seconds * 1e6)) == 0
    def fill(self, stream, rows, value):
        "Queue a write of a byte value to one slot's rows of a tensor, layer by layer."
        for layer in rows:
            assert layer.is_contiguous()
            cuda.call("cuMemsetD8Async", layer.data_ptr(), value, layer.nbytes, stream)
    def synchronize(self):
        cuda.call("cuCtxSynchronize")
def device_ids(*ids, ordinal=0):
    "An int64 tensor on the device that is no slot tensor, as an engine's clone of one."
    from mambapool.pool.cuda_memory import allocate
    content = b"".join(i.to_bytes(8, "little", signed=True) for i in ids)
    memory = allocate(cuda.primary_context(cuda.visible_devices()[ordinal]), content)
    return cuda_tensors.wrap(memory.address, memory.size_bytes, ordinal, memory).view(torch.int64)
def take_one(worker):
    "The first slot that comes free, with bytes of 9 in its states; says how long it took."
    started = time.monotonic()
    slot = None
    while slot is None:
        slot = worker.allocator.alloc(1)
        time.sleep(0.005)
    mark(worker, slot)
    say(time.monotonic() - started)
    return slot
def mark(worker, slots):
    worker.states["temporal"][:, slots] = torch.full((4,), 9, dtype=torch.uint8).view(torch.float32)
def bytes_of(rows):
    return set(rows.contiguous().view(torch.uint8).flatten().tolist())
"""


@dataclass
class GpuPool:
    """A daemon on a simulated machine, with a pool whose states are small."""

    machine: SimulatedMachine
    daemon: Daemon

    def start(self, source: str, *arguments: object, **settings: str) -> Child:
        return self.machine.start(PRELUDE + source, self.daemon.dir, *arguments, **settings)

    def run(self, source: str, *arguments: object, **settings: str) -> list[str]:
        return self.machine.run(PRELUDE + source, self.daemon.dir, *arguments, **settings)


class GpuPools:
    """Starts daemons; those that still run at the end are checked and ended."""

    def __init__(self, machine: SimulatedMachine, parent: Path) -> None:
        self._machine = machine
        self._parent = parent
        self._started: list[Daemon] = []

    def start(
        self, slots: int = 8, *, name: str = "run", options: tuple[str, ...] = (), **settings: Any
    ) -> GpuPool:
        daemon = start_daemon(
            self._parent / name,
            slots=slots,
            states=SMALL_STATE,
            options=("--device", "cuda", *options),
            environment=self._machine.environment(**settings),
        )
        self._started.append(daemon)
        return GpuPool(self._machine, daemon)

    def close(self) -> None:
        try:
            for daemon in self._started:
                if daemon.process.poll() is None:
                    daemon.check()
        finally:
            for daemon in self._started:
                daemon.close()


@pytest.fixture
def gpu_pools(machine: SimulatedMachine) -> Iterator[GpuPools]:
    """Daemons on the test's machine."""
    parent = Path(tempfile.mkdtemp(prefix="mambapool-"))
    pools = GpuPools(machine, parent)
    yield pools
    pools.close()
    shutil.rmtree(parent)


@pytest.fixture(scope="session")
def _shared_daemon(gpu_zygote: Zygote) -> Iterator[GpuPool]:
    """A daemon for all tests that end no part of it: starting one takes seconds."""
    directory = Path(tempfile.mkdtemp(prefix="mambapool-"))
    (directory / "gpu").mkdir()
    pools = GpuPools(SimulatedMachine(directory / "gpu", gpu_zygote), directory)
    yield pools.start(options=("--tp-size", "2", "--quarantine", "300ms"))
    pools.close()
    shutil.rmtree(directory)


@pytest.fixture
def gpu_pool(_shared_daemon: GpuPool) -> Iterator[GpuPool]:
    """A pool of 8 slots, with a shard on each of two GPUs; the dead hold theirs for 300 ms.

    All are free, and nobody is attached; so it is again at the end, when all is checked.
    """
    shared = _shared_daemon.machine
    pool = GpuPool(SimulatedMachine(shared.dir, shared.zygote), _shared_daemon.daemon)
    yield pool
    pool.machine.children.close()
    wait_until(lambda: not pool.daemon.pool()["holders"], "nobody is left")
    pool.daemon.check()
