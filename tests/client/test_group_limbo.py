"""What a group has freed: kept from others until every rank has come as far, and the group's own at any time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids
from groups import join, on_all

from mambapool.client import Worker
from mambapool.client.background import background
from mambapool.client.group_leader import LeaderAllocator
from mambapool.client.limbo import Limbo
from mambapool.pool.errors import GroupBroken


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(8)


class Rounds:
    """Is looked after like a client, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> None:
        self.count += 1


def let_the_background_look() -> None:
    """Every client of this process has had its turn, several times."""
    rounds = Rounds()
    background().add(rounds)
    wait_until(lambda: rounds.count > 3, "the background thread has looked")


def stays(pool: FreshPool, free: int) -> None:
    let_the_background_look()
    pool.status()  # a round trip: what was posted meanwhile has come
    assert pool.available == free


def comes_to(pool: FreshPool, free: int) -> None:
    wait_until(lambda: pool.available == free, f"{free} slots are free", timeout=1.0)


def test_a_freed_slot_is_nobodys_until_the_writer_lets_go(fresh_pool: FreshPoolFactory) -> None:
    """Decode aborts while prefill still writes."""
    pool = fresh_pool(1)
    decode, prefill = join(pool, 2)
    for rank in (decode, prefill):
        assert ids(rank.allocator.alloc(1)) == [1]
    decode.allocator.free(torch.tensor([1]))
    for _ in range(5):
        let_the_background_look()
        assert pool.owner.allocator.alloc(1) is None
    prefill.allocator.free(torch.tensor([1]))
    assert ids(pool.owner.allocator.alloc(1, timeout=1.0)) == [1]


