"""``alloc_group_begin`` to ``alloc_group_end``: all or nothing, never lost, given back in SGLang's order."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from fresh_pool import FreshPool, FreshPoolFactory, drain, granted, ids

from mambapool.client.allocator import SlotAllocator


def take(allocator: SlotAllocator, count: int) -> list[int | None]:
    """``count`` times ``alloc(1)``."""
    slots = [allocator.alloc(1) for _ in range(count)]
    return [None if slot is None else int(slot) for slot in slots]


def test_a_second_begin_gives_the_rest_of_the_first_window_back(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(16).allocator()
    for _ in range(10):
        allocator.alloc_group_begin(8)
        slots = take(allocator, 3)
        allocator.alloc_group_begin(4)
        assert allocator.available_size() == 16 - 3 - 4
        slots += take(allocator, 1)
        allocator.alloc_group_end()
        assert allocator.available_size() == 12
        allocator.free(torch.tensor(slots))
        assert allocator.available_size() == 16


def test_a_window_that_is_too_large_takes_nothing(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(5).allocator()
    allocator.alloc_group_begin(6)
    assert allocator.available_size() == 5
    assert take(allocator, 6) == [1, 2, 3, 4, 5, None]
    allocator.alloc_group_end()
    assert allocator.available_size() == 0
    allocator.free(torch.arange(1, 6))
    assert allocator.available_size() == 5


def test_after_a_window_that_got_nothing_slots_come_one_by_one(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(5)
    assert ids(pool.allocator().alloc(3)) == [1, 2, 3]
    allocator = pool.allocator()
    allocator.alloc_group_begin(3)
    assert take(allocator, 3) == [4, 5, None]
    allocator.alloc_group_end()
    assert allocator.available_size() == 0


def test_a_partial_window_takes_what_there_is(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(5)
    worker = pool.connect()
    worker.allocator.alloc_group_begin(8, partial=True)
    assert (pool.holder(worker)["windows"], worker.allocator.available_size()) == (5, 0)
    assert take(worker.allocator, 6) == [1, 2, 3, 4, 5, None]
    worker.allocator.alloc_group_begin(8, partial=True)
    assert take(worker.allocator, 1) == [None]


@pytest.mark.parametrize("count", [0, 8])
def test_a_begin_that_opens_no_window_ends_the_one_before(fresh_pool: FreshPoolFactory, count: int) -> None:
    pool = fresh_pool(5)
    worker = pool.connect()
    worker.allocator.alloc_group_begin(4)
    worker.allocator.alloc_group_begin(count)
    assert worker.allocator.free_slots.tolist() == [5, 1, 2, 3, 4]
    assert pool.holder(worker)["windows"] == 0


def test_frees_inside_come_before_the_unused_rest(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(8).allocator()
    allocator.alloc_group_begin(5)
    slots = take(allocator, 3)
    allocator.free(torch.tensor([slots[2], slots[0]]))
    assert allocator.available_size() == 5
    allocator.alloc_group_end()
    assert allocator.free_slots.tolist() == [6, 7, 8, 3, 1, 4, 5]


def test_an_alloc_of_several_inside_a_window_leaves_the_window_alone(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(8).allocator()
    allocator.alloc_group_begin(3)
    assert ids(allocator.alloc(2)) == [4, 5]
    assert take(allocator, 3) == [1, 2, 3]


def test_an_alloc_beyond_the_window_gets_what_was_freed_inside(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(3).allocator()
    allocator.alloc_group_begin(3)
    slots = take(allocator, 3)
    assert allocator.alloc(1) is None
    allocator.free(torch.tensor(slots[1]))
    assert allocator.available_size() == 1
    assert take(allocator, 2) == [2, None]


def test_status_counts_what_is_in_an_open_window(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(16)
    worker = pool.connect()
    assert worker.allocator.alloc(2) is not None
    seen = []

    def look() -> None:
        status, holder = pool.status(), pool.holder(worker)
        assert (status["held"], status["windows"]) == (holder["held"], holder["windows"])
        seen.append((status["free"], status["held"], status["windows"]))

    worker.allocator.alloc_group_begin(6)
    look()
    take(worker.allocator, 4)
    look()
    worker.allocator.alloc_group_end()
    assert worker.allocator.free_slots.numel() == 10
    look()
    assert seen == [(8, 2, 6), (8, 2, 6), (10, 6, 0)]


def test_an_end_without_a_window_does_nothing(fresh_pool: FreshPoolFactory) -> None:
    worker = fresh_pool(4).connect()
    before = worker.messages
    worker.allocator.alloc_group_end()
    assert worker.messages == before


class _PassFailed(Exception):
    pass


def _failing_pass(allocator: SlotAllocator, count: int, got: list[torch.Tensor]) -> None:
    """What a scheduler does that never comes to ``alloc_group_end``."""
    allocator.alloc_group_begin(8)
    for _ in range(count):
        slot = granted(allocator.alloc(1))
        got.append(slot)
    raise _PassFailed


def test_nothing_is_lost_when_an_exception_skips_the_end(fresh_pool: FreshPoolFactory) -> None:
    pool, chance = fresh_pool(32), random.Random(35)
    allocator = pool.allocator()
    for _ in range(100):
        got: list[torch.Tensor] = []
        with contextlib.suppress(_PassFailed):
            _failing_pass(allocator, chance.randint(0, 8), got)
        assert allocator.available_size() == 32 - 8
        for slot in got:
            allocator.free(slot)
        assert allocator.available_size() == 32 - 8 + len(got)
    allocator.alloc_group_end()
    assert allocator.available_size() == 32
    assert sorted(drain(allocator)) == list(range(1, 33))


def test_a_window_is_the_clients_alone(fresh_pool: FreshPoolFactory) -> None:
    pool: FreshPool = fresh_pool(10)
    first, second = pool.allocator(), pool.allocator()
    first.alloc_group_begin(4)
    second.alloc_group_begin(4)
    assert (take(first, 2), take(second, 2)) == ([1, 2], [5, 6])
    first.alloc_group_end()
    assert take(second, 2) == [7, 8]
    second.alloc_group_end()
    pool.settle()
    assert pool.available == 4
