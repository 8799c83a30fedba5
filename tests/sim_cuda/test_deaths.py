"""Processes that die while a GPU still works for them."""

from __future__ import annotations

import os

import pytest
from daemons import wait_until
from gpu_pools import GpuPool, GpuPools

#: Its lease's lock goes before the process does, as in the middle of a process's end; it writes on.
DYING = """
import threading
worker = connect(directory, device="cuda")
slots = worker.allocator.alloc(8)
rows = worker.states["temporal"][:, int(slots[0])]
def write():
    while True:
        rows.view(torch.uint8)[:] = 7
        time.sleep(0.001)
threading.Thread(target=write, daemon=True).start()
worker._transport.connection.lease.close()
say("released")
hear()
"""

KILLED = """
gpu = Gpu()
worker = connect(directory, device="cuda")
slots = worker.allocator.alloc(4)
stream = gpu.stream()
gpu.delay(stream, 0.2)
gpu.fill(stream, worker.states["conv"][:, int(slots[0])], 3)
say(lib.simAllocated(0))
os.kill(os.getpid(), 9)
"""

TAKER = """
with connect(directory, device="cuda") as worker:
    slots = worker.allocator.alloc(8, timeout=20.0)
    mark(worker, slots)
    say("has them")
    time.sleep(0.1)
    say(bytes_of(worker.states["temporal"][:, slots]))
"""


def test_slots_stay_back_until_the_process_has_ended_and_a_while_has_passed(gpu_pool: GpuPool) -> None:
    dying = gpu_pool.start(DYING)
    assert dying.hear() == "released"
    wait_until(lambda: gpu_pool.daemon.pool()["quarantined"] == 8, "its slots are quarantined")
    assert gpu_pool.daemon.pool()["holders"][0]["state"] == "gone"
    taker = gpu_pool.start(TAKER)
    status, over = gpu_pool.daemon.status, gpu_pool.daemon.status()["uptime_s"] + 0.6
    wait_until(lambda: status()["uptime_s"] > over, "the quarantine would be over, but the process lives")
    assert not taker.has_said_something()
    os.kill(dying.pid, 9)
    assert [taker.hear(), taker.hear()] == ["has them", "{9}"]
    assert taker.wait() == 0


@pytest.mark.parametrize("rounds", [5, pytest.param(20, marks=pytest.mark.heavy)])
def test_killed_clients_cost_the_device_nothing_and_all_comes_back(gpu_pool: GpuPool, rounds: int) -> None:
    """``cases.md`` 52."""
    allocated = set()
    for _ in range(rounds):
        child = gpu_pool.start(KILLED)
        allocated.add(child.hear())
        assert child.wait() == -9
        wait_until(lambda: gpu_pool.daemon.pool()["free"] == 8, "its slots are free", 5.0)
    assert len(allocated) == 1


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
