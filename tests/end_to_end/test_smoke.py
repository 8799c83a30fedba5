from __future__ import annotations

from daemons import Daemon


def test_slots_come_and_go(daemon: Daemon) -> None:
    worker = daemon.connect()
    slots = worker.allocator.alloc(3)
    assert slots is not None
    assert daemon.pool()["held"] == 3
    worker.allocator.free(slots)
    assert worker.allocator.available_size() == 64
