"""How long after the release of a killed client's lock its 100 slots are free: the aim is 10 ms at p99."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from fresh_pool import FreshPoolFactory
from processes import Children
from soaking import RemoteSession, percentile

from mambapool.pool import protocol, record_lock
from mambapool.pool import slot_table as st
from mambapool.pool.protocol import OK

RecordProperty = Callable[[str, object], None]

KILLS = 30
SLOTS = 100
#: Ten times the aim, and for the whole of it a machine that does something else too.
BOUND_MS = 100.0
#: Leaves the processor to those that are measured.
LOOK_S = 0.0001


def test_a_killed_clients_slots_are_free_within_milliseconds_of_its_locks_release(
    new_pool: FreshPoolFactory, children: Children, record_property: RecordProperty
) -> None:
    pool = new_pool(SLOTS)
    table = st.SlotTableReader(pool.daemon.directory.slot_table(pool.name))
    leases = pool.daemon.directory.leases
    took_ms = []
    for _ in range(KILLS):
        known = set(leases.iterdir())
        child = children.start("from soaking import serve_raw_sessions; serve_raw_sessions()")
        client = RemoteSession(child, "it", str(pool.daemon.dir), pool.name)
        assert client.do("hello")[0] == OK
        assert len(client.do("ask", protocol.ALLOC, SLOTS, None, False)[1]) == SLOTS
        (path,) = set(leases.iterdir()) - known
        lock = os.open(path, os.O_RDWR)
        try:
            os.kill(child.pid, signal.SIGKILL)
            while record_lock.holder(lock) is not None:
                time.sleep(LOOK_S)
            released = time.perf_counter()
            while table.free_count < SLOTS:
                assert time.perf_counter() - released < 10.0, "the slots did not come back"
                time.sleep(LOOK_S)
            took_ms.append((time.perf_counter() - released) * 1000)
        finally:
            os.close(lock)
        child.wait()
    figures = {part: round(percentile(took_ms, part), 2) for part in (0.5, 0.99)}
    record_property("reclaim_ms", figures)
    print(f"reclaim after the lock's release, ms: {figures}")  # noqa: T201
    assert figures[0.99] < BOUND_MS
