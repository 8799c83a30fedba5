"""Answers that come after their call has given up: never another call's, and what they granted is given back."""

from __future__ import annotations

import functools
import random
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, granted, ids
from processes import paused

from mambapool.client.allocator import SlotAllocator
from mambapool.pool.errors import AllocatorUnavailable

#: Short, but not so short that a busy machine makes an answer late that was not meant to be.
TIMEOUT_S = 0.3


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


@pytest.fixture
def allocator(pool: FreshPool) -> SlotAllocator:
    return pool.allocator(timeout=TIMEOUT_S)


def gives_up(call: Callable[[], object]) -> None:
    with pytest.raises(AllocatorUnavailable):
        call()


def test_a_late_grant_is_not_the_next_calls_answer(pool: FreshPool, allocator: SlotAllocator) -> None:
    with paused(pool.daemon):
        gives_up(lambda: allocator.alloc(3))
        gives_up(lambda: allocator.alloc(1))
    assert len(ids(allocator.alloc(2))) == 2
    assert allocator.available_size() == 14
    assert sorted(drain(allocator)) == sorted(allocator.free_slots.tolist())


def test_late_grants_are_given_back_without_a_further_call(pool: FreshPool, allocator: SlotAllocator) -> None:
    with paused(pool.daemon):
        for count in (1, 3, 5):
            gives_up(functools.partial(allocator.alloc, count))
    pool.settle()
    assert pool.available == 16
    assert sorted(drain(allocator)) == list(range(1, 17))


def test_a_late_window_is_ended(pool: FreshPool) -> None:
    worker = pool.connect(timeout=TIMEOUT_S)
    with paused(pool.daemon):
        gives_up(lambda: worker.allocator.alloc_group_begin(8))
    before = worker.messages
    assert worker.allocator.alloc(1) is not None
    assert worker.messages > before, "a slot of a window that nobody got"
    assert worker.allocator.free_slots.numel() == 15
    assert (pool.holder(worker)["windows"], pool.holder(worker)["held"]) == (0, 1)


def test_what_a_late_call_carried_is_freed_once(pool: FreshPool, allocator: SlotAllocator) -> None:
    allocator.alloc_group_begin(4)
    slots = [granted(allocator.alloc(1)) for _ in range(4)]
    for slot in slots[:3]:
        allocator.free(slot)
    with paused(pool.daemon):
        gives_up(lambda: allocator.alloc(2))
        assert allocator.available_size() == 12 + 3
        gives_up(lambda: allocator.alloc_group_begin(2))
        assert allocator.available_size() == 12 + 3
    pool.settle()
    assert pool.available == 15
    allocator.free(slots[3])
    assert sorted(drain(allocator)) == list(range(1, 17))


class _Interrupt(Exception):
    pass


@pytest.fixture
def interrupt_soon() -> Iterator[Callable[[], None]]:
    """Has a signal handler raise in the main thread in a tenth of a second."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.1) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("method", ["alloc", "alloc_group_begin"])
def test_a_call_that_is_interrupted_as_by_ctrl_c_keeps_nothing(
    pool: FreshPool, interrupt_soon: Callable[[], None], method: str
) -> None:
    allocator = pool.allocator()
    with paused(pool.daemon):
        interrupt_soon()
        with pytest.raises(_Interrupt):
            getattr(allocator, method)(4)
    assert len(ids(allocator.alloc(2))) == 2
    wait_until(lambda: pool.available == 14, "the grant that nobody got is given back")
    allocator.clear()
    assert sorted(drain(allocator)) == list(range(1, 17))


def test_a_client_that_gives_up_all_the_time_loses_and_doubles_nothing(pool: FreshPool) -> None:
    """Against an allocator that is stopped and continued all the time; two clients, so that order varies."""
    chance = random.Random(63)
    players = [(pool.allocator(), set[int]()) for _ in range(2)]
    for allocator, _ in players:
        allocator._transport.timeout = 0.01
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            with pool.daemon.stopped():
                over.wait(0.02)
            over.wait(0.02)

    stopper = threading.Thread(target=stop_and_go)
    stopper.start()
    gave_up = 0
    try:
        for _ in range(1000):
            allocator, held = chance.choice(players)
            count = chance.randint(1, 4)
            try:
                slots = allocator.alloc(count)
            except AllocatorUnavailable:
                gave_up += 1
                continue
            if slots is not None:
                assert len(slots) == count
                assert not held & set(ids(slots))
                held |= set(ids(slots))
            if held and chance.random() < 0.7:
                freed = chance.sample(sorted(held), min(len(held), 5))
                allocator.free(torch.tensor(freed))
                held -= set(freed)
    finally:
        over.set()
        stopper.join()
    assert gave_up > 5
    held_by_all = [slot for _, held in players for slot in held]
    pool.settle()
    assert pool.available == 16 - len(held_by_all)
    assert sorted(drain(pool.owner.allocator) + held_by_all) == list(range(1, 17))
