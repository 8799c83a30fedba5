"""``close()``: once and for all, from any thread, and for this session only."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, ids
from groups import join
from processes import paused

from mambapool.client import Worker
from mambapool.client.allocator import SlotAllocator
from mambapool.pool.errors import ClientClosed

CALLS: dict[str, Callable[[SlotAllocator], object]] = {
    "alloc": lambda allocator: allocator.alloc(1),
    "alloc of several": lambda allocator: allocator.alloc(3),
    "begin": lambda allocator: allocator.alloc_group_begin(2),
    "end": lambda allocator: allocator.alloc_group_end(),
    "free": lambda allocator: allocator.free(torch.tensor([1])),
    "clear": lambda allocator: allocator.clear(),
    "available_size": lambda allocator: allocator.available_size(),
    "schedulable_available_size": lambda allocator: allocator.schedulable_available_size(),
    "free_slots": lambda allocator: allocator.free_slots,
}


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


@pytest.mark.parametrize("call", CALLS)
def test_every_later_call_raises(pool: FreshPool, call: str) -> None:
    worker = pool.connect()
    assert worker.allocator.alloc(2) is not None
    worker.allocator.alloc_group_begin(2)
    worker.close()
    before = worker.messages
    for _ in range(2):
        with pytest.raises(ClientClosed, match="connect again"):
            CALLS[call](worker.allocator)
    assert worker.messages == before
    assert pool.available == 16


def test_an_error_that_is_raised_again_and_again_does_not_grow(pool: FreshPool) -> None:
    worker = pool.connect()
    worker.close()

    def frames() -> int:
        with pytest.raises(ClientClosed) as caught:
            worker.allocator.available_size()
        return len(traceback.extract_tb(caught.value.__traceback__))

    assert len({frames() for _ in range(5)}) == 1


def test_closing_twice_does_nothing_more(pool: FreshPool) -> None:
    worker = pool.connect()
    worker.close()
    before = worker.messages
    worker.close()
    with worker:
        pass
    assert worker.messages == before
    assert "closed" in repr(worker)


def test_threads_that_close_at_once_close_once(pool: FreshPool) -> None:
    worker = pool.connect()
    assert worker.allocator.alloc(5) is not None
    threads = [threading.Thread(target=worker.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.available == 16
    assert len(pool.status()["holders"]) == 1


WAITS: dict[str, Callable[[Worker], object]] = {
    "alloc": lambda worker: worker.allocator.alloc(1, timeout=60.0),
    "alloc of several": lambda worker: worker.allocator.alloc(3, timeout=60.0),
    "accept": lambda worker: worker.accept(timeout=60.0),
}


@pytest.mark.parametrize("call", WAITS)
@pytest.mark.parametrize("guarantee", [0, 4])
def test_a_call_that_waits_meanwhile_raises_the_same(pool: FreshPool, call: str, guarantee: int) -> None:
    worker = pool.connect(guarantee=guarantee)
    taken = pool.allocator().alloc(16 - guarantee)
    if guarantee:
        assert worker.allocator.alloc(guarantee) is not None
    assert taken is not None
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(WAITS[call], worker) for _ in range(3)]
        # With a guarantee an alloc waits for its own list, and says so to nobody.
        if not (guarantee and call != "accept"):
            before = worker.messages
            wait_until(lambda: worker.messages > before or worker._transport.connection.waiting, "it has asked")
        worker.close()
        for each in waiting:
            with pytest.raises(ClientClosed, match="connect again"):
                each.result(timeout=10.0)


def test_a_wait_for_what_nobody_applies_any_more_raises_the_same(pool: FreshPool) -> None:
    """The free list is settled when what was posted is applied; a close while the daemon is stopped ends that."""
    worker = pool.connect(timeout=30.0)
    assert worker.allocator.alloc(2) is not None
    with paused(pool.daemon), ThreadPoolExecutor(1) as threads:
        worker.allocator.free(torch.tensor([1]))
        asked = threads.submit(lambda: worker.allocator.free_slots)
        wait_until(worker.allocator._calls.lock.locked, "it waits")
        worker.close()
        with pytest.raises(ClientClosed, match="connect again"):
            asked.result(timeout=10.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_another_raises_the_same_when_it_is_closed(pool: FreshPool, rank: int) -> None:
    ranks = join(pool, 2, timeout=30.0)
    worker = ranks[rank]
    # Rank 1 waits for rank 0's answer; rank 0, which clears, for rank 1's work.
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(worker.allocator.clear)
        wait_until(lambda: worker.allocator._group.position, "it has made its call")  # type: ignore[attr-defined]
        worker.close()
        with pytest.raises(ClientClosed, match="connect again"):
            waiting.result(timeout=10.0)


class _Stop(Exception):
    pass


def test_leaving_the_block_closes_also_by_an_exception(pool: FreshPool) -> None:
    worker = pool.connect()
    assert worker.allocator.alloc(5) is not None
    with pytest.raises(_Stop), worker:
        raise _Stop
    assert pool.available == 16


def test_tensors_that_were_handed_out_stay_readable(pool: FreshPool) -> None:
    with pool.connect() as worker:
        one, several, free = worker.allocator.alloc(1), worker.allocator.alloc(3), worker.allocator.free_slots
    assert (ids(one), ids(several), len(ids(free))) == ([1], [2, 3, 4], 12)


def test_other_sessions_of_the_process_go_on(pool: FreshPool) -> None:
    first, second = pool.connect(), pool.connect()
    assert first.allocator.alloc(4) is not None
    kept = second.allocator.alloc(4)
    first.close()
    assert pool.held_by(second) == set(ids(kept))
    assert ids(second.allocator.alloc(1)) == [9]
