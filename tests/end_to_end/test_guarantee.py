"""Guarantees: granted whole, never more than there is, kept over restarts, given back by whoever dies."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids
from leased_clients import RECLAIM_S, RemoteClient, all_free, outage, waits
from processes import Children

from mambapool.client import Worker
from mambapool.pool.errors import AllocatorUnavailable, GuaranteeExceeded, ProtocolError


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


class Attaching:
    """A connect with a guarantee, in a thread of its own."""

    def __init__(self, pool: FreshPool, guarantee: int, timeout: float = 30.0) -> None:
        self.worker: Worker | None = None
        self.error: Exception | None = None
        self._options = {"guarantee": guarantee, "timeout": timeout, "name": f"wants {guarantee}"}
        self._pool = pool
        self._thread = threading.Thread(target=self._attach)
        self._thread.start()

    def _attach(self) -> None:
        try:
            self.worker = self._pool.connect(**self._options)
        except Exception as error:
            self.error = error

    def attached(self) -> Worker:
        """Wait for its end."""
        self._thread.join()
        if self.error is not None:
            raise self.error
        assert self.worker is not None
        return self.worker


def test_a_guarantee_is_granted_whole_and_shown(pool: FreshPool) -> None:
    worker = pool.connect(guarantee=10)
    assert pool.held_by(worker) == set(range(1, 11))
    assert pool.available == 6
    assert len(drain(pool.owner.allocator)) == 6
    holder = pool.holder(worker)
    assert (holder["guarantee"], holder["held"], holder["limit"]) == (10, 10, 16)
    assert pool.holder(pool.owner)["guarantee"] == 0
    assert worker.allocator.available_size() == 10


def test_guarantees_beyond_the_pool_are_refused_with_who_has_what(pool: FreshPool) -> None:
    first, second = (pool.connect(guarantee=count, name=f"engine-{count}") for count in (7, 5))
    with pytest.raises(GuaranteeExceeded) as refusal:
        pool.connect(guarantee=5)
    for part in (
        "16 slots",
        "12",
        f"engine-7 (session {first.session}) 7",
        f"engine-5 (session {second.session}) 5",
    ):
        assert part in str(refusal.value)
    with pytest.raises(GuaranteeExceeded):
        pool.connect(guarantee=17)
    assert len(pool.status()["holders"]) == 3, "nobody else was attached"
    assert pool.available == 4
    first.close()
    assert pool.connect(guarantee=11).allocator.available_size() == 11


def test_a_guarantee_waits_at_attach_while_the_others_are_held_back(pool: FreshPool) -> None:
    holder, other = pool.allocator(), pool.allocator()
    assert len(ids(holder.alloc(10))) == 10
    attaching = Attaching(pool, 8)
    waits(pool, 8)
    # Six are free: they are the guarantee's.
    assert (other.available_size(), other.alloc(1), other.alloc(2)) == (0, None, None)
    holder.free(torch.tensor([4]))
    waits(pool, 8)
    assert other.alloc(1) is None
    holder.free(torch.tensor([9]))
    worker = attaching.attached()
    assert pool.held_by(worker) == {11, 12, 13, 14, 15, 16, 4, 9}
    assert worker.allocator.free_slots.tolist() == [11, 12, 13, 14, 15, 16, 4, 9]
    assert other.alloc(1) is None
    holder.free(torch.tensor([1]))
    wait_until(lambda: pool.available == 1, "nobody waits any more")
    assert ids(other.alloc(1)) == [1]


def test_a_guarantee_that_is_not_covered_in_time_leaves_nothing_behind(pool: FreshPool) -> None:
    holder = pool.allocator()
    assert len(ids(holder.alloc(10))) == 10
    began = time.monotonic()
    with pytest.raises(
        AllocatorUnavailable, match=r"not granted within 0\.3 s: 6 of 16 slots .* \(session \d+\) 10"
    ):
        pool.connect(guarantee=8, timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 1.0
    wait_until(lambda: pool.status()["waiting"] == 0, "nobody waits for it any more")
    wait_until(lambda: len(pool.status()["holders"]) == 2, "its session has ended")
    assert pool.available == 6
    holder.clear()
    assert pool.connect(guarantee=16).allocator.available_size() == 16


def test_a_guarantee_that_no_allocator_answers_is_not_said_to_lack_slots(pool: FreshPool) -> None:
    with pool.daemon.stopped(), pytest.raises(AllocatorUnavailable, match="no answer within"):
        pool.connect(guarantee=8, timeout=0.3)


def test_a_waiting_guarantee_is_behind_who_came_before_it(pool: FreshPool) -> None:
    holder, small = pool.allocator(), pool.allocator()
    assert len(ids(holder.alloc(16))) == 16
    got: list[list[int]] = []
    waiting = threading.Thread(target=lambda: got.append(ids(small.alloc(2, timeout=30.0))))
    waiting.start()
    waits(pool, 2)
    attaching = Attaching(pool, 3)
    waits(pool, 5)
    holder.free(torch.tensor([1, 2]))
    waiting.join()
    assert got == [[1, 2]]
    holder.free(torch.tensor([3, 4, 5]))
    assert attaching.attached().allocator.free_slots.tolist() == [3, 4, 5]


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_who_ends_gives_the_whole_guarantee_back(pool: FreshPool, children: Children, how: str) -> None:
    remote = RemoteClient(children, pool, guarantee=12)
    assert len(remote.ask("allocator.alloc(5)")) == 5
    attaching = Attaching(pool, 16 - 12 + 1) if how == "killed" else None
    if attaching is not None:
        with pytest.raises(GuaranteeExceeded):
            attaching.attached()
        remote.kill()
    else:
        remote.child.say_no_more()
    all_free(pool, within=3 * RECLAIM_S)
    assert pool.connect(guarantee=16).allocator.available_size() == 16


def test_a_killed_holder_makes_room_for_a_guarantee_that_waits(pool: FreshPool, children: Children) -> None:
    remote = RemoteClient(children, pool)
    assert len(remote.ask("allocator.alloc(16)")) == 16
    attaching = Attaching(pool, 16)
    waits(pool, 16)
    remote.kill()
    assert attaching.attached().allocator.available_size() == 16


def test_a_guarantee_outlives_the_allocator_without_noticing(pool: FreshPool) -> None:
    worker = pool.connect(guarantee=10, name="engine-0")
    allocator = worker.allocator
    in_use = allocator.alloc(4)
    order = allocator.free_slots.tolist()
    assert in_use is not None
    with outage(pool.daemon):
        before = worker.messages
        # No allocator runs, and no call needs one.
        assert ids(allocator.alloc(2)) == order[:2]
        allocator.free(in_use[:1])
        assert allocator.available_size() == 5
        allocator.alloc_group_begin(2)
        assert ids(allocator.alloc(1)) == order[2:3]
        assert worker.messages == before
    allocator.alloc_group_end()
    assert allocator.available_size() == 5 - 1
    assert pool.available == 6, "the gap is not given away"
    assert len(drain(pool.owner.allocator)) == 6
    assert pool.held_by(worker) == set(range(1, 11))
    assert pool.holder(worker)["guarantee"] == 10
    with pytest.raises(GuaranteeExceeded, match=rf"engine-0 \(session {worker.session}\) 10"):
        pool.connect(guarantee=7)


def test_a_guarantee_that_waits_over_a_restart_is_granted_by_the_next_allocator(pool: FreshPool) -> None:
    holder = pool.allocator()
    assert len(ids(holder.alloc(10))) == 10
    attaching = Attaching(pool, 8)
    waits(pool, 8)
    with outage(pool.daemon):
        holder.free(torch.tensor([1, 2, 3]))
    worker = attaching.attached()
    assert worker.allocator.available_size() == 8
    assert len(pool.held_by(worker)) == 8
    assert pool.held_by(worker).isdisjoint(range(4, 11))


def test_a_limit_below_the_guarantee_is_refused(pool: FreshPool) -> None:
    with pytest.raises(ProtocolError, match="limit 3 is below the guarantee of 4"):
        pool.connect(guarantee=4, limit=3)
    assert len(pool.status()["holders"]) == 1
