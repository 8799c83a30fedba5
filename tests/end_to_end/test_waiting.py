"""Waiting for slots: first come, first served, and in nobody's way for longer than it lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from daemons import Daemon, wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids
from leased_clients import RECLAIM_S, RemoteClient, waits
from processes import Children

from mambapool.client.allocator import SlotAllocator
from mambapool.pool.errors import AllocatorUnavailable

DaemonFactory = Callable[..., Daemon]

LONG_S = 30.0


class Waiting:
    """An alloc with a timeout in a thread of its own."""

    def __init__(self, allocator: SlotAllocator, count: int, timeout: float = LONG_S) -> None:
        self.slots: torch.Tensor | None = None
        self.error: BaseException | None = None
        self._call = (allocator, count, timeout)
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        allocator, count, timeout = self._call
        try:
            self.slots = allocator.alloc(count, timeout=timeout)
        except BaseException as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def granted(self) -> list[int]:
        """Wait for its end; what it got."""
        self._thread.join()
        if self.error is not None:
            raise self.error
        return ids(self.slots)


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


@pytest.fixture
def holder(pool: FreshPool) -> SlotAllocator:
    """Holds all but slots 15 and 16."""
    allocator = pool.allocator(name="holder")
    assert ids(allocator.alloc(14)) == list(range(1, 15))
    return allocator


def test_an_alloc_with_a_timeout_is_served_at_once_when_there_is_enough(pool: FreshPool) -> None:
    allocator = pool.allocator()
    assert ids(allocator.alloc(3, timeout=LONG_S)) == [1, 2, 3]
    assert ids(allocator.alloc(1, timeout=LONG_S)) == [4]
    assert ids(allocator.alloc(0, timeout=LONG_S)) == []
    assert allocator.alloc(17, timeout=LONG_S) is None, "more than there are will never be there"
    assert allocator.alloc(17, timeout=0) is None


def test_a_wait_ends_with_none_after_its_timeout_and_holds_nobody_up_any_longer(
    pool: FreshPool, holder: SlotAllocator
) -> None:
    allocator = pool.allocator()
    began = time.monotonic()
    assert allocator.alloc(3, timeout=0.2) is None
    assert 0.2 <= time.monotonic() - began < 0.7
    wait_until(lambda: pool.available == 2, "nobody is held up any more")
    assert ids(allocator.alloc(2)) == [15, 16]


def test_a_free_wakes_the_waiting_with_all_it_asked_for(pool: FreshPool, holder: SlotAllocator) -> None:
    waiting = Waiting(pool.allocator(), 4)
    waits(pool, 4)
    holder.free(torch.tensor([9]))
    waits(pool, 4)
    assert not waiting.is_over
    holder.free(torch.tensor([3]))
    assert waiting.granted() == [15, 16, 9, 3]
    assert pool.status()["waiting"] == 0


def test_the_end_of_a_window_wakes_the_waiting(pool: FreshPool) -> None:
    windowed = pool.allocator()
    windowed.alloc_group_begin(16)
    assert ids(windowed.alloc(1)) == [1]
    waiting = Waiting(pool.allocator(), 15)
    waits(pool, 15)
    windowed.alloc_group_end()
    assert waiting.granted() == list(range(2, 17))


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_the_end_of_a_holder_wakes_the_waiting(pool: FreshPool, children: Children, how: str) -> None:
    remote = RemoteClient(children, pool)
    assert len(remote.ask("allocator.alloc(16)")) == 16
    waiting = Waiting(pool.allocator(), 16)
    waits(pool, 16)
    began = time.monotonic()
    if how == "killed":
        remote.kill()
    else:
        remote.child.say_no_more()
    assert sorted(waiting.granted()) == list(range(1, 17))
    assert time.monotonic() - began < 3 * RECLAIM_S


def test_sessions_and_threads_are_served_in_the_order_in_which_they_came(
    pool: FreshPool, holder: SlotAllocator, children: Children
) -> None:
    first, remote, shared = pool.allocator(), RemoteClient(children, pool), pool.allocator()
    _ = remote.session
    queue = [Waiting(first, 3)]
    waits(pool, 3)
    remote.begin("allocator.alloc(1, timeout=30.0)")
    waits(pool, 4)
    queue.append(Waiting(shared, 2))
    waits(pool, 6)
    queue.append(Waiting(shared, 1))
    waits(pool, 7)
    holder.free(torch.tensor([1]))
    assert queue[0].granted() == [15, 16, 1]
    waits(pool, 4)
    holder.free(torch.tensor([2]))
    assert remote.answer() == [2]
    assert not any(waiting.is_over for waiting in queue[1:])
    holder.free(torch.tensor([3, 4, 5]))
    assert [waiting.granted() for waiting in queue[1:]] == [[3, 4], [5]]


def test_while_somebody_waits_nobody_overtakes(pool: FreshPool, holder: SlotAllocator) -> None:
    other = pool.allocator()
    waiting = Waiting(pool.allocator(), 3)
    waits(pool, 3)
    assert other.available_size() == other.schedulable_available_size() == 0
    assert holder.available_size() == 0
    assert other.alloc(1) is None
    assert other.alloc(2) is None
    other.alloc_group_begin(1)
    assert other.alloc(1) is None
    other.alloc_group_begin(2, partial=True)
    assert other.alloc(1) is None
    assert pool.status()["free"] == 2
    holder.free(torch.tensor([1]))
    assert waiting.granted() == [15, 16, 1]
    holder.free(torch.tensor([2]))
    wait_until(lambda: pool.available == 1, "nobody waits any more")
    assert ids(other.alloc(1)) == [2]


def test_a_large_request_does_not_starve_behind_small_ones(pool: FreshPool) -> None:
    over = threading.Event()
    small_grants = [0, 0, 0]

    def churn(number: int, allocator: SlotAllocator) -> None:
        while not over.is_set():
            slots = allocator.alloc(5, timeout=0.05)
            if slots is not None:
                small_grants[number] += 1
                allocator.free(slots)

    threads = [threading.Thread(target=churn, args=(i, pool.allocator())) for i in range(3)]
    for thread in threads:
        thread.start()
    large = pool.allocator()
    for _ in range(20):
        slots = large.alloc(16, timeout=10.0)
        assert slots is not None, f"starved behind {small_grants} small ones"
        large.free(slots)
    over.set()
    for thread in threads:
        thread.join()
    assert min(small_grants) > 0
    wait_until(lambda: pool.available == 16, "all are free")


def test_a_waiting_client_that_dies_leaves_the_queue(
    pool: FreshPool, holder: SlotAllocator, children: Children
) -> None:
    remote = RemoteClient(children, pool)
    remote.begin("allocator.alloc(10, timeout=30.0)")
    waits(pool, 10)
    waiting = Waiting(pool.allocator(), 2)
    waits(pool, 12)
    remote.kill()
    # Who stood behind it has enough now.
    assert waiting.granted() == [15, 16]
    assert pool.status()["waiting"] == 0


def test_a_waiting_client_that_closes_is_told_and_leaves_the_queue(pool: FreshPool, holder: SlotAllocator) -> None:
    worker = pool.connect()
    waiting = Waiting(worker.allocator, 10)
    waits(pool, 10)
    worker.close()
    with pytest.raises(Exception, match="closed"):
        waiting.granted()
    wait_until(lambda: pool.available == 2, "nobody waits any more")


def test_who_gives_up_lets_those_behind_it_pass(pool: FreshPool, holder: SlotAllocator) -> None:
    large = Waiting(pool.allocator(), 10, timeout=0.3)
    waits(pool, 10)
    small = Waiting(pool.allocator(), 2)
    waits(pool, 12)
    assert small.granted() == [15, 16]
    assert large.is_over or large.slots is None


def test_other_threads_of_the_same_client_go_on_meanwhile(pool: FreshPool) -> None:
    allocator = pool.allocator(timeout=1.0)
    assert len(ids(allocator.alloc(16))) == 16
    waiting = Waiting(allocator, 6)
    waits(pool, 6)
    began = time.monotonic()
    assert allocator.available_size() == 0
    assert allocator.alloc(1) is None
    allocator.alloc_group_begin(2)
    allocator.alloc_group_end()
    allocator.free(torch.tensor([7]))
    assert allocator.free_slots.tolist() == [7]
    assert time.monotonic() - began < 0.7
    allocator.free(torch.tensor([1, 2, 3, 4, 5]))
    assert sorted(waiting.granted()) == [1, 2, 3, 4, 5, 7]


def test_a_clear_while_one_thread_waits_serves_it_or_ends_its_wait_and_loses_nothing(pool: FreshPool) -> None:
    worker = pool.connect()
    allocator = worker.allocator
    assert len(ids(allocator.alloc(16))) == 16
    waiting = Waiting(allocator, 6)
    waits(pool, 6)
    allocator.clear()
    wait_until(lambda: waiting.is_over, "the wait is over")
    got = set() if waiting.slots is None else set(ids(waiting.slots))
    wait_until(lambda: pool.held_by(worker) == got, "it holds what it was told that it got")
    allocator.clear()
    wait_until(lambda: pool.available == 16, "all are free")
    assert sorted(drain(allocator)) == list(range(1, 17))


def test_a_wait_at_the_sessions_limit_is_none_and_in_nobodys_way(pool: FreshPool) -> None:
    limited, other = pool.allocator(limit=2), pool.allocator()
    assert ids(limited.alloc(2)) == [1, 2]
    waiting = Waiting(limited, 1, timeout=0.4)
    # Its own limit is what it would wait for: others have all that is free meanwhile.
    for _ in range(20):
        assert len(drain(other)) == 14
    assert limited.alloc(3, timeout=LONG_S) is None, "beyond the limit for good"
    with pytest.raises(AssertionError):
        waiting.granted()
    assert waiting.error is None


def test_a_wait_for_what_others_are_guaranteed_is_none_and_in_nobodys_way(pool: FreshPool) -> None:
    """Guarantees are kept for as long as their engines live: everybody else would wait behind it."""
    guaranteed, small, large = pool.connect(guarantee=10), pool.allocator(), pool.allocator()
    began = time.monotonic()
    assert large.alloc(7, timeout=LONG_S) is None
    assert time.monotonic() - began < LONG_S / 2
    held = small.alloc(4)
    assert held is not None
    waiting = Waiting(large, 6)
    waits(pool, 6)
    small.free(held)
    assert len(waiting.granted()) == 6
    large.clear()
    guaranteed.close()
    assert len(ids(large.alloc(16, timeout=RECLAIM_S))) == 16


def test_a_grant_to_the_waiting_survives_a_closed_neighbour(pool: FreshPool, holder: SlotAllocator) -> None:
    """The one in front goes away in the very step in which the slots for both come back."""
    front, behind = pool.connect(), pool.connect()
    waiting = [Waiting(front.allocator, 8)]
    waits(pool, 8)
    waiting.append(Waiting(behind.allocator, 8))
    waits(pool, 16)
    holder.free(torch.tensor(list(range(1, 15))))
    assert sorted(waiting[0].granted() + waiting[1].granted()) == list(range(1, 17))


def test_more_than_max_waiters_are_refused_with_a_message(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=4, options=("--max-waiters", "2"))
    holder = daemon.connect().allocator
    assert len(ids(holder.alloc(4))) == 4
    waiting = []
    for count in (1, 2):
        waiting.append(Waiting(daemon.connect().allocator, count))
        wait_until(lambda: daemon.pool()["waiting"] == sum(range(len(waiting) + 1)), "it waits")
    with pytest.raises(AllocatorUnavailable, match=r"2 requests wait .*--max-waiters"):
        daemon.connect().allocator.alloc(1, timeout=LONG_S)
    assert daemon.connect().allocator.alloc(1) is None
    holder.free(torch.tensor([1, 2, 3]))
    assert [one.granted() for one in waiting] == [[1], [2, 3]]
