"""Frees that are wrong: found on the client without a message, named slot by slot, and without any effect."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fresh_pool import FreshPool, FreshPoolFactory, drain, granted, ids

from mambapool.client import Worker
from mambapool.pool.errors import (
    DoubleFree,
    DuplicateSlot,
    InvalidSlots,
    NotHolder,
    ReservedSlot,
    SlotOutOfRange,
)


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(20)


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    """Holds 1 to 3; another session holds 4 and 5; everything else is free."""
    worker = pool.connect()
    assert ids(worker.allocator.alloc(3)) == [1, 2, 3]
    assert ids(pool.allocator(name="other").alloc(2)) == [4, 5]
    return worker


@pytest.mark.parametrize(
    ("freed", "error", "at_fault"),
    [
        ([9], DoubleFree, (9,)),
        ([1, 10, 9], DoubleFree, (10, 9)),
        ([4], NotHolder, (4,)),
        ([1, 5, 4], NotHolder, (5, 4)),
        ([0], ReservedSlot, (0,)),
        ([1, 0], ReservedSlot, (0,)),
        ([-1], SlotOutOfRange, (-1,)),
        ([1, 21], SlotOutOfRange, (21,)),
        ([2**40], SlotOutOfRange, (2**40,)),
        ([2, 2], DuplicateSlot, (2,)),
        ([1, 2, 3, 1, 2, 3], DuplicateSlot, (1, 2, 3)),
    ],
)
@pytest.mark.parametrize("in_window", [False, True])
def test_a_wrong_free_is_refused_whole_without_a_message(
    pool: FreshPool,
    worker: Worker,
    freed: list[int],
    error: type[InvalidSlots],
    at_fault: tuple[int, ...],
    in_window: bool,
) -> None:
    if in_window:
        worker.allocator.alloc_group_begin(2)
    before = worker.messages, worker.allocator.available_size()
    with pytest.raises(error) as caught:
        worker.allocator.free(torch.tensor(freed))
    assert caught.value.slots == at_fault
    assert all(re.search(rf"\b{abs(slot)}\b", str(caught.value)) for slot in at_fault)
    assert (worker.messages, worker.allocator.available_size()) == before
    worker.allocator.free(torch.tensor([3, 1, 2]))
    worker.allocator.alloc_group_end()
    assert worker.allocator.available_size() == 18


def test_slots_that_were_freed_cannot_be_freed_again(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(20).allocator()
    slots = granted(allocator.alloc(3))
    allocator.free(slots)
    with pytest.raises(DoubleFree, match=r"1, 2, 3 are already free") as caught:
        allocator.free(slots)
    assert caught.value.slots == (1, 2, 3)
    assert allocator.available_size() == 20
    assert sorted(ids(allocator.alloc(20))) == list(range(1, 21))
    assert allocator.alloc(1) is None


def test_a_slot_that_was_freed_in_this_window_cannot_be_freed_again(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(4)
    allocator = pool.allocator()
    allocator.alloc_group_begin(2)
    slot = granted(allocator.alloc(1))
    allocator.free(slot)
    with pytest.raises(DoubleFree):
        allocator.free(slot)
    allocator.alloc_group_end()
    assert sorted(drain(allocator)) == [1, 2, 3, 4]


def test_a_window_slot_that_was_not_handed_out_cannot_be_freed(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(4).allocator()
    allocator.alloc_group_begin(2)
    with pytest.raises(DoubleFree) as caught:
        allocator.free(torch.tensor([2]))
    assert caught.value.slots == (2,)
    assert [ids(allocator.alloc(1)) for _ in range(2)] == [[1], [2]]


def test_what_another_session_got_is_named_with_its_holder(pool: FreshPool, worker: Worker) -> None:
    slots = granted(worker.allocator.alloc(1))
    worker.allocator.free(slots)
    pool.settle()
    taker = pool.connect()
    assert set(ids(taker.allocator.alloc(15))) >= set(slots.tolist())
    with pytest.raises(NotHolder, match=rf"session {taker.session}\b.*not by this one \({worker.session}\)"):
        worker.allocator.free(slots)


def test_one_id_twice_in_a_large_batch_is_found(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(4096).allocator()
    slots = granted(allocator.alloc(4096))
    twice = slots.clone()
    twice[-1] = twice[0]
    with pytest.raises(DuplicateSlot) as caught:
        allocator.free(twice)
    assert (caught.value.slots, allocator.available_size()) == ((1,), 0)
    allocator.free(slots)
    assert allocator.available_size() == 4096


def test_the_same_tensor_twice_in_one_call_is_refused(pool: FreshPool, worker: Worker) -> None:
    slots = torch.tensor([1, 2, 3])
    with pytest.raises(DuplicateSlot):
        worker.allocator.free(torch.cat([slots, slots]))
    assert pool.held_by(worker) == {1, 2, 3}
    worker.allocator.free(slots)
    assert worker.allocator.available_size() == 18


def test_one_free_id_in_a_large_batch_is_found(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(200)
    worker = pool.connect()
    held = ids(worker.allocator.alloc(100))
    with pytest.raises(DoubleFree) as caught:
        worker.allocator.free(torch.tensor([*held, 150]))
    assert caught.value.slots == (150,)
    assert pool.held_by(worker) == set(held)


def test_a_long_list_of_faults_is_whole_in_slots_and_short_in_the_text(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(2000).allocator()
    with pytest.raises(DoubleFree) as caught:
        allocator.free(torch.arange(1, 2001))
    assert caught.value.slots == tuple(range(1, 2001))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("count", [-1, -(2**40)])
def test_a_negative_number_of_slots_is_a_value_error(worker: Worker, count: int) -> None:
    before = worker.messages
    calls: list[Any] = [worker.allocator.alloc, worker.allocator.alloc_group_begin]
    for call in calls:
        with pytest.raises(ValueError, match=str(count)):
            call(count)
    assert worker.messages == before
    assert ids(worker.allocator.alloc(1)) == [6]
