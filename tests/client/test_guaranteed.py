"""A guarantee: SGLang's list, run by the client on slots that nobody else can have, without a message."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, ids
from reference import ReferenceAllocator

from mambapool.client import Worker
from mambapool.client.allocator import SlotAllocator
from mambapool.pool.errors import (
    BadIndexTensor,
    ClientClosed,
    DoubleFree,
    DuplicateSlot,
    InvalidSlots,
    NotHolder,
    ReservedSlot,
    SlotOutOfRange,
)

SLOTS = 40
GUARANTEE = 12


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    """Its list is in no order any more, and another session holds a part of it."""
    pool = fresh_pool(SLOTS)
    allocator = pool.allocator(name="other")
    slots = ids(allocator.alloc(SLOTS))
    kept = slots[:5]
    back = slots[5:]
    random.Random(4).shuffle(back)
    for slot in back:
        allocator.free(torch.tensor([slot]))
    wait_until(lambda: pool.available == SLOTS - len(kept), "the list is shuffled")
    return pool


@pytest.fixture
def worker(pool: FreshPool) -> Worker:
    return pool.connect(guarantee=GUARANTEE)


class Twin:
    """Makes the same call on a client and on the model, and compares all that both say."""

    def __init__(self, allocator: SlotAllocator, granted: list[int]) -> None:
        self.allocator = allocator
        self.model = ReferenceAllocator(len(granted))
        self.granted = granted
        self.held: list[int] = []

    def slots(self, model_ids: list[int]) -> list[int]:
        """The model's ids as those of the pool."""
        return [self.granted[slot - 1] for slot in model_ids]

    def alloc(self, count: int) -> None:
        expected, found = self.model.alloc(count), self.allocator.alloc(count)
        if expected is None:
            assert found is None
            return
        assert ids(found) == self.slots(expected)
        self.held += expected

    def free(self, chosen: list[int]) -> None:
        self.held = [slot for slot in self.held if slot not in chosen]
        self.model.free(chosen)
        self.allocator.free(torch.tensor(self.slots(chosen), dtype=torch.int64))

    def begin(self, count: int) -> None:
        self.model.alloc_group_begin(count)
        self.allocator.alloc_group_begin(count)

    def end(self) -> None:
        self.model.alloc_group_end()
        self.allocator.alloc_group_end()

    def clear(self) -> None:
        self.model.clear()
        self.allocator.clear()
        self.held = []
        self.granted = sorted(self.granted)

    def compare(self) -> None:
        assert self.allocator.available_size() == self.model.available_size()
        assert self.allocator.schedulable_available_size() == self.model.available_size()
        assert self.allocator.free_slots.tolist() == self.slots(self.model.free_slots)


@pytest.mark.parametrize("seed", range(3))
def test_ids_and_counts_are_sglangs_and_no_call_costs_a_message(worker: Worker, seed: int) -> None:
    chance = random.Random(seed)
    allocator = worker.allocator
    twin = Twin(allocator, allocator.free_slots.tolist())
    assert twin.granted != sorted(twin.granted), "in the order in which they were granted"
    before = worker.messages
    for _ in range(2000):
        match chance.choice(("alloc", "alloc", "alloc", "several", "free", "free", "begin", "end", "clear")):
            case "alloc":
                twin.alloc(1)
            case "several":
                twin.alloc(chance.randint(0, 5))
            case "free":
                twin.free(chance.sample(twin.held, chance.randint(0, len(twin.held))))
            case "begin":
                twin.begin(chance.randint(0, 6))
            case "end":
                twin.end()
            case "clear" if chance.random() < 0.1:
                twin.clear()
        twin.compare()
    assert worker.messages == before


def test_size_counts_and_ids_are_the_guarantees(pool: FreshPool, worker: Worker) -> None:
    allocator = worker.allocator
    assert (allocator.size, allocator.available_size()) == (GUARANTEE, GUARANTEE)
    assert set(allocator.free_slots.tolist()) == pool.held_by(worker)
    assert max(allocator.free_slots.tolist()) > GUARANTEE, "ids are the pool's"
    slots = allocator.alloc(GUARANTEE)
    assert slots is not None
    assert (slots.dtype, slots.shape) == (torch.int64, (GUARANTEE,))
    assert (allocator.available_size(), allocator.alloc(1), allocator.alloc(2)) == (0, None, None)
    allocator.free(slots[3])
    assert ids(allocator.alloc(1)) == [int(slots[3])], "freeing one makes the next alloc succeed"
    assert allocator.alloc(GUARANTEE + 1) is None
    assert ids(allocator.alloc(0)) == []


def test_changing_free_slots_frees_nothing(worker: Worker) -> None:
    before = worker.allocator.free_slots.tolist()
    worker.allocator.free_slots.zero_()
    assert worker.allocator.free_slots.tolist() == before


