"""Not enough free: None, whole or nothing, whoever asks at the same time."""

from __future__ import annotations

import torch
from daemons import wait_until
from fresh_pool import FreshPoolFactory, drain, ids
from processes import Children

ROUNDS = 500

ALLOC_AND_FREE_ON_COMMAND = """
    import sys
    from mambapool.client import connect

    with connect(sys.argv[1], pool=sys.argv[2]) as worker:
        for line in sys.stdin:
            slots = worker.allocator.alloc(int(line))
            print(0 if slots is None else len(slots), flush=True)
            sys.stdin.readline()
            if slots is not None:
                worker.allocator.free(slots)
"""


def test_of_four_processes_that_ask_for_three_of_ten_exactly_three_get_them(
    fresh_pool: FreshPoolFactory, children: Children
) -> None:
    pool = fresh_pool(10)
    workers = [children.start(ALLOC_AND_FREE_ON_COMMAND, pool.daemon.dir, pool.name) for _ in range(4)]
    for _ in range(ROUNDS):
        for worker in workers:
            worker.say("3")
        assert sorted(int(worker.hear()) for worker in workers) == [0, 3, 3, 3]
        assert pool.available == 1
        for worker in workers:
            worker.say("free")
        while pool.available != 10:
            pass
    for worker in workers:
        worker.say_no_more()
        worker.rest()
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 11))


def test_more_than_the_pool_has_is_none_and_takes_nothing(fresh_pool: FreshPoolFactory) -> None:
    allocator = fresh_pool(10).allocator()
    assert allocator.alloc(11) is None
    assert allocator.available_size() == 10
    assert ids(allocator.alloc(10)) == list(range(1, 11))
    assert (allocator.alloc(1), allocator.alloc(5), allocator.available_size()) == (None, None, 0)


def test_after_none_a_free_of_one_slot_makes_the_next_alloc_succeed(fresh_pool: FreshPoolFactory) -> None:
    """As SGLang evicts one state and asserts that the alloc after it succeeds."""
    allocator = fresh_pool(6).allocator()
    slots = ids(allocator.alloc(6))
    for slot in slots:
        assert allocator.alloc(1) is None
        allocator.free(torch.tensor(slot))
        assert ids(allocator.alloc(1)) == [slot]


def test_slots_that_another_process_frees_can_be_had_at_once(
    fresh_pool: FreshPoolFactory, children: Children
) -> None:
    pool = fresh_pool(4)
    other = children.start(ALLOC_AND_FREE_ON_COMMAND, pool.daemon.dir, pool.name)
    other.say("4")
    assert other.hear() == "4"
    assert pool.owner.allocator.alloc(1) is None
    other.say("free")
    wait_until(lambda: pool.available == 4, "the other's slots come back", timeout=1.0)
    assert ids(pool.owner.allocator.alloc(4)) == [1, 2, 3, 4]
    other.say_no_more()
    other.rest()
