"""``create_slots=N``: a pool that clients make, share, and that ends with its last session."""

from __future__ import annotations

import pytest
from daemons import Daemon
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids

from mambapool.client import connect
from mambapool.pool.errors import ConfigError, GeometryMismatch, MambaPoolError, UnknownPool


def test_others_share_it_whether_or_not_they_would_have_made_it(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(8)
    with_size, without = pool.connect(create_slots=8), pool.connect()
    assert (with_size.allocator.size, without.allocator.size) == (8, 8)
    assert (ids(with_size.allocator.alloc(3)), ids(without.allocator.alloc(3))) == ([1, 2, 3], [4, 5, 6])
    assert pool.available == 2


def test_another_size_is_refused_with_both_numbers(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(8)
    for slots in (7, 9):
        with pytest.raises(GeometryMismatch, match=rf"create_slots: expected {slots}.*\b8 slots"):
            pool.connect(create_slots=slots)
    assert len(pool.status()["holders"]) == 1


def test_it_ends_with_its_last_session(shared_daemon: Daemon) -> None:
    first = connect(shared_daemon.dir, "short-lived", create_slots=4)
    with connect(shared_daemon.dir, "short-lived") as second:
        first.close()
        assert ids(second.allocator.alloc(2)) == [1, 2]
        assert shared_daemon.directory.slot_table("short-lived").exists()
    assert not shared_daemon.directory.slot_table("short-lived").exists()
    assert "short-lived" not in [pool["name"] for pool in shared_daemon.status()["pools"]]
    with pytest.raises(UnknownPool, match="short-lived"):
        connect(shared_daemon.dir, "short-lived")


def test_a_pool_of_the_same_name_made_later_is_a_new_one(shared_daemon: Daemon) -> None:
    with connect(shared_daemon.dir, "again", create_slots=4) as first:
        assert first.allocator.alloc(3) is not None
    with connect(shared_daemon.dir, "again", create_slots=6) as second:
        assert second.allocator.free_slots.tolist() == [1, 2, 3, 4, 5, 6]


def test_it_has_no_states(fresh_pool: FreshPoolFactory) -> None:
    pool: FreshPool = fresh_pool(4)
    assert dict(pool.owner.states) == {}
    with pytest.raises(MambaPoolError, match="allocator-only"):
        _ = pool.owner.pool
    status = pool.status()
    assert (status["bytes_per_slot"], status["backend"], status["shards"]) == (0, None, 0)


@pytest.mark.parametrize("slots", [0, -1, 2**20 + 1, 2**40, "8"])
def test_a_size_that_no_pool_can_have_is_refused(shared_daemon: Daemon, slots: int) -> None:
    with pytest.raises(ConfigError, match=r"create_slots must be a whole number from 1 to"):
        connect(shared_daemon.dir, "impossible", create_slots=slots)
    assert "impossible" not in [pool["name"] for pool in shared_daemon.status()["pools"]]


def test_the_largest_one_works(shared_daemon: Daemon) -> None:
    with connect(shared_daemon.dir, "largest", create_slots=2**20) as worker:
        slots = granted(worker.allocator.alloc(2**20))
        assert (len(slots), worker.allocator.alloc(1)) == (2**20, None)
        worker.allocator.free(slots)
        assert worker.allocator.available_size() == 2**20
