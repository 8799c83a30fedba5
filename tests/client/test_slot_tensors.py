"""The tensor of one slot: what it looks like, and every way in which it comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids

from mambapool.client import Worker
from mambapool.pool.errors import BadIndexTensor, InvalidSlots, NotHolder

Form = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    """Holds 1 to 6."""
    worker = pool.connect()
    assert ids(worker.allocator.alloc(6)) == [1, 2, 3, 4, 5, 6]
    return worker


def take_one(worker: Worker, in_window: bool) -> torch.Tensor:
    """Slot 7, by a message or from a window."""
    if in_window:
        worker.allocator.alloc_group_begin(1)
    slot = granted(worker.allocator.alloc(1))
    worker.allocator.alloc_group_end()
    return slot


@pytest.mark.parametrize("in_window", [False, True])
def test_it_is_an_int64_vector_of_one(worker: Worker, in_window: bool) -> None:
    slot = take_one(worker, in_window)
    assert (slot.dtype, tuple(slot.shape), slot.is_contiguous(), slot.tolist()) == (torch.int64, (1,), True, [7])


@pytest.mark.parametrize(
    "form",
    [
        lambda slot: slot,
        lambda slot: slot[0],
        lambda slot: slot[0].unsqueeze(0),
        lambda slot: slot.view(1),
        lambda slot: slot[:1],
        lambda slot: slot.clone(),
        lambda slot: slot.to(torch.int32),
        lambda slot: slot.view(torch.int32)[:1],
        lambda slot: slot.expand(1),
        lambda slot: torch.cat([slot]),
    ],
)
@pytest.mark.parametrize("in_window", [False, True])
def test_every_view_and_copy_of_it_frees_that_slot(
    pool: FreshPool, worker: Worker, form: Form, in_window: bool
) -> None:
    slot = take_one(worker, in_window)
    worker.allocator.free(form(slot))
    assert worker.allocator.free_slots.tolist()[-1] == 7
    assert pool.held_by(worker) == set(range(1, 7))


def test_a_view_over_several_of_them_frees_what_it_shows(pool: FreshPool, worker: Worker) -> None:
    slot = take_one(worker, False)
    worker.allocator.free(slot.as_strided((3,), (2,), slot.storage_offset() - 4))
    pool.settle()
    assert pool.held_by(worker) == {1, 2, 4, 6}


def test_an_empty_view_of_it_frees_nothing(worker: Worker) -> None:
    worker.allocator.free(take_one(worker, False)[:0])
    assert worker.allocator.available_size() == 9


def test_a_view_of_two_dimensions_is_refused(worker: Worker) -> None:
    with pytest.raises(BadIndexTensor, match="flatten"):
        worker.allocator.free(take_one(worker, False).unsqueeze(0))
    assert worker.allocator.available_size() == 9


def test_slots_in_one_call_may_be_their_tensors_joined(pool: FreshPool, worker: Worker) -> None:
    worker.allocator.alloc_group_begin(4)
    slots = [granted(worker.allocator.alloc(1)) for _ in range(4)]
    worker.allocator.free(torch.cat(slots[::2]))
    worker.allocator.alloc_group_end()
    assert worker.allocator.free_slots.tolist()[-2:] == [7, 9]
    assert pool.held_by(worker) == {1, 2, 3, 4, 5, 6, 8, 10}


def test_another_clients_tensor_means_its_slot_not_an_address(pool: FreshPool, worker: Worker) -> None:
    other = pool.connect()
    slot = take_one(other, False)
    with pytest.raises(NotHolder) as caught:
        worker.allocator.free(slot)
    assert caught.value.slots == (7,)
    other.allocator.free(slot)


def test_the_debug_mode_finds_a_slot_tensor_that_was_written_to(
    pool: FreshPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBAPOOL_DEBUG", "1")
    allocator = pool.allocator()
    first, second = granted(allocator.alloc(1)), granted(allocator.alloc(1))
    second += 5
    for slot in (first, second):
        with pytest.raises(InvalidSlots, match="clone one before changing it") as caught:
            allocator.free(slot)
        assert caught.value.slots == (2,)
    assert allocator.available_size() == 14
    second -= 5
    allocator.free(first)
    allocator.free(second)
    assert allocator.available_size() == 16


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_debug_mode_nobody_looks(pool: FreshPool, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MAMBAPOOL_DEBUG", value)
    allocator = pool.allocator()
    slot = granted(allocator.alloc(1))
    slot += 5
    allocator.free(slot)
    assert pool.owner.allocator.available_size() in (15, 16)
    assert allocator.free_slots.tolist()[-1] == 1
