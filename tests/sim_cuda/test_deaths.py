"""Processes that die while a GPU still works for them."""

from __future__ import annotations

import os
import time

from daemons import wait_until
from gpu_pools import GpuPools

#: Its lease's lock goes before the process does, as in the middle of a process's end; it writes on.
DYING = """
import threading
worker = connect(directory, device="cuda")
rows = worker.states["temporal"][:, int(worker.allocator.alloc(1))]
def write():
    while True:
        rows.view(torch.uint8)[:] = 7
        time.sleep(0.001)
threading.Thread(target=write, daemon=True).start()
worker._transport.connection.lease.close()
say("released")
hear()
"""

TAKER = """
with connect(directory, device="cuda") as worker:
    slot = worker.allocator.alloc(1, timeout=20.0)
    worker.states["temporal"][:, slot] = torch.full((4,), 9, dtype=torch.uint8).view(torch.float32)
    say("has it")
    time.sleep(0.3)
    say(bytes_of(worker.states["temporal"][:, slot]))
"""


def test_slots_stay_back_until_the_process_has_ended_and_a_second_has_passed(gpu_pools: GpuPools) -> None:
    pool = gpu_pools.start(slots=1, options=("--quarantine", "500ms"))
    dying = pool.start(DYING)
    assert dying.hear() == "released"
    wait_until(lambda: pool.daemon.pool()["quarantined"] == 1, "its slot is quarantined")
    assert pool.daemon.pool()["holders"][0]["state"] == "gone"
    taker = pool.start(TAKER)
    time.sleep(1.0)  # longer than the quarantine: the process lives
    assert not taker.has_said_something()
    os.kill(dying.pid, 9)
    assert [taker.hear(), taker.hear()] == ["has it", "{9}"]
    assert "quarantined" in pool.daemon.log


def test_a_restarted_allocator_keeps_the_quarantine_of_the_dead(gpu_pools: GpuPools) -> None:
    pool = gpu_pools.start(slots=4, options=("--quarantine", "60s"))
    dying = pool.start('worker = connect(directory)\nworker.allocator.alloc(3)\nsay("holds")\nhear()')
    dying.hear()
    os.kill(dying.pid, 9)
    wait_until(lambda: pool.daemon.pool()["quarantined"] == 3, "its slots are quarantined")
    before = pool.daemon.allocator_pid
    os.kill(before, 9)
    wait_until(
        lambda: pool.daemon.directory.read_ready() and pool.daemon.allocator_pid != before, "it is back", 20.0
    )
    assert [pool.daemon.pool()[key] for key in ("free", "held", "quarantined")] == [1, 0, 3]


def test_killed_clients_cost_nothing_and_all_comes_back(gpu_pools: GpuPools) -> None:
    pool = gpu_pools.start(slots=8, options=("--quarantine", "100ms"))
    script = """
gpu = Gpu()
worker = connect(directory, device="cuda")
slots = worker.allocator.alloc(4)
stream = gpu.stream()
gpu.delay(stream, 0.2)
gpu.fill(stream, worker.states["conv"][:, int(slots[0])], 3)
say(lib.simAllocated(0))
os.kill(os.getpid(), 9)
"""
    allocated = set()
    for _ in range(5):
        child = pool.start(script)
        allocated.add(child.hear())
        assert child.wait() == -9
        wait_until(lambda: pool.daemon.pool()["free"] == 8, "its slots are free", 5.0)
    assert len(allocated) == 1
