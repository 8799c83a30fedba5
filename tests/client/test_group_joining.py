"""Joining a group: a barrier that names who is missing, and refusals that name the first and what differs."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, ids
from groups import join, new_name, on_all
from leased_clients import RemoteClient, waits
from processes import Children

from mambapool.client import connect
from mambapool.client.operators import evict
from mambapool.pool.errors import (
    AllocatorUnavailable,
    ConfigError,
    GeometryMismatch,
    GroupBroken,
    GuaranteeExceeded,
    MambaPoolError,
)
from mambapool.pool.slot_table import SlotTableReader


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(16)


def pages(pool: FreshPool) -> list[str]:
    """The group pages that there are."""
    return sorted(path.name for path in pool.daemon.dir.glob(f"{pool.name}.group-*"))


def test_who_is_missing_is_named_after_the_timeout(pool: FreshPool) -> None:
    group = new_name()
    began = time.monotonic()
    with pytest.raises(
        GroupBroken, match=rf"group {group}: rank 1 of 4 joined, ranks 0, 2, 3 did not within 0\.[34]"
    ):
        pool.connect(group=group, rank=1, world_size=4, timeout=0.3)
    assert time.monotonic() - began < 0.8
    # Nothing is left of it: another engine may have the name, in another size.
    wait_until(lambda: len(pool.status()["holders"]) == 1, "the rank has gone")
    assert pages(pool) == []
    assert len(join(pool, 2, group=group)) == 2


def test_a_rank_may_take_the_place_of_one_that_gave_up(pool: FreshPool) -> None:
    group = new_name()
    ranks: list[Any] = []
    waiting = threading.Thread(
        target=lambda: ranks.append(pool.connect(group=group, rank=0, world_size=2, timeout=10.0))
    )
    waiting.start()
    wait_until(lambda: len(pool.status()["holders"]) == 2, "rank 0 has joined")
    # Of another group: two that wait do not mix.
    with pytest.raises(GroupBroken, match="did not"):
        pool.connect(group=new_name(), rank=1, world_size=2, timeout=0.1)
    ranks.append(pool.connect(group=group, rank=1, world_size=2))
    waiting.join()
    assert on_all(ranks, lambda rank: ids(rank.allocator.alloc(2))) == [[1, 2]] * 2


def test_two_processes_with_one_rank_are_refused_naming_the_first(pool: FreshPool) -> None:
    group = new_name()
    first, _ = join(pool, 2, group=group)
    named = rf"rank 0 of group {group} is taken, by rank 0 \(rank-0, session {first.session}, pid {os.getpid()}\)"
    with pytest.raises(GroupBroken, match=named):
        pool.connect(group=group, rank=0, world_size=2, name="second-job")
    # The first goes on.
    assert first.allocator.alloc(1) is not None


def joining(pool: FreshPool, rank: int, found: list[Any], **options: Any) -> threading.Thread:
    """Attach as that rank in a thread; what comes of it, a worker or an error, is put into ``found``."""

    def attach() -> None:
        try:
            found.append(pool.connect(rank=rank, **options))
        except MambaPoolError as error:
            found.append(error)

    thread = threading.Thread(target=attach)
    thread.start()
    return thread


def is_there(pool: FreshPool, rank: int, group: str) -> bool:
    return any((holder["rank"], holder["group"]) == (rank, group) for holder in pool.status()["holders"])


@pytest.mark.parametrize("evicted", [False, True])
def test_nobody_begins_before_the_rank_0_that_took_anothers_place_has_its_guarantee(
    pool: FreshPool, children: Children, evicted: bool
) -> None:
    options: dict[str, Any] = {"group": new_name(), "world_size": 3, "guarantee": 4, "timeout": 20.0}
    gone = RemoteClient(children, pool, rank=0, **options)
    wait_until(lambda: pool.status()["held"] == 4, "rank 0 has its guarantee")
    others: list[Any] = []
    threads = [joining(pool, 1, others, **options)]
    wait_until(lambda: is_there(pool, 1, options["group"]), "rank 1 has joined")
    if evicted:
        (session,) = [holder["session"] for holder in pool.status()["holders"] if holder["held"]]
        evict(pool.daemon.directory, 5.0, session, force=True)
    else:
        gone.kill()
    wait_until(lambda: not is_there(pool, 0, options["group"]), "rank 0 has gone")
    taken = pool.owner.allocator.alloc(13)
    assert taken is not None
    threads.append(joining(pool, 2, others, **options))
    wait_until(lambda: is_there(pool, 2, options["group"]), "rank 2 has joined")
    first: list[Any] = []
    threads.append(joining(pool, 0, first, **options))
    waits(pool, 4)
    assert pool.status()["held"] == 13
    assert (first, others) == ([], [])
    pool.owner.allocator.free(taken)
    for thread in threads:
        thread.join()
    ranks = [*first, *others]
    assert [rank.allocator.size for rank in ranks] == [4, 4, 4]
    assert len({tuple(got) for got in on_all(ranks, lambda rank: ids(rank.allocator.alloc(4)))}) == 1


def test_a_rank_that_is_evicted_while_it_waits_for_the_others_is_told_so(pool: FreshPool) -> None:
    found: list[Any] = []
    options: dict[str, Any] = {"group": new_name(), "world_size": 2}
    thread = joining(pool, 1, found, timeout=20.0, **options)
    wait_until(lambda: is_there(pool, 1, options["group"]), "rank 1 has joined")
    (session,) = [holder["session"] for holder in pool.status()["holders"] if holder["group"]]
    began = time.monotonic()
    evict(pool.daemon.directory, 5.0, session, force=True)
    thread.join()
    assert time.monotonic() - began < 5.0
    assert isinstance(found[0], AllocatorUnavailable)
    assert f"session {session} was ended by the allocator, by `mambapool evict`" in str(found[0])


def test_a_guarantee_that_the_table_does_not_show_whole_is_refused(
    pool: FreshPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = SlotTableReader.granted
    monkeypatch.setattr(SlotTableReader, "granted", lambda *arguments: granted(*arguments)[1:])
    options: dict[str, Any] = {"group": new_name(), "world_size": 2, "guarantee": 4}
    first: list[Any] = []
    thread = joining(pool, 0, first, **options)
    with pytest.raises(GroupBroken, match=r"its guarantee is 4 slots, and rank 0, session \d+, holds 3 of them"):
        pool.connect(rank=1, **options)
    thread.join()


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "world_size": ({"world_size": 3}, r"world_size: rank 1 \(late, pid {pid}\) has 3, .* has 2"),
    "guarantee": ({"guarantee": 5}, r"guarantee: rank 1 \(late, pid {pid}\) has 5, .* has 4"),
    "limit": ({"limit": 9}, r"limit: rank 1 \(late, pid {pid}\) has 9, .* has 8"),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_ranks_that_differ_are_refused_naming_the_field_and_both(pool: FreshPool, field: str) -> None:
    group = new_name()
    options = {"group": group, "world_size": 2, "guarantee": 4, "limit": 8}
    different, text = DIFFERENT[field]
    errors: list[GroupBroken] = []

    def wait_alone() -> None:
        with pytest.raises(GroupBroken) as error:
            pool.connect(rank=0, name="first", timeout=1.0, **options)
        errors.append(error.value)

    waiting = threading.Thread(target=wait_alone)
    waiting.start()
    wait_until(lambda: len(pool.status()["holders"]) == 2, "rank 0 has joined")
    pattern = text.format(pid=os.getpid()).replace(
        ".*", rf"group {group} of rank 0 \(first, session \d+, pid \d+\)"
    )
    with pytest.raises(GeometryMismatch, match=pattern):
        pool.connect(rank=1, name="late", **{**options, **different})
    waiting.join()
    assert "rank 0 of 2 joined, rank 1 did not" in str(errors[0])


@pytest.mark.parametrize("expected", ["slots", "create_slots"])
def test_ranks_with_different_capacity_are_refused_naming_both(pool: FreshPool, expected: str) -> None:
    with pytest.raises(GeometryMismatch, match=rf"{expected}: expected 12.*has 16 slots"):
        join(pool, 2, **{expected: 12})


def test_a_guarantee_counts_once_for_the_group(pool: FreshPool) -> None:
    ranks = join(pool, 3, guarantee=10)
    assert [rank.allocator.size for rank in ranks] == [10, 10, 10]
    assert [rank.allocator.available_size() for rank in ranks] == [10, 10, 10]
    assert pool.held_by(ranks[0]) == set(range(1, 11))
    with pytest.raises(GuaranteeExceeded, match="guaranteed are 10: rank-0"):
        pool.connect(guarantee=7)
    assert pool.available == 6


def test_a_guarantee_that_is_not_free_yet_is_named_by_who_waits_for_it(pool: FreshPool) -> None:
    taken = pool.owner.allocator.alloc(10)
    group = new_name()

    def attach(rank: int) -> str:
        with pytest.raises(Exception, match=r"guarantee|no answer|ended|died") as error:
            connect(
                pool.daemon.dir, pool.name, group=group, rank=rank, world_size=2, guarantee=8, timeout=0.3 + rank
            )
        return str(error.value)

    texts: dict[int, str] = {}
    threads = [threading.Thread(target=lambda r=rank: texts.update({r: attach(r)})) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "rank 0" in texts[1]
    assert taken is not None
    pool.owner.allocator.free(taken)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group": "g", "rank": 2, "world_size": 2}, "rank 2 is out of range: group g has ranks 0 to 1"),
        ({"group": "g", "rank": -1, "world_size": 2}, "rank must be a whole number from 0 to 65536, not -1"),
        ({"group": "g", "rank": 0, "world_size": 0}, "world_size must be a whole number from 1 to 256, not 0"),
        ({"group": "g", "rank": 0, "world_size": 257}, "world_size must be a whole number from 1 to 256, not 257"),
        ({"group": "a b", "rank": 0, "world_size": 2}, "group name 'a b'"),
        ({"group": "", "rank": 0, "world_size": 2}, "group name ''"),
        ({"group": "g" * 49, "rank": 0, "world_size": 2}, "group name"),
        ({"rank": 0, "world_size": 2}, "world_size=2 needs group=NAME"),
    ],
)
def test_options_that_make_no_group_are_refused_before_anything_is_sent(
    pool: FreshPool, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        pool.connect(**options)
    assert len(pool.status()["holders"]) == 1


def test_the_page_goes_with_the_group(pool: FreshPool) -> None:
    ranks = join(pool, 2)
    assert len(pages(pool)) == 1
    for rank in ranks:
        assert len(pages(pool)) == 1
        rank.close()
    assert pages(pool) == []
    assert pool.available == 16