def test_a_partial_window_takes_what_there_is(worker: Worker) -> None:
    allocator = worker.allocator
    order = allocator.free_slots.tolist()
    allocator.alloc_group_begin(GUARANTEE + 5)
    assert allocator.available_size() == GUARANTEE, "all or nothing"
    allocator.alloc_group_begin(GUARANTEE + 5, partial=True)
    assert allocator.available_size() == 0
    assert ids(allocator.alloc(1)) == order[:1]
    assert allocator.alloc(2) is None, "a window serves single ones"
    allocator.alloc_group_end()
    assert allocator.free_slots.tolist() == order[1:]


MISUSE: dict[str, tuple[object, type[InvalidSlots]]] = {
    "a slot that is free": ("free", DoubleFree),
    "a slot of somebody else": ("theirs", NotHolder),
    "one of its own with one of somebody else": ("mixed", NotHolder),
    "the reserved slot": ([0], ReservedSlot),
    "a slot that there is not": ([SLOTS + 1], SlotOutOfRange),
    "a slot twice": ("twice", DuplicateSlot),
    "a mask": (torch.ones(3, dtype=torch.bool), BadIndexTensor),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_found_at_once_without_a_message_and_changes_nothing(
    pool: FreshPool, worker: Worker, what: str
) -> None:
    allocator = worker.allocator
    mine = allocator.alloc(3)
    assert mine is not None
    theirs = sorted(pool.held_by(pool.workers[1]))
    passed, kind = MISUSE[what]
    named = {
        "free": allocator.free_slots[:2],
        "theirs": theirs[:2],
        "mixed": [int(mine[0]), theirs[0]],
        "twice": torch.cat([mine, mine[:1]]),
    }
    value = named[passed] if isinstance(passed, str) else passed
    before, order = worker.messages, allocator.free_slots.tolist()
    with pytest.raises(kind):
        allocator.free(value)  # type: ignore[arg-type]
    assert (worker.messages, allocator.free_slots.tolist()) == (before, order)
    allocator.free(mine)
    assert allocator.available_size() == GUARANTEE
    with pytest.raises(DoubleFree):
        allocator.free(mine)


def test_clear_frees_what_this_one_holds_and_nothing_of_anybody_else(pool: FreshPool, worker: Worker) -> None:
    other = pool.connect(guarantee=4)
    theirs = other.allocator.alloc(2)
    assert theirs is not None
    allocator = worker.allocator
    mine = allocator.alloc(5)
    allocator.alloc_group_begin(3)
    before = worker.messages
    allocator.clear()
    assert allocator.free_slots.tolist() == sorted(pool.held_by(worker))
    assert worker.messages == before
    with pytest.raises(DoubleFree):
        allocator.free(mine)  # type: ignore[arg-type]
    other.allocator.free(theirs)
    assert other.allocator.available_size() == 4
    assert pool.held_by(other).isdisjoint(pool.held_by(worker))


def test_an_alloc_with_a_timeout_waits_for_another_thread(worker: Worker) -> None:
    allocator = worker.allocator
    slots = allocator.alloc(GUARANTEE)
    assert slots is not None
    began = time.monotonic()
    assert allocator.alloc(2, timeout=0.1) is None
    assert 0.1 <= time.monotonic() - began < 0.6
    freeing = threading.Timer(0.05, allocator.free, (slots[:2],))
    freeing.start()
    assert ids(allocator.alloc(2, timeout=10.0)) == slots[:2].tolist()
    freeing.join()
    assert allocator.alloc(GUARANTEE + 1, timeout=10.0) is None, "more than there are will never be there"


def test_threads_that_share_it_never_have_one_slot_twice(worker: Worker) -> None:
    allocator = worker.allocator
    held: set[int] = set()
    failures: list[str] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(1500):
            slots = allocator.alloc(chance.choice((1, 1, 1, 2, 3)))
            if slots is None:
                continue
            taken = ids(slots)
            with lock:
                if held & set(taken):
                    failures.append(f"{taken} while {held} are held")
                held.update(taken)
            with lock:
                held.difference_update(taken)
            allocator.free(slots)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert allocator.available_size() == GUARANTEE
    assert len(set(allocator.free_slots.tolist())) == GUARANTEE


def test_after_close_every_call_raises_also_those_without_a_message(pool: FreshPool, worker: Worker) -> None:
    slots = worker.allocator.alloc(2)
    worker.allocator.alloc_group_begin(2)
    worker.close()
    calls = (
        lambda: worker.allocator.alloc(1),
        lambda: worker.allocator.alloc(2),
        lambda: worker.allocator.free(slots),  # type: ignore[arg-type]
        lambda: worker.allocator.available_size(),
        lambda: worker.allocator.free_slots,
        lambda: worker.allocator.alloc_group_begin(1),
        lambda: worker.allocator.alloc_group_end(),
        lambda: worker.allocator.clear(),
    )
    for call in calls:
        with pytest.raises(ClientClosed):
            call()
    wait_until(lambda: pool.available == SLOTS - 5, "the guarantee is given back")
