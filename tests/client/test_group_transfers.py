"""What is on offer when a group's ranks come to it at different times: one answer for all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, granted, ids
from groups import join, on_all

from mambapool.client import Worker
from mambapool.client.group_calls import GroupCalls
from mambapool.pool import protocol
from mambapool.pool.errors import ConfigError, InvalidSlots, NotHolder

OFFERED = torch.tensor([1, 2])


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


@pytest.fixture(params=[0, 4], ids=["", "guarantee"])
def ranks(request: pytest.FixtureRequest, pool: FreshPool) -> list[Worker]:
    """Of a group that holds slots 1 and 2, and with a guarantee four more."""
    given = granted(pool.owner.allocator.alloc(2))
    ranks = join(pool, 2, guarantee=request.param)
    pool.owner.transfer(given, to=ranks[0].session)
    assert on_all(ranks, lambda rank: ids(rank.accept(timeout=5.0))) == [[1, 2]] * 2
    return ranks


@pytest.fixture
def receiver(pool: FreshPool, ranks: list[Worker]) -> Worker:
    """To whom they are on offer."""
    receiver = pool.connect(name="receiver")
    on_all(ranks, lambda rank: rank.transfer(OFFERED, to=receiver.session))
    return receiver


def position(rank: Worker) -> int:
    """How many calls it has made."""
    assert isinstance(rank.allocator, GroupCalls)
    return rank.allocator._group.position


def ends(pool: FreshPool, receiver: Worker) -> None:
    receiver.close()
    wait_until(lambda: pool.status()["offered"] == 0, "the offer has ended")


def refused(rank: Worker, call: str, *arguments: Any, **options: Any) -> tuple[str, list[int]]:
    """What a call is refused with."""
    of = rank if call == "transfer" else rank.allocator
    with pytest.raises(InvalidSlots) as error:
        getattr(of, call)(*arguments, **options)
    return type(error.value).__name__, list(error.value.slots)


def go_on(pool: FreshPool, ranks: list[Worker]) -> None:
    """Every rank has made as many calls, and gets the same."""
    assert position(ranks[0]) == position(ranks[1])
    got = on_all(ranks, lambda rank: [rank.allocator.available_size(), ids(rank.allocator.alloc(2))])
    assert got[0] == got[1]
    on_all(ranks, lambda rank: rank.allocator.clear())


def test_a_free_that_rank_0_is_refused_is_refused_on_a_rank_that_comes_when_the_offer_has_ended(
    pool: FreshPool, ranks: list[Worker], receiver: Worker
) -> None:
    assert refused(ranks[0], "free", OFFERED) == ("NotHolder", [1, 2])
    ends(pool, receiver)
    assert refused(ranks[1], "free", OFFERED) == ("NotHolder", [1, 2])
    go_on(pool, ranks)


def test_a_free_that_a_rank_makes_before_the_offer_has_ended_is_made_when_rank_0_finds_it_ended(
    pool: FreshPool, ranks: list[Worker], receiver: Worker
) -> None:
    made: list[str] = []

    def free() -> None:
        ranks[1].allocator.free(OFFERED)
        made.append("free")

    early = threading.Thread(target=free)
    early.start()
    wait_until(lambda: position(ranks[1]) > position(ranks[0]), "rank 1 is ahead")
    ends(pool, receiver)
    ranks[0].allocator.free(OFFERED)
    early.join()
    assert made == ["free"]
    for rank in ranks:
        assert refused(rank, "free", OFFERED) == ("DoubleFree", [1, 2])
    wait_until(lambda: not pool.held_by(ranks[0]) & {1, 2}, "they have left the group")
    go_on(pool, ranks)


def test_a_free_of_what_was_accepted_is_refused_on_every_rank_naming_it(
    pool: FreshPool, ranks: list[Worker], receiver: Worker
) -> None:
    assert refused(ranks[0], "free", OFFERED[:1]) == ("NotHolder", [1])
    assert ids(receiver.accept(timeout=5.0)) == [1, 2]
    assert refused(ranks[1], "free", OFFERED[:1]) == ("NotHolder", [1])
    for rank in ranks:
        assert refused(rank, "free", OFFERED) == ("NotHolder", [1, 2])
        with pytest.raises(NotHolder, match="were offered to another session, which has accepted them"):
            rank.allocator.free(OFFERED)
    receiver.transfer(OFFERED, to=ranks[1].session)
    assert on_all(ranks, lambda rank: ids(rank.accept(timeout=5.0))) == [[1, 2]] * 2
    on_all(ranks, lambda rank: rank.allocator.free(OFFERED))
    go_on(pool, ranks)


def test_a_free_that_is_partly_of_what_nobody_holds_is_no_call(
    pool: FreshPool, ranks: list[Worker], receiver: Worker
) -> None:
    with pytest.raises(InvalidSlots) as error:
        ranks[1].allocator.free(torch.tensor([1, 16]))
    assert list(error.value.slots) == [16]
    ends(pool, receiver)
    on_all(ranks, lambda rank: rank.allocator.free(OFFERED))
    go_on(pool, ranks)


@pytest.mark.parametrize("ends_first", [False, True])
def test_what_was_accepted_and_is_in_the_groups_window_by_now_is_nobodys_to_free(
    pool: FreshPool, receiver: Worker, ranks: list[Worker], ends_first: bool
) -> None:
    accepted = receiver.accept(timeout=5.0)
    assert accepted is not None
    receiver.allocator.free(accepted)
    wait_until(lambda: pool.available == pool.slots - pool.status()["held"], "it is free")
    count = ranks[0].allocator.size if ranks[0].allocator.size < pool.slots else pool.available
    on_all(ranks, lambda rank: rank.allocator.alloc_group_begin(count))
    if ends_first:
        on_all(ranks, lambda rank: rank.allocator.alloc_group_end())
    for rank in ranks:
        assert refused(rank, "free", OFFERED)[1] == [1, 2]
    drained = on_all(ranks, lambda rank: sorted(drain(rank.allocator)))
    assert drained[0] == drained[1] == sorted(set(drained[0]))
    assert len(drained[0]) == count
    go_on(pool, ranks)


def test_slots_of_a_guarantee_are_refused_before_their_transfer_is_a_call(pool: FreshPool) -> None:
    ranks = join(pool, 2, guarantee=4)
    other = pool.connect(name="other")
    slots = on_all(ranks, lambda rank: granted(rank.allocator.alloc(2)))
    assert refused(ranks[0], "transfer", slots[0], to=other.session) == ("NotHolder", [1, 2])
    assert refused(ranks[1], "transfer", slots[1], to=other.session) == ("NotHolder", [1, 2])
    on_all(ranks, lambda rank: rank.allocator.free(OFFERED))
    go_on(pool, ranks)


def test_a_second_offer_is_refused_or_made_on_all_ranks_as_rank_0_finds_the_first(
    pool: FreshPool, ranks: list[Worker], receiver: Worker
) -> None:
    other = pool.connect(name="other")
    answers = [refused(ranks[0], "transfer", OFFERED, to=other.session)]
    ends(pool, receiver)
    answers.append(refused(ranks[1], "transfer", OFFERED, to=other.session))
    assert answers == [("NotHolder", [1, 2])] * 2
    on_all(ranks, lambda rank: rank.transfer(OFFERED, to=other.session))
    assert ids(other.accept(timeout=5.0)) == [1, 2]
    other.allocator.free(OFFERED)
    go_on(pool, ranks)


def test_what_was_offered_to_nobody_is_freed_without_rank_0(pool: FreshPool, ranks: list[Worker]) -> None:
    assert (
        on_all(ranks, lambda rank: refused(rank, "transfer", OFFERED, to=4711)) == [("InvalidSlots", [1, 2])] * 2
    )
    ranks[1].allocator.free(OFFERED)
    ranks[0].allocator.free(OFFERED)
    go_on(pool, ranks)


def test_what_the_allocator_refused_of_rank_0_is_raised_by_the_next_answered_call_on_every_rank(
    pool: FreshPool, ranks: list[Worker]
) -> None:
    transport = ranks[0].allocator._transport
    transport.post(protocol.FREE, 16, 1)
    wait_until(lambda: transport.refusals, "the allocator has refused it")
    if ranks[0].allocator.size < pool.slots:  # with a guarantee nothing is answered
        assert len({tuple(ids(slots)) for slots in on_all(ranks, lambda rank: rank.allocator.alloc(1))}) == 1
        assert on_all(ranks, lambda rank: rank.allocator.available_size()) == [3, 3]
        on_all(ranks, lambda rank: rank.allocator.alloc_group_begin(2))
        on_all(ranks, lambda rank: rank.allocator.alloc_group_end())
    errors = on_all(ranks, _refused_accept)
    assert errors == [[16]] * 2
    assert on_all(ranks, lambda rank: rank.accept()) == [None, None]
    go_on(pool, ranks)


def _refused_accept(rank: Worker) -> list[int]:
    with pytest.raises(InvalidSlots) as error:
        rank.accept()
    return list(error.value.slots)


def test_a_tag_that_is_none_makes_no_call(pool: FreshPool, ranks: list[Worker]) -> None:
    for call in (ranks[1].allocator.alloc, ranks[1].allocator.alloc_group_begin):
        with pytest.raises((ConfigError, ValueError), match="tag"):
            call(1, tag="\n")
    go_on(pool, ranks)
