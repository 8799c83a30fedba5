"""Field cases as groups meet them: leaks, composite owners, two releasers, check and then act."""

from __future__ import annotations

import gc
import json

import pytest
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain
from groups import RemoteGroup, join, new_name, on_all
from leased_clients import RECLAIM_S, RemoteClient, all_free
from processes import Children

from mambapool.client import Worker
from mambapool.pool.errors import DoubleFree


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(64)


@pytest.mark.parametrize("guarantee", [0, 50])
def test_forgotten_slots_are_named_as_the_groups_and_come_back_with_its_end(
    pool: FreshPool, guarantee: int
) -> None:
    """A request aborted while it waits keeps its slot."""
    ranks = join(pool, 2, guarantee=guarantee)

    def serve(rank: Worker) -> None:
        slots = [rank.allocator.alloc(1) for _ in range(40)]
        for slot in slots[:20]:
            assert slot is not None
            rank.allocator.free(slot)

    on_all(ranks, serve)
    gc.collect()
    wait_until(lambda: pool.available == 64 - (guarantee or 20), "what was freed is free")
    holder = pool.holder(ranks[0])
    assert (holder["held"], holder["state"], holder["group"]) == (
        guarantee or 20,
        "live",
        pool.holder(ranks[1])["group"],
    )
    if not guarantee:
        assert pool.held_by(ranks[0]) == set(range(21, 41))
    for rank in ranks:
        rank.close()
    all_free(pool)
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 65))


def test_ranks_that_end_without_freeing_give_back_all_three(children: Children, pool: FreshPool) -> None:
    """Session close returns one slot of three."""
    for _ in range(2):
        group = RemoteGroup(children, pool, 2)
        assert group.ask("[allocator.alloc(1).tolist(), allocator.alloc(2).tolist()]") == [[[1], [2, 3]]] * 2
        assert pool.available == 61
        for rank in group.ranks:
            rank.child.say_no_more()
            assert rank.child.wait() == 0
        all_free(pool, within=RECLAIM_S)


@pytest.mark.parametrize("guarantee", [0, 32])
def test_two_ranks_that_free_the_same_slots_free_them_once(pool: FreshPool, guarantee: int) -> None:
    """Prefill and chunk path both free."""
    ranks = join(pool, 2, guarantee=guarantee)
    size = guarantee or 64

    def rounds(rank: Worker) -> list[int]:
        seen = []
        for _ in range(100):
            slots = rank.allocator.alloc(8)
            assert slots is not None
            rank.allocator.free(slots)
            with pytest.raises(DoubleFree):
                rank.allocator.free(slots)
            seen.append(rank.allocator.available_size())
        return seen

    assert on_all(ranks, rounds) == [[size] * 100] * 2
    wait_until(lambda: pool.available == 64 - guarantee, "all are free")


_CHECK_THEN_ACT = """
    import json, random, sys, time
    from mambapool.client import connect

    directory, options, seed = json.loads(sys.argv[1])
    worker = connect(directory, timeout=30.0, **options)
    chance, nothing, sizes = random.Random(seed), 0, []
    print("attached", flush=True)
    sys.stdin.readline()
    while len(sizes) < 60 or (nothing < 5 and len(sizes) < 600):
        wanted = min(worker.allocator.available_size(), 8)
        if not wanted:
            time.sleep(0.0005)
            continue
        time.sleep(chance.uniform(0, 0.002))
        slots = worker.allocator.alloc(wanted)
        if slots is None:
            nothing += 1
            sizes.append(0)
            continue
        assert len(slots) == wanted
        sizes.append(wanted)
        time.sleep(chance.uniform(0, 0.003))
        worker.allocator.free(slots)
    print(json.dumps([nothing, sizes]), flush=True)
"""


def test_what_looked_free_and_was_taken_is_none_on_every_rank(
    children: Children, new_pool: FreshPoolFactory
) -> None:
    """Looked free, was taken."""
    pool = new_pool(12)
    ranks = []
    for engine in range(3):
        group = new_name()
        for number in range(2):
            options = {
                "group": group,
                "rank": number,
                "world_size": 2,
                "pool": pool.name,
                "name": f"{group}-{number}",
            }
            ranks.append(children.start(_CHECK_THEN_ACT, json.dumps([str(pool.daemon.dir), options, engine])))
    assert {rank.hear() for rank in ranks} == {"attached"}
    for child in ranks:
        child.say("go")
    told = [json.loads(rank.hear()) for rank in ranks]
    assert told[::2] == told[1::2]
    assert sum(nothing for nothing, _ in told[::2]) >= 5
    for child in ranks:
        assert child.wait() == 0
    all_free(pool)


def test_a_group_and_sessions_of_their_own_share_a_pool(children: Children, pool: FreshPool) -> None:
    """Nobody's slot is anybody else's, whoever dies."""
    alone = RemoteClient(children, pool)
    group = RemoteGroup(children, pool, 2)
    taken = alone.ask("allocator.alloc(10)")
    shared = group.ask("allocator.alloc(20)")[0]
    assert not set(taken) & set(shared)
    alone.kill()
    wait_until(lambda: pool.available == 44, "the dead one's slots are free")
    assert pool.held_by(group.ranks[0].session) == set(shared)
    assert group.ask("allocator.free(torch.tensor(allocator.alloc(44).tolist()))") == [None, None]
    wait_until(lambda: pool.available == 44, "they are free again")
