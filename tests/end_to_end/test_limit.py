"""A limit: a session never holds more, and plans with what it may still have."""

from __future__ import annotations

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids
from leased_clients import restart

from mambapool.client import Worker
from mambapool.pool.errors import ConfigError


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    return pool.connect(limit=4)


def test_a_session_gets_no_more_than_its_limit(pool: FreshPool, worker: Worker) -> None:
    allocator = worker.allocator
    assert (allocator.size, allocator.available_size()) == (16, 4)
    assert allocator.alloc(5) is None
    assert ids(allocator.alloc(3)) == [1, 2, 3]
    assert (allocator.available_size(), allocator.alloc(2)) == (1, None)
    assert ids(allocator.alloc(1)) == [4]
    assert (allocator.available_size(), allocator.alloc(1)) == (0, None)
    assert pool.available == 12, "it is nobody else's limit"
    allocator.free(torch.tensor([2, 3]))
    assert allocator.available_size() == 2
    assert ids(allocator.alloc(2)) == [5, 6]
    holder = pool.holder(worker)
    assert (holder["held"], holder["limit"], holder["guarantee"]) == (4, 4, 0)


def test_a_window_counts_against_the_limit(pool: FreshPool, worker: Worker) -> None:
    allocator = worker.allocator
    allocator.alloc_group_begin(5)
    assert allocator.available_size() == 4, "all or nothing"
    assert ids(allocator.alloc(1)) == [1]
    allocator.alloc_group_begin(9, partial=True)
    assert allocator.available_size() == 0
    assert [ids(allocator.alloc(1)) for _ in range(3)] == [[2], [3], [4]]
    assert allocator.alloc(1) is None
    allocator.free(torch.tensor([3]))
    assert allocator.available_size() == 1
    assert len(ids(allocator.alloc(1))) == 1, "what was freed inside the window makes room"
    allocator.alloc_group_end()
    allocator.clear()
    assert allocator.available_size() == 4
    assert len(drain(allocator)) == 4


def test_what_there_is_limits_too(pool: FreshPool, worker: Worker) -> None:
    other = pool.allocator()
    assert len(ids(other.alloc(14))) == 14
    assert worker.allocator.available_size() == 2
    assert worker.allocator.alloc(3) is None
    assert ids(worker.allocator.alloc(2)) == [15, 16]


def test_a_limit_holds_over_a_restart(pool: FreshPool, worker: Worker) -> None:
    assert len(ids(worker.allocator.alloc(3))) == 3
    restart(pool.daemon)
    assert worker.allocator.alloc(2) is None
    assert worker.allocator.available_size() == 1
    assert ids(worker.allocator.alloc(1)) == [4]
    assert worker.allocator.alloc(1) is None
    assert pool.holder(worker)["limit"] == 4


def test_guarantee_and_limit_together_leave_room_for_transfers_only(pool: FreshPool) -> None:
    giver = pool.connect()
    slots = giver.allocator.alloc(2)
    assert slots is not None
    receiver = pool.connect(guarantee=3, limit=4)
    giver.transfer(slots[:1], to=receiver.session)
    assert ids(receiver.accept()) == [1]
    holder = pool.holder(receiver)
    assert (holder["held"], holder["guarantee"], holder["limit"]) == (4, 3, 4)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_allows_nothing_is_refused(pool: FreshPool, limit: int) -> None:
    with pytest.raises(ConfigError, match="limit"):
        pool.connect(limit=limit)
    assert len(pool.status()["holders"]) == 1


def test_a_limit_beyond_the_pool_is_the_pool(pool: FreshPool) -> None:
    worker = pool.connect(limit=99)
    assert worker.allocator.available_size() == 16
    assert pool.holder(worker)["limit"] == 16
    assert len(ids(worker.allocator.alloc(16))) == 16
    wait_until(lambda: pool.available == 0, "all are taken")
