"""One client alone sees what SGLang's own allocator would have answered: ids, counts, the free list."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from fresh_pool import FreshPoolFactory, granted, ids
from reference import ReferenceAllocator

from mambapool.client.allocator import SlotAllocator

CALLS = 6_000


class RandomCalls:
    """Makes the same calls on both and compares every answer. Frees only what is held."""

    def __init__(self, allocator: SlotAllocator, reference: ReferenceAllocator, seed: int) -> None:
        self.allocator = allocator
        self.reference = reference
        self.random = random.Random(seed)
        #: The tensors as they were handed out.
        self.held: list[torch.Tensor] = []

    def call(self) -> None:
        calls, weights = (self.alloc, self.free, self.begin, self.end, self.clear), (45, 33, 11, 10, 1)
        self.random.choices(calls, weights)[0]()
        assert self.allocator.available_size() == self.reference.available_size()

    def alloc(self) -> None:
        count = self.random.choice((1, 1, 1, 2, 3, 4))
        slots, expected = self.allocator.alloc(count), self.reference.alloc(count)
        assert (None if slots is None else slots.tolist()) == expected
        if slots is not None:
            self.held.append(slots)

    def free(self) -> None:
        chosen = [self._take() for _ in range(min(self.random.randint(0, 4), len(self.held)))]
        slots = torch.cat(chosen) if chosen else torch.empty(0)
        if len(chosen) == 1:
            slots = self._as_another_tensor(chosen[0])
        self.reference.free([int(slot) for slot in slots.reshape(-1)])
        self.allocator.free(slots)

    def begin(self) -> None:
        count = self.random.randint(0, 8)
        self.allocator.alloc_group_begin(count)
        self.reference.alloc_group_begin(count)

    def end(self) -> None:
        self.allocator.alloc_group_end()
        self.reference.alloc_group_end()

    def clear(self) -> None:
        self.allocator.clear()
        self.reference.clear()
        self.held.clear()

    def _take(self) -> torch.Tensor:
        return self.held.pop(self.random.randrange(len(self.held)))

    def _as_another_tensor(self, slots: torch.Tensor) -> torch.Tensor:
        """The same ids as callers bring them: cloned, narrow, strided, backwards, without a dimension."""
        strided = torch.stack((slots, torch.zeros_like(slots)), dim=1)[:, 0]
        forms = [slots, slots.clone(), slots.to(torch.int32), strided, slots.flip(0)]
        return self.random.choice([*forms, slots[0]] if len(slots) == 1 else forms)


@pytest.mark.parametrize(("seed", "size"), [(1, 5), (2, 24), (3, 3000)])
def test_random_calls_are_answered_as_by_sglangs_allocator(
    fresh_pool: FreshPoolFactory, seed: int, size: int
) -> None:
    allocator, reference = fresh_pool(size).allocator(), ReferenceAllocator(size)
    game = RandomCalls(allocator, reference, seed)
    for _ in range(CALLS):
        game.call()
        assert allocator.free_slots.tolist() == reference.free_slots


@pytest.mark.parametrize(("seed", "size"), [(4, 6), (5, 100)])
def test_nothing_depends_on_waiting_between_the_calls(fresh_pool: FreshPoolFactory, seed: int, size: int) -> None:
    game = RandomCalls(fresh_pool(size).allocator(), ReferenceAllocator(size), seed)
    for _ in range(CALLS):
        game.call()
    assert game.allocator.free_slots.tolist() == game.reference.free_slots


def test_a_freed_slot_goes_to_the_end_of_the_list(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(8).allocator()
    first = granted(allocator.alloc(1))
    assert first.tolist() == [1]
    allocator.free(first)
    assert ids(allocator.alloc(1)) == [2]


def test_slots_come_again_in_the_order_in_which_they_were_freed(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(8).allocator()
    assert ids(allocator.alloc(8)) == [1, 2, 3, 4, 5, 6, 7, 8]
    for slot in (3, 1, 2):
        allocator.free(torch.tensor(slot))
    assert [ids(allocator.alloc(1)) for _ in range(3)] == [[3], [1], [2]]


def test_a_batch_is_freed_in_the_order_given(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(8).allocator()
    assert ids(allocator.alloc(3)) == [1, 2, 3]
    assert ids(allocator.alloc(5)) == [4, 5, 6, 7, 8]
    allocator.free(torch.tensor([7, 2]))
    assert ids(allocator.alloc(2)) == [7, 2]


def test_the_scheduler_finds_the_names_and_numbers_that_it_reads(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(5).allocator(device="cpu")
    assert (allocator.size, allocator.device) == (5, "cpu")
    seen = []
    calls: list[Callable[[], object]] = [
        lambda: allocator.alloc_group_begin(3),
        lambda: allocator.alloc(1),
        allocator.alloc_group_end,
    ]
    for call in calls:
        call()
        seen.append((allocator.available_size(), allocator.schedulable_available_size()))
    assert seen == [(2, 2), (2, 2), (4, 4)]


def test_the_free_list_that_a_caller_gets_is_a_copy(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(4).allocator()
    allocator.free_slots.fill_(9)
    assert (allocator.free_slots.dtype, allocator.free_slots.tolist()) == (torch.int64, [1, 2, 3, 4])
    assert ids(allocator.alloc(4)) == [1, 2, 3, 4]