def test_the_free_counts_not_what_comes_after_it(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    for rank in (first, second):
        rank.allocator.alloc(4)
    first.allocator.free(torch.tensor([1, 2]))
    first.allocator.free(torch.tensor([3]))
    first.allocator.available_size()
    stays(pool, 4)
    second.allocator.free(torch.tensor([1, 2]))
    comes_to(pool, 6)
    stays(pool, 6)
    second.allocator.free(torch.tensor([3]))
    comes_to(pool, 7)


def test_the_group_itself_has_it_again_at_once(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    pool.owner.allocator.alloc(4)
    for rank in (first, second):
        assert ids(rank.allocator.alloc(4)) == [5, 6, 7, 8]
    first.allocator.free(torch.tensor([7, 5]))
    assert first.allocator.available_size() == 2
    assert first.allocator.alloc(3) is None
    assert ids(first.allocator.alloc(1)) == [7]
    assert ids(first.allocator.alloc(1)) == [5]
    assert first.allocator.alloc(1) is None
    stays(pool, 0)
    second.allocator.free(torch.tensor([7, 5]))
    assert second.allocator.available_size() == 2
    assert second.allocator.alloc(3) is None
    assert [ids(second.allocator.alloc(1)) for _ in range(2)] == [[7], [5]]
    assert second.allocator.alloc(1) is None
    stays(pool, 0)


def test_what_the_limbo_lacks_comes_from_the_pool(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    for rank in (first, second):
        rank.allocator.alloc(5)
    first.allocator.free(torch.tensor([2, 4]))
    assert first.allocator.available_size() == 5
    assert ids(first.allocator.alloc(5)) == [6, 7, 8, 2, 4]
    second.allocator.free(torch.tensor([2, 4]))
    assert second.allocator.available_size() == 5
    assert ids(second.allocator.alloc(5)) == [6, 7, 8, 2, 4]


def test_what_leaves_the_limbo_after_the_pool_was_found_empty_is_had_from_the_pool(
    pool: FreshPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = join(pool, 2)
    everything = list(range(1, 9))
    for rank in (first, second):
        assert ids(rank.allocator.alloc(8)) == everything
    first.allocator.free(torch.tensor(everything))
    leader = first.allocator
    assert isinstance(leader, LeaderAllocator)
    ask = leader._ask_for

    def asked(*arguments: Any) -> list[int] | None:
        got = ask(*arguments)
        if got is None:
            second.allocator.free(torch.tensor(everything))
            comes_to(pool, 8)
        return got

    monkeypatch.setattr(leader, "_ask_for", asked)
    assert ids(first.allocator.alloc(8)) == everything
    assert ids(second.allocator.alloc(8)) == everything


def test_what_others_took_meanwhile_leaves_the_limbo_as_it_was(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    for rank in (first, second):
        rank.allocator.alloc(5)
    first.allocator.free(torch.tensor([2, 4]))
    taken = granted(pool.owner.allocator.alloc(2))
    assert first.allocator.alloc(4) is None
    assert first.allocator.available_size() == 3
    pool.owner.allocator.free(taken)
    for rank in (second,):
        rank.allocator.free(torch.tensor([2, 4]))
        assert rank.allocator.alloc(4) is None
        assert rank.allocator.available_size() == 3
    comes_to(pool, 5)


@pytest.mark.parametrize("partial", [False, True])
def test_a_window_may_come_from_the_limbo(pool: FreshPool, partial: bool) -> None:
    ranks = join(pool, 2)
    for rank in ranks:
        rank.allocator.alloc(7)
    for rank in ranks:  # rank 0 is ahead: what it freed is in limbo
        rank.allocator.free(torch.tensor([3, 1]))
        rank.allocator.alloc_group_begin(6 if partial else 3, partial)
        assert [ids(rank.allocator.alloc(1)) for _ in range(3)] == [[8], [3], [1]]
        assert rank.allocator.alloc(1) is None
        rank.allocator.alloc_group_end()
    assert pool.available == 0


def test_what_is_freed_in_a_window_and_what_is_left_come_back_in_order(pool: FreshPool) -> None:
    first, second = join(pool, 2)

    def step(rank: Worker) -> None:
        rank.allocator.alloc_group_begin(6)
        slots = [granted(rank.allocator.alloc(1)) for _ in range(4)]
        rank.allocator.free(slots[2])
        rank.allocator.free(slots[0])
        rank.allocator.alloc_group_end()

    before = first.messages
    step(first)
    assert (pool.available, pool.holder(first)["windows"]) == (2, 6)
    step(second)
    comes_to(pool, 6)
    # The background thread sent it, and counts it when it has.
    wait_until(lambda: first.messages - before == 2, "two messages")
    assert (pool.holder(first)["windows"], pool.holder(first)["held"]) == (0, 2)
    # SGLang's order: frees first, in the order of the calls, then the unused rest.
    assert pool.owner.allocator.free_slots.tolist() == [7, 8, 3, 1, 5, 6]


def test_a_window_that_was_used_up_ends_at_the_allocator_too(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    for rank in (first, second):
        rank.allocator.alloc_group_begin(2)
        rank.allocator.alloc(1)
        rank.allocator.alloc(1)
        rank.allocator.alloc_group_end()
    wait_until(lambda: pool.holder(first)["windows"] == 0, "the window has ended")
    assert pool.holder(first)["held"] == 2


def test_a_window_that_follows_another_one_is_not_ended_by_it(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    for rank in (first, second):
        for _ in range(3):
            rank.allocator.alloc_group_begin(3)
            slot = granted(rank.allocator.alloc(1))
            rank.allocator.alloc_group_end()
            rank.allocator.free(slot)
        rank.allocator.alloc_group_begin(2)
    comes_to(pool, 6)
    stays(pool, 6)
    assert pool.holder(first)["windows"] == 2


def test_clear_waits_for_every_rank_and_leaves_the_list_in_order(pool: FreshPool) -> None:
    ranks = join(pool, 2)

    def fill(rank: Worker) -> None:
        rank.allocator.alloc(4)
        rank.allocator.free(torch.tensor([3, 2]))
        rank.allocator.alloc_group_begin(2)

    for rank in ranks:
        fill(rank)
    on_all(ranks, lambda rank: rank.allocator.clear())
    everything = list(range(1, 9))
    wait_until(lambda: pool.owner.allocator.free_slots.tolist() == everything, "the list is in order")
    assert on_all(ranks, lambda rank: ids(rank.allocator.alloc(8))) == [everything] * 2


def test_a_clear_that_a_rank_does_not_come_to_names_it(pool: FreshPool) -> None:
    first, second = join(pool, 2, timeout=0.3)
    for rank in (first, second):
        rank.allocator.alloc(2)
    with pytest.raises(GroupBroken, match=r"rank 1 .*has made 1 calls and did not come to call 2 of rank 0"):
        first.allocator.clear()
    assert pool.held_by(first) == {1, 2}
    with pytest.raises(GroupBroken, match="rank 0 waited too long for rank 1"):
        second.allocator.clear()


def test_a_fence_holds_a_slot_back_as_a_position_does(pool: FreshPool) -> None:
    """What a GPU's fences publish (``sim_cuda/test_groups.py``): they are behind the rank's calls."""
    ranks = join(pool, 2)
    group = ranks[1].allocator._group  # type: ignore[attr-defined]
    group.page.set_fence(1, 0)
    for rank in ranks:
        rank.allocator.alloc(3)
        rank.allocator.free(torch.tensor([2]))
    stays(pool, 5)
    group.fenced(1)
    stays(pool, 5)
    group.fenced(2)
    comes_to(pool, 6)


def test_slots_in_limbo_are_taken_from_the_front_and_put_back_there() -> None:
    limbo = Limbo()
    for call, slots in ((1, [4, 5]), (3, [6]), (4, []), (7, [1, 2])):
        limbo.add(call, slots)
    assert (len(limbo), limbo.slots()) == (5, [4, 5, 6, 1, 2])
    assert limbo.take(3) == ([4, 5, 6], 3)  # all of them free since call 3
    limbo.put_back(3, [6, 5])
    assert limbo.take(1) == ([6], 3)
    assert limbo.take_passed(2) == []
    assert limbo.take_passed(7) == [5, 1, 2]
    assert (len(limbo), limbo.take(2), limbo.take_passed(99)) == (0, ([], 0), [])
