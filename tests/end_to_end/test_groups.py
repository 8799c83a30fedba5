"""Ranks of a group that die, stop, leave or are evicted, and allocators that die under them."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from daemons import SMALL_STATE, Daemon, mambapool, wait_until
from fresh_pool import FreshPool, FreshPoolFactory, ids
from groups import RemoteGroup, connect_to, join, new_name, on_all
from leased_clients import RECLAIM_S, RemoteClient, all_free, outage, restart
from processes import Children

from mambapool.pool.errors import GeometryMismatch, GroupBroken
from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED

DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


def holder(pool: FreshPool, session: int) -> dict[str, Any]:
    """A session in ``status``."""
    (found,) = [entry for entry in pool.status()["holders"] if entry["session"] == session]
    result: dict[str, Any] = found
    return result


def is_gone(pool: FreshPool, session: int) -> bool:
    return bool(holder(pool, session)["state"] == "gone")


@pytest.mark.parametrize(("dies", "guarantee"), [(0, 0), (1, 6)])
@pytest.mark.parametrize("while_no_allocator_runs", [False, True], ids=["", "in an outage"])
def test_the_slots_of_a_dead_rank_are_kept_until_all_have_ended(
    children: Children, pool: FreshPool, dies: int, guarantee: int, while_no_allocator_runs: bool
) -> None:
    group = RemoteGroup(children, pool, 3, guarantee=guarantee)
    sessions = group.sessions()
    assert group.ask("allocator.alloc(4)") == [[1, 2, 3, 4]] * 3
    held = guarantee or 4
    victim = group.ranks[dies]
    if while_no_allocator_runs:
        with outage(pool.daemon):
            victim.kill()
            assert victim.child.wait() == -signal.SIGKILL
    else:
        victim.kill()
    wait_until(lambda: is_gone(pool, sessions[dies]), "the rank is gone")
    assert holder(pool, sessions[0])["held"] == held
    others = [rank for rank in group.ranks if rank is not victim]
    for rank in others:
        kind, text = rank.ask("allocator.alloc(1)")
        assert kind == "GroupBroken", text
        assert f"group {group.name}: rank {dies} (session {victim.session}, pid {victim.pid}) died" in text
        assert "slots are kept until all its ranks have ended" in text
    # Nobody takes its place, and nobody its name.
    with pytest.raises(
        GroupBroken, match=rf"cannot be joined: rank {dies} .* has ended. Its slots are kept until"
    ):
        pool.connect(group=group.name, rank=dies, world_size=3, guarantee=guarantee)
    for rank in others[:-1]:
        rank.kill()
        wait_until(functools.partial(is_gone, pool, rank.session), "the rank is gone")
    restart(pool.daemon)
    assert pool.available == 16 - held
    assert pool.owner.allocator.alloc(16 - held + 1) is None
    others[-1].kill()
    all_free(pool)
    assert len(pool.status()["holders"]) == 1


def test_all_ranks_that_die_while_no_allocator_runs_are_one_end(children: Children, pool: FreshPool) -> None:
    group = RemoteGroup(children, pool, 2)
    group.ask("allocator.alloc(5)")
    with outage(pool.daemon):
        for rank in group.ranks:
            rank.kill()
            rank.child.wait()
    all_free(pool)
    # The name is free, and its page is another one.
    assert on_all(join(pool, 3, group=group.name), lambda rank: ids(rank.allocator.alloc(2))) == [[1, 2]] * 3


def test_ranks_that_die_before_all_have_joined_leave_nothing(children: Children, pool: FreshPool) -> None:
    group = RemoteGroup(children, pool, 3, absent=(2,), timeout=30.0)
    wait_until(lambda: len(pool.status()["holders"]) == 3, "all but one have joined")
    restart(pool.daemon)  # forgets nobody who waits
    assert len(pool.status()["holders"]) == 3
    group.ranks[0].kill()
    wait_until(lambda: len(pool.status()["holders"]) == 2, "rank 0 is gone", timeout=RECLAIM_S * 3)
    late = RemoteGroup(children, pool, 3, absent=(1,), group=group.name)
    assert len({rank.session for rank in (*group.ranks[1:], *late.ranks)}) == 3


@pytest.mark.parametrize("guarantee", [0, 8])
def test_a_step_goes_on_over_a_restart(children: Children, pool: FreshPool, guarantee: int) -> None:
    group = RemoteGroup(children, pool, 2, guarantee=guarantee, timeout=30.0)
    group.ask("allocator.alloc_group_begin(4)")
    assert group.ask("allocator.alloc(1)") == [[1], [1]]
    first, second = group.ranks
    with outage(pool.daemon):
        # One rank is ahead: it has ended its step, and asks for the next one.
        first.ask("allocator.free(torch.tensor([1]))")
        first.ask("allocator.alloc_group_end()")
        first.begin("allocator.alloc(6)")
        assert second.ask("allocator.alloc(1)") == [2]
    # The other one made another call than rank 0 did.
    kind, text = second.ask("allocator.alloc_group_end()")
    assert (kind, "rank 1 called alloc(1), rank 0 called free(slot 1)" in text) == ("RankDiverged", True), text
    first.answer()


@pytest.mark.parametrize("guarantee", [0, 8])
def test_equal_calls_over_a_restart_get_equal_answers(children: Children, pool: FreshPool, guarantee: int) -> None:
    group = RemoteGroup(children, pool, 3, guarantee=guarantee, timeout=30.0)
    group.ask("allocator.alloc_group_begin(4)")
    assert group.ask("allocator.alloc(1)") == [[1]] * 3
    with outage(pool.daemon):
        for rank in group.ranks:
            rank.begin("[allocator.alloc_group_end(), allocator.alloc(6).tolist(), allocator.available_size()]")
    answers = [rank.answer() for rank in group.ranks]
    assert answers[1] == answers[2] == answers[0]
    assert len(set(answers[0][1])) == 6
    assert answers[0][2] == (guarantee or 16) - 7
    assert group.ask("allocator.clear()") == [None] * 3
    assert group.ask("allocator.available_size()") == [guarantee or 16] * 3


def test_a_rank_that_left_has_made_its_calls(children: Children, pool: FreshPool) -> None:
    first, second = RemoteGroup(children, pool, 2).ranks
    calls = "[allocator.alloc(2).tolist(), allocator.available_size()]"
    assert first.ask(calls) == [[1, 2], 14]
    first.run("worker.close()")
    wait_until(lambda: is_gone(pool, first.session), "rank 0 has left")
    assert second.ask(calls) == [[1, 2], 14]
    kind, text = second.ask("allocator.alloc(1)")
    assert kind == "GroupBroken"
    assert "rank 0" in text
    assert "left after 2 calls" in text
    assert pool.available == 14
    second.run("worker.close()")
    all_free(pool)


def test_a_rank_that_hears_late_that_all_have_joined_follows_one_that_has_left(
    children: Children, pool: FreshPool
) -> None:
    options: dict[str, Any] = {"group": new_name(), "world_size": 2, "guarantee": 4}
    late = RemoteClient(children, pool, rank=1, timeout=30.0, **options)
    wait_until(lambda: len(pool.status()["holders"]) == 2, "it waits for rank 0")
    late.kill(signal.SIGSTOP)
    first = pool.connect(rank=0, **options)
    assert ids(first.allocator.alloc(2)) == [1, 2]
    first.close()
    late.kill(signal.SIGCONT)
    assert late.ask("allocator.alloc(2)") == [1, 2]
    assert late.ask("allocator.alloc(1)")[0] == "GroupBroken"


def test_a_stopped_rank_is_waited_for_and_then_named(children: Children, pool: FreshPool) -> None:
    first, second = RemoteGroup(children, pool, 2, timeout=1.0).ranks
    assert first.session
    assert second.session
    os.kill(first.pid, signal.SIGSTOP)
    second.begin("allocator.alloc(3)")
    assert not second.child.has_said_something()
    os.kill(first.pid, signal.SIGCONT)
    assert first.ask("allocator.alloc(3)") == [1, 2, 3]
    assert second.answer() == [1, 2, 3]
    os.kill(first.pid, signal.SIGSTOP)
    kind, text = second.ask("allocator.alloc(1)")
    assert kind == "GroupBroken"
    assert f"rank 0 (session {first.session}, pid {first.pid}) has made 1 calls" in text
    os.kill(first.pid, signal.SIGCONT)
    # Silence took nothing from it, but the others could not wait any longer.
    assert first.ask("allocator.alloc(1)")[0] == "GroupBroken"
    assert holder(pool, first.session)["held"] == 3


def test_an_operator_evicts_a_group_by_any_of_its_sessions(children: Children, pool: FreshPool) -> None:
    group = RemoteGroup(children, pool, 3)
    sessions = group.sessions()
    group.ask("allocator.alloc(5)")
    group.ranks[0].kill()
    wait_until(lambda: is_gone(pool, sessions[0]), "rank 0 is gone")
    place = ("--dir", str(pool.daemon.dir), "--json")
    refused = mambapool("evict", str(sessions[0]), *place)
    assert refused.returncode == EXIT_FAILED
    living = ", ".join(f"rank {rank} (pid {group.ranks[rank].pid})" for rank in (1, 2))
    assert f"is of group {group.name}, of which {living} live and may still write to its 5 slots" in refused.stderr
    evicted = mambapool("evict", str(sessions[0]), "--force", *place)
    assert evicted.returncode == EXIT_DONE
    assert json.loads(evicted.stdout) == {"session": sessions[0], "slots": 5, "alive": True}
    assert pool.available == 16
    for rank in group.ranks[1:]:
        kind, text = rank.ask("allocator.alloc(1)")
        assert kind in ("GroupBroken", "AllocatorUnavailable"), text
    assert len(join(pool, 2, group=group.name)) == 2


def test_each_rank_has_its_own_shard(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE, options=("--tp-size", "2"))
    ranks = connect_to(daemon, 2)
    for number, rank in enumerate(ranks):
        slots = rank.allocator.alloc(2)
        assert ids(slots) == [1, 2]
        rank.states["temporal"][:, slots] = number + 1.0
    alone = [daemon.connect(rank=rank) for rank in range(2)]
    seen = [set(worker.states["temporal"][:, [1, 2]].flatten().tolist()) for worker in alone]
    assert seen == [{1.0}, {2.0}]
    with pytest.raises(GeometryMismatch, match=r"world_size: group \S+ has 3 ranks, pool 'default' has 2 shards"):
        connect_to(daemon, 3)


def test_a_group_transfers_to_a_group(pool: FreshPool) -> None:
    prefill, decode = join(pool, 2), join(pool, 3)
    target = decode[2].session  # any of its ranks stands for the group
    for rank in prefill:
        rank.allocator.alloc(4)

    def give(rank: Any) -> None:
        rank.transfer(torch.tensor([3, 1]), to=target)

    on_all(prefill, give)
    taken = on_all(decode, lambda rank: rank.accept(timeout=5.0))
    assert [ids(slots) for slots in taken] == [[1, 3]] * 3
    assert pool.held_by(decode[0]) == {1, 3}
    assert pool.held_by(prefill[0]) == {2, 4}
    on_all(decode, lambda rank: rank.allocator.free(torch.tensor([1, 3])))
    assert on_all(decode, lambda rank: rank.allocator.available_size()) == [14] * 3


@pytest.mark.parametrize("wrong", ["own group", "nobody"])
def test_a_transfer_that_is_refused_is_refused_on_every_rank(pool: FreshPool, wrong: str) -> None:
    ranks = join(pool, 2)
    target = ranks[1].session if wrong == "own group" else 999

    def try_it(rank: Any) -> list[int]:
        slots = rank.allocator.alloc(2)
        with pytest.raises(ValueError, match="no other session of pool"):
            rank.transfer(slots, to=target)
        rank.allocator.free(slots)  # still its own
        return ids(rank.allocator.alloc(1))

    answers = on_all(ranks, try_it)
    assert answers[0] == answers[1]
    assert on_all(ranks, lambda rank: rank.accept()) == [None, None]


def test_slots_that_came_by_a_transfer_go_back_from_a_guarantee(pool: FreshPool) -> None:
    giver = pool.connect()
    slots = giver.allocator.alloc(3)
    assert slots is not None
    ranks = join(pool, 2, guarantee=5)
    giver.transfer(slots, to=ranks[0].session)
    assert [ids(taken) for taken in on_all(ranks, lambda rank: rank.accept(5.0))] == [[1, 2, 3]] * 2
    ranks[0].allocator.free(torch.tensor([1, 2]))
    pool.settle()
    assert pool.available == 8  # the other rank may still write to them
    ranks[1].allocator.free(torch.tensor([1, 2]))
    wait_until(lambda: pool.available == 10, "two slots have come back")
    assert on_all(ranks, lambda rank: rank.allocator.available_size()) == [5, 5]
    on_all(ranks, lambda rank: rank.allocator.clear())
    wait_until(lambda: pool.available == 11, "all that were transferred have come back")


def test_a_pool_of_which_a_rank_has_left_can_be_audited(pool: FreshPool) -> None:
    before = pool.daemon.allocator_pid
    ranks = join(pool, 2)
    on_all(ranks, lambda rank: rank.allocator.alloc(3))
    ranks[1].close()
    states = {holder["rank"]: holder["state"] for holder in pool.status()["holders"] if holder["group"]}
    assert states == {0: "live", 1: "gone"}
    pool.daemon.audit(pool.name)
    assert (pool.held_by(ranks[0]), pool.daemon.allocator_pid) == ({1, 2, 3}, before)
