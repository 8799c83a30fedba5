"""What only the allocator can find wrong with a posted free: raised by the next call, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids

from mambapool.client import Worker
from mambapool.client.allocator import SlotAllocator
from mambapool.pool import protocol
from mambapool.pool.errors import (
    DoubleFree,
    DuplicateSlot,
    InvalidSlots,
    NotHolder,
    ReservedSlot,
    SlotOutOfRange,
)

CALLS: dict[str, Callable[[SlotAllocator], object]] = {
    "alloc": lambda allocator: allocator.alloc(1),
    "alloc of several": lambda allocator: allocator.alloc(3),
    "begin": lambda allocator: allocator.alloc_group_begin(2),
    "end": lambda allocator: allocator.alloc_group_end(),
    "free": lambda allocator: allocator.free(torch.tensor([1])),
    "clear": lambda allocator: allocator.clear(),
    "available_size": lambda allocator: allocator.available_size(),
    "free_slots": lambda allocator: allocator.free_slots,
}


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(40)


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    """Holds 1 to 20; another session holds 21."""
    worker = pool.connect()
    assert len(ids(worker.allocator.alloc(20))) == 20
    assert ids(pool.allocator(name="other").alloc(1)) == [21]
    return worker


def free_unseen(worker: Worker, slots: list[int]) -> None:
    """A free that the client's own record takes to be right."""
    for slot in slots:
        worker.allocator._record.marks[slot] = 1
    worker.allocator.free(torch.tensor(slots))


def post_raw(worker: Worker, slots: list[int]) -> None:
    """A free that has not passed the client's checks."""
    worker._transport.post(protocol.FREE, np.array(slots, "<i4").tobytes(), 0)


def applied(worker: Worker) -> int:
    """The number of the last posted message that the slot table says is applied."""
    allocator = worker.allocator
    return allocator._table.applied_and_free(allocator._row)[0]


def wait_for_refusal(worker: Worker) -> None:
    wait_until(lambda: worker._transport.refusals, "the refusal arrives")


@pytest.mark.parametrize(("slot", "error"), [(30, DoubleFree), (21, NotHolder)])
@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_raises_it_and_the_client_goes_on(
    pool: FreshPool, worker: Worker, call: str, slot: int, error: type[InvalidSlots]
) -> None:
    free_unseen(worker, [slot])
    wait_for_refusal(worker)
    with pytest.raises(error) as caught:
        CALLS[call](worker.allocator)
    assert caught.value.slots == (slot,)
    assert pool.held_by(worker) == set(range(1, 21))
    assert ids(worker.allocator.alloc(1)) == [22]
    worker.allocator.free(torch.arange(1, 21))
    assert worker.allocator.available_size() == 38


@pytest.mark.parametrize("call", ["alloc", "alloc of several", "begin"])
def test_a_call_that_waits_for_its_answer_raises_at_once_and_keeps_nothing(
    pool: FreshPool, worker: Worker, call: str
) -> None:
    free_unseen(worker, [30])
    with pytest.raises(DoubleFree):
        CALLS[call](worker.allocator)
    wait_until(lambda: pool.held_by(worker) == set(range(1, 21)), "the grant is given back")
    assert worker.allocator.available_size() == 19
    assert pool.holder(worker)["windows"] == 0
    assert len(drain(worker.allocator)) == 19


@pytest.mark.parametrize("call", ["alloc", "begin"])
def test_frees_that_a_call_carries_are_refused_as_that_call(pool: FreshPool, worker: Worker, call: str) -> None:
    worker.allocator.alloc_group_begin(1)
    assert ids(worker.allocator.alloc(1)) == [22]
    free_unseen(worker, [21])
    with pytest.raises(NotHolder) as caught:
        CALLS[call](worker.allocator)
    assert caught.value.slots == (21,)
    worker.allocator.clear()
    assert worker.allocator.available_size() == 39


@pytest.mark.parametrize(
    ("slots", "error", "at_fault"),
    [
        ([1, 2, 0], ReservedSlot, (0,)),
        ([1, 2, 41], SlotOutOfRange, (41,)),
        ([1, 2, -5], SlotOutOfRange, (-5,)),
        ([1, 2, 1], DuplicateSlot, (1,)),
        ([1, 2, 30], DoubleFree, (30,)),
        ([1, 2, 21], NotHolder, (21,)),
        ([*range(1, 21), 20], DuplicateSlot, (20,)),
        ([*range(1, 21), 30], DoubleFree, (30,)),
        ([*range(1, 21), 21], NotHolder, (21,)),
    ],
)
def test_the_allocator_checks_every_free_itself(
    pool: FreshPool, worker: Worker, slots: list[int], error: type[InvalidSlots], at_fault: tuple[int, ...]
) -> None:
    post_raw(worker, slots)
    wait_for_refusal(worker)
    with pytest.raises(error) as caught:
        worker.allocator.alloc(1)
    assert caught.value.slots == at_fault
    assert pool.held_by(worker) == set(range(1, 21))
    worker.allocator.free(torch.arange(1, 21))
    assert worker.allocator.available_size() == 39


def test_refusals_are_raised_one_by_one(worker: Worker) -> None:
    post_raw(worker, [30])
    post_raw(worker, [21])
    wait_until(lambda: len(worker._transport.refusals) == 2, "both refusals arrive")
    for error in (DoubleFree, NotHolder):
        with pytest.raises(error):
            worker.allocator.alloc(1)
    assert ids(worker.allocator.alloc(1)) == [22]


def test_a_refusal_arrives_also_when_its_message_is_known_to_be_applied(worker: Worker) -> None:
    posted = worker._transport.posted
    post_raw(worker, [30])
    wait_until(lambda: not posted.forget_applied(applied(worker)) and not posted, "it is applied")
    wait_for_refusal(worker)
    with pytest.raises(DoubleFree):
        worker.allocator.available_size()
