"""Ranks of a group without a guarantee: the same calls, the same answers, rank 0's messages only."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids
from groups import join, on_all

from mambapool.client import Worker
from mambapool.client.allocator import SlotAllocator
from mambapool.client.group import COMPARE_EVERY
from mambapool.client.group_calls import GroupCalls
from mambapool.pool.errors import DoubleFree, GroupBroken, InvalidSlots, NotHolder, RankDiverged
from mambapool.pool.group_page import LEAD


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


def script(worker: Worker, seed: int, calls: int, pool_slots: int) -> list[Any]:
    """Random calls, the same ones for the same seed and the same answers; what they were answered."""
    chance = random.Random(seed)
    allocator = worker.allocator
    held: list[int] = []
    said: list[Any] = []
    for _ in range(calls):
        match chance.choice(["alloc", "alloc", "alloc", "free", "free", "begin", "end", "count", "clear", "list"]):
            case "alloc":
                slots = allocator.alloc(chance.choice([1, 1, 1, 2, 5, pool_slots]))
                said.append(None if slots is None else slots.tolist())
                held += [] if slots is None else slots.tolist()
            case "free" if held:
                chance.shuffle(held)
                count = chance.randint(1, len(held))
                allocator.free(torch.tensor(held[:count]))
                del held[:count]
            case "begin":
                allocator.alloc_group_begin(chance.randint(0, 6), partial=chance.random() < 0.5)
            case "end":
                allocator.alloc_group_end()
            case "count":
                said.append(allocator.available_size())
            case "clear" if chance.random() < 0.2:
                allocator.clear()
                held.clear()
            case "list" if chance.random() < 0.2:
                said.append(allocator.free_slots.tolist())
    allocator.clear()
    said.append(allocator.free_slots.tolist())
    return said


@pytest.mark.parametrize("guarantee", [0, 7])
@pytest.mark.parametrize("seed", range(3))
def test_random_equal_calls_get_equal_answers(pool: FreshPool, seed: int, guarantee: int) -> None:
    ranks = join(pool, 3, guarantee=guarantee)
    answers = on_all(ranks, lambda worker: script(worker, seed, 300, guarantee or 16))
    assert answers[1] == answers[2] == answers[0]
    assert answers[0][-1] == list(range(1, (guarantee or 16) + 1))


def test_a_rank_alone_behaves_like_a_session(pool: FreshPool, fresh_pool: FreshPoolFactory) -> None:
    (rank,) = join(pool, 1)
    assert script(rank, 1, 400, 16) == script(fresh_pool(16).connect(), 1, 400, 16)


def test_only_rank_0_sends_messages(pool: FreshPool) -> None:
    ranks = join(pool, 3)
    before = [rank.messages for rank in ranks]
    for rank in ranks:
        rank.allocator.alloc_group_begin(8)
        slots = [granted(rank.allocator.alloc(1)) for _ in range(5)]
        rank.allocator.free(slots[0])
        rank.allocator.alloc_group_end()
        assert rank.allocator.available_size() == 12
    sent = [rank.messages - count for rank, count in zip(ranks, before, strict=True)]
    assert sent[1:] == [0, 0]
    assert sent[0] <= 2


def test_slots_are_held_by_rank_0_for_all(pool: FreshPool) -> None:
    ranks = join(pool, 2)
    assert [ids(rank.allocator.alloc(3)) for rank in ranks] == [[1, 2, 3]] * 2
    assert pool.held_by(ranks[0]) == {1, 2, 3}
    assert pool.held_by(ranks[1]) == set()
    holders = {holder["session"]: holder for holder in pool.status()["holders"]}
    shown = [(holders[rank.session]["rank"], holders[rank.session]["held"]) for rank in ranks]
    assert shown == [(0, 3), (1, 0)]
    assert len({holders[rank.session]["group"] for rank in ranks} - {None}) == 1


def test_another_rank_waits_for_rank_0s_answer(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    got: list[list[int]] = []
    waiting = threading.Thread(target=lambda: got.append(ids(second.allocator.alloc(2))))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert ids(first.allocator.alloc(2)) == [1, 2]
    waiting.join()
    assert got == [[1, 2]]


def test_rank_0_may_be_far_ahead_and_answers_stay(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    answers = []
    for number in range(LEAD // 3):
        slots = first.allocator.alloc(1 + number % 3)
        answers.append(ids(slots))
        first.allocator.free(torch.tensor(answers[-1]))
        answers.append([first.allocator.available_size()])
    for number in range(LEAD // 3):
        slots = second.allocator.alloc(1 + number % 3)
        assert ids(slots) == answers.pop(0)
        second.allocator.free(torch.tensor(ids(slots)))
        assert second.allocator.available_size() == answers.pop(0)[0]


@pytest.mark.parametrize("guarantee", [0, 8])
def test_a_rank_too_far_ahead_waits_and_then_names_the_laggard(pool: FreshPool, guarantee: int) -> None:
    first, second = join(pool, 2, timeout=0.5, guarantee=guarantee)
    for _ in range(LEAD):
        first.allocator.available_size()
    with pytest.raises(
        GroupBroken, match=rf"rank 1 \(session {second.session}, pid \d+\) has made 0 calls.*0\.5 s"
    ):
        first.allocator.available_size()
    with pytest.raises(GroupBroken, match=r"rank 0 waited too long for rank 1"):
        second.allocator.available_size()


def test_a_rank_that_waits_longer_than_its_timeout_names_rank_0(pool: FreshPool) -> None:
    first, second = join(pool, 2, timeout=0.3)
    with pytest.raises(GroupBroken, match=rf"rank 0 \(session {first.session}, pid \d+\) has made 0 calls"):
        second.allocator.alloc(1)
    with pytest.raises(GroupBroken, match="rank 1 waited too long for rank 0"):
        first.allocator.alloc(1)


DIFFERENT: dict[str, tuple[Callable[[SlotAllocator], object], str]] = {
    "alloc": (lambda a: a.alloc(3), r"alloc\(3\)"),
    "alloc that waits": (lambda a: a.alloc(2, timeout=0.1), r"alloc\(2, timeout=…\)"),
    "begin": (lambda a: a.alloc_group_begin(2), r"alloc_group_begin\(2\)"),
    "end": (lambda a: a.alloc_group_end(), r"alloc_group_end\(\)"),
    "count": (lambda a: a.available_size(), r"available_size\(\)"),
    "list": (lambda a: a.free_slots, r"free_slots"),
    "clear": (lambda a: a.clear(), r"clear\(\)"),
    "free": (lambda a: a.free(torch.tensor([1])), r"free\(slot 1\)"),
    "free of several": (lambda a: a.free(torch.tensor([1, 2])), r"free\(2 slots, digest [0-9a-f]{8}\)"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_different_call_is_named_with_rank_0s(pool: FreshPool, name: str) -> None:
    call, text = DIFFERENT[name]
    first, second, third = join(pool, 3)
    for rank in (first, second, third):
        assert ids(rank.allocator.alloc(4)) == [1, 2, 3, 4]
    first.allocator.alloc(2)
    assert ids(third.allocator.alloc(2)) == [5, 6]
    diverged = rf"call 2: rank 1 called {text}, rank 0 called alloc\(2\)$"
    with contextlib.suppress(RankDiverged):
        call(second.allocator)  # a free and an end wait for nobody: that is found at the next look
    for _ in range(2):
        with pytest.raises(RankDiverged, match=diverged):
            second.allocator.alloc(1)
    for other in (first, third):
        with pytest.raises(GroupBroken, match="rank 1 made another call than rank 0 at call 2"):
            other.allocator.alloc(1)


@pytest.mark.parametrize("found_by", ["the next window", "the background", "the sixteenth call"])
def test_with_a_guarantee_a_different_call_is_found_soon(pool: FreshPool, found_by: str) -> None:
    first, second = join(pool, 2, guarantee=8)
    for rank in (first, second):
        rank.allocator.alloc(1)
    first.allocator.free(torch.tensor([1]))
    assert second.allocator.alloc(1) is not None  # nobody waits, so nobody notices yet
    text = r"call 2: rank 1 called alloc\(1\), rank 0 called free\(slot 1\)$"

    def come_to_it() -> None:
        match found_by:
            case "the next window":
                second.allocator.alloc_group_begin(2)
            case "the background":
                group = second.allocator._group  # type: ignore[attr-defined]
                wait_until(lambda: group._fault is not None, "it was found")
                second.allocator.available_size()
            case _:
                for _ in range(COMPARE_EVERY):
                    second.allocator.available_size()

    with pytest.raises(RankDiverged, match=text):
        come_to_it()
    with pytest.raises(GroupBroken, match="rank 1 made another call than rank 0 at call 2"):
        first.allocator.alloc(1)


def test_with_a_guarantee_nobody_waits_for_anybody(pool: FreshPool, fresh_pool: FreshPoolFactory) -> None:
    alone = script(fresh_pool(16).connect(guarantee=8), 5, 200, 8)
    ranks = join(pool, 3, guarantee=8, timeout=30.0)
    before = [rank.messages for rank in ranks]
    for rank in reversed(ranks):  # one after the other, the last rank first
        assert script(rank, 5, 200, 8) == alone
    assert [rank.messages for rank in ranks] == before


def test_a_free_of_other_slots_is_another_call(pool: FreshPool) -> None:
    first, second = join(pool, 2)
    for rank in (first, second):
        rank.allocator.alloc(4)
    first.allocator.free(torch.tensor([1, 2, 3]))
    second.allocator.free(torch.tensor([1, 3, 2]))
    first.allocator.available_size()
    with pytest.raises(RankDiverged, match=r"call 2: rank 1 called free\(3 slots"):
        second.allocator.available_size()


def test_misuse_is_refused_on_each_rank_and_is_no_call(pool: FreshPool) -> None:
    ranks = join(pool, 2)
    other = ids(pool.owner.allocator.alloc(1))
    for rank in ranks:
        slots = rank.allocator.alloc(3)
        assert ids(slots) == [2, 3, 4]
        for wrong, error in (
            ([2, 9], DoubleFree),
            (other, NotHolder),
            ([0], InvalidSlots),
            ([2, 2], InvalidSlots),
        ):
            with pytest.raises(error):
                rank.allocator.free(torch.tensor(wrong))
        with pytest.raises(ValueError, match="-1"):
            rank.allocator.alloc(-1)
        rank.allocator.free(torch.tensor([3]))
    assert [rank.allocator.available_size() for rank in ranks] == [13, 13]


def test_nothing_free_is_none_on_every_rank(pool: FreshPool) -> None:
    ranks = join(pool, 2)
    taken = granted(pool.owner.allocator.alloc(13))
    assert [rank.allocator.alloc(4) for rank in ranks] == [None, None]
    assert [rank.allocator.alloc(17) for rank in ranks] == [None, None]
    assert [ids(rank.allocator.alloc(3)) for rank in ranks] == [[14, 15, 16]] * 2
    pool.owner.allocator.free(taken)


def test_an_alloc_that_waits_gets_what_comes_free_on_every_rank(pool: FreshPool) -> None:
    ranks = join(pool, 2)
    taken = pool.owner.allocator.alloc(15)
    assert taken is not None

    def free_then() -> None:
        while not pool.status()["waiting"]:
            pass
        pool.owner.allocator.free(taken[:4])

    freeing = threading.Thread(target=free_then)
    freeing.start()
    assert on_all(ranks, lambda rank: ids(rank.allocator.alloc(3, timeout=10.0))) == [[16, 1, 2]] * 2
    freeing.join()


def test_an_error_of_rank_0_is_every_ranks(pool: FreshPool) -> None:
    ranks = join(pool, 2, limit=4)
    # Behind the clients' backs: what the allocator refuses comes back with the next answer.
    ranks[0].allocator._posted.append(6, 9, 1)
    for rank in ranks:
        with pytest.raises(DoubleFree, match="slots 9 are already free"):
            rank.allocator.alloc(1)
    # What the call that raised was granted has gone back.
    assert [ids(rank.allocator.alloc(1)) for rank in ranks] == [[2], [2]]
    assert [rank.allocator.available_size() for rank in ranks] == [3, 3]


def test_a_limit_counts_what_is_in_limbo_as_available(pool: FreshPool) -> None:
    first, second = join(pool, 2, limit=6)
    for rank in (first, second):
        assert rank.allocator.available_size() == 6
        rank.allocator.alloc(4)
        assert rank.allocator.available_size() == 2
    first.allocator.free(torch.tensor([1, 2, 3]))
    assert first.allocator.available_size() == 5
    assert ids(first.allocator.alloc(5)) is not None
    second.allocator.free(torch.tensor([1, 2, 3]))
    assert second.allocator.available_size() == 5
    assert len(ids(second.allocator.alloc(5))) == 5


def test_rank_0_waits_before_it_overwrites_answers_that_are_unread(fresh_pool: FreshPoolFactory) -> None:
    pool = fresh_pool(300)
    first, second = join(pool, 2, timeout=30.0)
    calls = 40  # of 300 slots each: more than the page has room for

    def run(rank: Worker) -> list[list[int]]:
        answers = []
        for _ in range(calls):
            answers.append(ids(rank.allocator.alloc(300)))
            rank.allocator.free(torch.tensor(answers[-1][::-1]))
        return answers

    answers: list[list[list[int]]] = []
    leading = threading.Thread(target=lambda: answers.append(run(first)))
    leading.start()
    group = first.allocator._group  # type: ignore[attr-defined]
    room = group.page.layout.data_items // 300
    wait_until(lambda: group.position >= 2 * room, "there is no more room")
    leading.join(0.2)
    assert leading.is_alive()
    assert group.position < 2 * calls
    answers.append(run(second))
    leading.join()
    assert answers[0] == answers[1]


def test_a_rank_that_meets_the_others_waits_until_each_has_come_as_far(pool: FreshPool) -> None:
    first, second = (worker.allocator for worker in join(pool, 2, timeout=30.0))
    assert isinstance(first, GroupCalls)
    assert isinstance(second, GroupCalls)
    happened = []

    def meet() -> None:
        first.meet()
        happened.append("met")

    first.free(granted(first.alloc(3)))  # which waits for nobody
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(meet)
        wait_until(first._group.lock.locked, "it waits for the other one")
        slots = granted(second.alloc(3))
        happened.append("came nearer")
        second.free(slots)
        meeting.result(timeout=10.0)
    assert happened == ["came nearer", "met"]
    second.meet()
    # What was freed is nobody's business any more: the next request takes it along, all of it.
    assert first._group.passed() == first._group.position == second._group.position


@pytest.mark.parametrize("how", ["left", "is late"])
def test_a_rank_that_does_not_come_is_named_where_the_others_meet(pool: FreshPool, how: str) -> None:
    ranks = join(pool, 2, timeout=30.0 if how == "left" else 0.3)
    first = ranks[0].allocator
    assert isinstance(first, GroupCalls)
    first.free(granted(first.alloc(3)))
    if how == "left":
        ranks[1].close()
    began = time.monotonic()
    with pytest.raises(GroupBroken, match=r"rank 1 \(session \d+, pid \d+\)"):
        first.meet()
    assert time.monotonic() - began < 10.0


def test_a_rank_that_left_after_the_same_calls_is_met(pool: FreshPool) -> None:
    ranks = join(pool, 2, timeout=30.0)
    on_all(ranks, lambda rank: rank.allocator.free(granted(rank.allocator.alloc(3))))
    ranks[1].close()
    first = ranks[0].allocator
    assert isinstance(first, GroupCalls)
    first.meet()
