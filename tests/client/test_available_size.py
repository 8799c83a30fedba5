"""``available_size()``: read from the slot table, with this client's own frees counted exactly once."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids
from processes import Child, Children, paused

from mambapool.client import Worker


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(64)


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    """Holds 1 to 8."""
    worker = pool.connect()
    assert ids(worker.allocator.alloc(8)) == list(range(1, 9))
    return worker


def test_frees_count_once_however_far_the_allocator_is(worker: Worker) -> None:
    """Looked at as soon as possible, so that some frees are applied and some are not."""
    allocator, chance = worker.allocator, random.Random(7)
    expected, held = 56, list(range(1, 9))
    for _ in range(2000):
        if held and chance.random() < 0.6:
            freed = [held.pop(0) for _ in range(min(len(held), chance.randint(1, 3)))]
            allocator.free(torch.tensor(freed))
            expected += len(freed)
        elif (slots := allocator.alloc(2)) is not None:
            held += slots.tolist()
            expected -= 2
        assert allocator.available_size() == expected


def test_frees_that_a_large_change_carries_count_once_while_it_is_made(fresh_pool: FreshPoolFactory) -> None:
    """A change of many slots takes long enough to be looked at from the middle."""
    size, window = 2**17, 2**15
    worker = fresh_pool(size).connect()
    allocator = worker.allocator
    slots = ids(allocator.alloc(20_000))
    allocator.alloc_group_begin(1)
    allocator.free(granted(allocator.alloc(1)))
    opening = threading.Thread(target=allocator.alloc_group_begin, args=(window,))
    opening.start()
    wait_until(lambda: not allocator._window_open, "the first window is closed")
    expected, looks = size - len(slots), 0
    while opening.is_alive() or looks < 100:
        looks += 1
        if not allocator._window_open:
            allocator.free(torch.tensor(slots.pop()))
            expected += 1
        assert allocator.available_size() in (expected, expected - window)
    opening.join()
    assert allocator.available_size() == expected - window


def test_unapplied_frees_count_while_the_allocator_is_stopped(pool: FreshPool, worker: Worker) -> None:
    allocator = worker.allocator
    with paused(pool.daemon):
        seen = [allocator.available_size()]
        for slots in ([1], [2, 3], [4]):
            allocator.free(torch.tensor(slots))
            seen += [allocator.available_size(), allocator.schedulable_available_size()]
        allocator.clear()
        seen += [allocator.available_size(), pool.available]
    assert seen == [56, 57, 57, 59, 59, 60, 60, 64, 56]
    assert allocator.free_slots.numel() == 64
    assert allocator.available_size() == 64


def test_frees_inside_a_window_count_while_the_allocator_is_stopped(pool: FreshPool, worker: Worker) -> None:
    allocator = worker.allocator
    allocator.alloc_group_begin(6)
    with paused(pool.daemon):
        for _ in range(2):
            slot = granted(allocator.alloc(1))
            allocator.free(slot)
        allocator.free(torch.tensor([1, 2]))
        assert allocator.available_size() == 50 + 4
        allocator.alloc_group_end()
        assert allocator.available_size() == 50 + 4 + 4
    assert allocator.free_slots.numel() == 58
    assert allocator.available_size() == 58


def test_it_sends_nothing(pool: FreshPool, worker: Worker) -> None:
    worker.allocator.free(torch.tensor([1, 2]))
    with paused(pool.daemon):
        before = worker.messages
        for _ in range(100):
            worker.allocator.available_size()
        assert worker.messages == before


# Holds between 0 and 16 slots, and says "ok" when it has ended with none.
BUSY = """
    import random, select, sys
    from mambapool.client import connect

    with connect(sys.argv[1], pool=sys.argv[2]) as worker:
        chance = random.Random(int(sys.argv[3]))
        print("working", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            slots = worker.allocator.alloc(chance.randint(1, 16))
            if slots is not None:
                worker.allocator.free(slots)
"""


@pytest.fixture
def busy(pool: FreshPool, children: Children) -> list[Child]:
    """Two processes that take and give back up to 16 slots each."""
    started = [children.start(BUSY, pool.daemon.dir, pool.name, seed) for seed in range(2)]
    for child in started:
        assert child.hear() == "working"
    return started


def test_others_at_work_never_make_it_count_wrong(pool: FreshPool, worker: Worker, busy: list[Child]) -> None:
    """Eight slots are this client's, held or freed, and at most 32 the others'."""
    held = 8
    for slot in ids(torch.arange(1, 9)) + [0] * 3000:
        if slot:
            worker.allocator.free(torch.tensor(slot))
            held -= 1
        assert 64 - held - 32 <= worker.allocator.available_size() <= 64 - held
    for child in busy:
        child.say_no_more()
        child.rest()
    assert worker.allocator.available_size() == 64


def test_with_others_at_work_a_stop_at_any_moment_leaves_one_count(
    pool: FreshPool, worker: Worker, busy: list[Child]
) -> None:
    allocator, held = worker.allocator, list(range(1, 9))
    for _ in range(8):
        with paused(pool.daemon):
            before = allocator.available_size()
            allocator.free(torch.tensor(held.pop()))
            assert {allocator.available_size() for _ in range(20)} == {before + 1}
    for child in busy:
        child.say_no_more()
        child.rest()
    assert allocator.available_size() == 64
