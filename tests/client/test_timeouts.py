"""A silent allocator: every call returns or raises in time, and the client works on when it answers again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, granted, ids
from processes import paused

from mambapool.client import Worker
from mambapool.pool.errors import AllocatorUnavailable

TIMEOUT_S = 0.3
#: What a call may take beyond its timeout.
GRACE_S = 0.5

Call = Callable[[Worker], object]

WAITING: dict[str, Call] = {
    "alloc": lambda worker: worker.allocator.alloc(1),
    "alloc of several": lambda worker: worker.allocator.alloc(5),
    "begin": lambda worker: worker.allocator.alloc_group_begin(4),
    "partial begin": lambda worker: worker.allocator.alloc_group_begin(99, partial=True),
}
NOT_WAITING: dict[str, Call] = {
    "end": lambda worker: worker.allocator.alloc_group_end(),
    "free": lambda worker: worker.allocator.free(torch.tensor([1, 2])),
    "clear": lambda worker: worker.allocator.clear(),
    "available_size": lambda worker: worker.allocator.available_size(),
    "alloc in the window": lambda worker: worker.allocator.alloc(1),
}


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    """Holds 1 to 4."""
    worker = pool.connect(timeout=TIMEOUT_S)
    assert ids(worker.allocator.alloc(4)) == [1, 2, 3, 4]
    return worker


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def works_and_lost_nothing(pool: FreshPool, worker: Worker) -> None:
    pool.settle()
    assert worker.allocator.alloc(1) is not None
    worker.allocator.clear()
    assert sorted(drain(worker.allocator)) == list(range(1, 17))


@pytest.mark.parametrize("call", WAITING)
@pytest.mark.parametrize("in_window", [False, True])
def test_a_call_that_needs_an_answer_raises_in_time(
    pool: FreshPool, worker: Worker, call: str, in_window: bool
) -> None:
    if in_window:
        worker.allocator.alloc_group_begin(2)
        assert [ids(worker.allocator.alloc(1)) for _ in range(2)] == [[5], [6]]
        worker.allocator.free(torch.tensor([2]))
    with paused(pool.daemon):

        def raises() -> None:
            with pytest.raises(AllocatorUnavailable, match=rf"{pool.daemon.dir}.*{TIMEOUT_S:g} s"):
                WAITING[call](worker)

        assert TIMEOUT_S <= seconds(raises) < TIMEOUT_S + GRACE_S
    works_and_lost_nothing(pool, worker)


def test_the_free_list_of_frees_that_nobody_applies_raises_in_time(pool: FreshPool, worker: Worker) -> None:
    with paused(pool.daemon):
        worker.allocator.free(torch.tensor([1]))

        def raises() -> None:
            with pytest.raises(AllocatorUnavailable, match=rf"{pool.daemon.dir}.*{TIMEOUT_S:g} s"):
                _ = worker.allocator.free_slots

        assert TIMEOUT_S <= seconds(raises) < TIMEOUT_S + GRACE_S
    works_and_lost_nothing(pool, worker)


@pytest.mark.parametrize("call", NOT_WAITING)
def test_a_call_that_needs_no_answer_does_not_wait(pool: FreshPool, worker: Worker, call: str) -> None:
    worker.allocator.alloc_group_begin(2)
    with paused(pool.daemon):
        assert seconds(lambda: NOT_WAITING[call](worker)) < 0.2
    works_and_lost_nothing(pool, worker)


def test_close_returns_in_time_and_its_slots_come_back(pool: FreshPool, worker: Worker) -> None:
    worker.allocator.alloc_group_begin(3)
    with paused(pool.daemon):
        worker.allocator.free(torch.tensor([1, 2]))
        assert seconds(worker.close) < TIMEOUT_S + GRACE_S
        assert pool.available == 9
    wait_until(lambda: pool.available == 16, "the closed session's slots come back")
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 17))


def test_connect_raises_in_time(pool: FreshPool) -> None:
    def raises() -> None:
        with pytest.raises(AllocatorUnavailable, match=rf"{pool.daemon.dir}.*{TIMEOUT_S:g} s"):
            pool.connect(timeout=TIMEOUT_S)

    with paused(pool.daemon):
        assert seconds(raises) < TIMEOUT_S + GRACE_S
    pool.connect()


def test_the_next_call_works_however_often_calls_timed_out(pool: FreshPool) -> None:
    allocator = pool.allocator(timeout=0.2)
    for _ in range(4):
        with paused(pool.daemon):
            for _ in range(2):
                with pytest.raises(AllocatorUnavailable):
                    allocator.alloc(1)
        pool.settle()
        assert pool.available == 16
        slot = granted(allocator.alloc(1))
        allocator.free(slot)
    assert len(drain(allocator)) == 16


def test_threads_that_wait_for_one_another_raise_in_time(pool: FreshPool) -> None:
    timeout_s = 0.8
    worker, took = pool.connect(timeout=timeout_s), []

    def call() -> None:
        def raises() -> None:
            with pytest.raises(AllocatorUnavailable):
                worker.allocator.alloc(1)

        took.append(seconds(raises))

    threads = [threading.Thread(target=call) for _ in range(6)]
    with paused(pool.daemon):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(took) == 6
    assert max(took) < timeout_s + GRACE_S
    works_and_lost_nothing(pool, worker)


def test_a_close_gives_up_before_another_threads_call_does_and_the_session_ends_all_the_same(
    pool: FreshPool,
) -> None:
    timeout_s = 1.5
    worker = pool.connect(timeout=timeout_s)
    assert worker.allocator.alloc(4) is not None

    def alloc() -> None:
        with pytest.raises(AllocatorUnavailable):
            worker.allocator.alloc(1)

    before = worker.messages
    waiting = threading.Thread(target=alloc)
    with paused(pool.daemon):
        waiting.start()
        wait_until(lambda: worker.messages > before, "the other thread has asked")
        assert seconds(worker.close) < timeout_s + GRACE_S
        waiting.join()
    wait_until(lambda: len(pool.status()["holders"]) == 1, "the session ends")
    assert pool.available == 16
