"""``close()``: once and for all, from any thread, and for this session only."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import pytest
import torch
from fresh_pool import FreshPool, FreshPoolFactory, ids

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
