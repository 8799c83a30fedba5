"""A dead process's slots on a GPU are kept back until it has ended and the quarantine is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from dispatching import hello_map, make_pool, make_registry
from leases import TestLeases
from msgpack import packb, unpackb

from mambapool.pool import group_page as gp
from mambapool.pool.descriptor import CUDA_IPC, SHM
from mambapool.pool.errors import AllocatorUnavailable, GuaranteeExceeded, InvalidSlots
from mambapool.service.attach import AttachRequest
from mambapool.service.audit import snapshot
from mambapool.service.audit_checks import violations
from mambapool.service.audited import AuditedPool
from mambapool.service.pool_report import pool_status
from mambapool.service.pools import Pool, Shard
from mambapool.service.quarantine import UNSEEN_END_S
from mambapool.service.recovery import restore
from mambapool.service.registry import Registry
from mambapool.service.sessions import GUARANTEE_REQUEST, Session
from mambapool.service.table_writer import SlotTableWriter

LEASE = b"a".ljust(16, b".")
RANKS = [b"rank-0".ljust(16, b"."), b"rank-1".ljust(16, b".")]


def wants(lease: bytes = LEASE, **changes: object) -> AttachRequest:
    return AttachRequest.from_wire(hello_map(lease, **changes))


def pool_on(directory: Path, backend: str) -> Pool:
    return make_pool(directory, 8, shards=[Shard("keeper-default-0.sock", bytes(16), backend)])


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return pool_on(tmp_path, CUDA_IPC)


@pytest.fixture
def leases() -> TestLeases:
    return TestLeases()


@pytest.fixture
def registry(tmp_path: Path, pool: Pool, leases: TestLeases) -> Registry:
    return make_registry(tmp_path, pool, leases=leases)


def holder_of(registry: Registry, pool: Pool, count: int = 3, guarantee: int = 0) -> Session:
    session, _ = registry.attach(wants(guarantee=guarantee), b"1")
    pool.grant(session, count, 2)
    pool.commit()
    return session


def die(
    registry: Registry, leases: TestLeases, now: float, *, ended: bool | None = True, lease: bytes = LEASE
) -> None:
    leases.dead.add(lease)
    leases.ended[lease] = ended
    registry.bury(lease, "its process ended", now)


def test_slots_of_the_dead_are_counted_as_quarantined_until_the_time_is_over(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    holder_of(registry, pool)
    die(registry, leases, now=100.0)
    status = pool_status(pool, 100.0)
    assert [status[key] for key in ("free", "held", "quarantined")] == [5, 0, 3]
    (holder,) = status["holders"]
    assert (holder["state"], holder["held"], holder["quarantined"]) == ("gone", 0, 3)
    assert registry.release_quarantined(100.9) == set()
    registry.bury(LEASE, "the sweep found its lock released", 100.9)
    assert registry.release_quarantined(101.0) == {pool}
    assert (pool.ledger.free_count, pool_status(pool, 101.0)["holders"], leases.open_names) == (8, [], set())
    registry.check()


def test_a_process_that_has_not_ended_keeps_them_however_long_it_takes(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    holder_of(registry, pool)
    die(registry, leases, now=100.0, ended=False)
    assert registry.release_quarantined(10_000.0) == set()
    leases.ended[LEASE] = True
    assert registry.release_quarantined(10_000.0) == {pool}


def test_where_nobody_can_see_the_end_it_takes_half_a_minute(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    holder_of(registry, pool)
    die(registry, leases, now=100.0, ended=None)
    assert registry.release_quarantined(100.0 + UNSEEN_END_S - 0.1) == set()
    assert registry.release_quarantined(100.0 + UNSEEN_END_S) == {pool}


def test_memory_of_the_host_is_free_at_once_and_so_is_nothing(tmp_path: Path, leases: TestLeases) -> None:
    pool = pool_on(tmp_path, SHM)
    registry = make_registry(tmp_path, pool, leases=leases)
    holder_of(registry, pool)
    die(registry, leases, now=100.0)
    assert pool.ledger.free_count == 8


def test_one_that_held_nothing_is_gone_at_once(registry: Registry, pool: Pool, leases: TestLeases) -> None:
    registry.attach(wants(), b"1")
    die(registry, leases, now=100.0, ended=False)
    assert pool_status(pool, 100.0)["holders"] == []


def test_windows_and_offers_of_the_dead_end_with_it(registry: Registry, pool: Pool, leases: TestLeases) -> None:
    dead = holder_of(registry, pool)
    other, _ = registry.attach(wants(b"b" * 16), b"2")
    pool.grant(other, 2, 2)
    pool.open_window(dead, 2)
    pool.commit()
    pool.offers.make(dead, pool.ledger.held_by(dead.number)[:1], other.number, 100)
    pool.offers.make(other, pool.ledger.held_by(other.number), dead.number, 101)
    die(registry, leases, now=100.0)
    assert pool.offers.accept(other, 9) is None
    assert pool.windows() == {}
    status = pool_status(pool, 100.0)
    assert [status[key] for key in ("free", "held", "windows", "offered", "quarantined")] == [3, 2, 0, 0, 3]
    registry.check()


def test_the_dead_cannot_come_back_and_are_evicted_only_by_force(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    holder_of(registry, pool)
    die(registry, leases, now=100.0, ended=False)
    with pytest.raises(AllocatorUnavailable, match="is dead, its lease was released"):
        registry.attach(wants(), b"3")
    registry.end(next(iter(registry.sessions.values())), "was evicted", dead=True)
    assert registry.release_quarantined(10_000.0) == set()
    assert pool.ledger.free_count == 8


def test_a_guarantee_in_quarantine_is_promised_to_the_next_one(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    holder_of(registry, pool, 8, guarantee=8)
    with pytest.raises(GuaranteeExceeded):
        registry.attach(wants(b"b" * 16, guarantee=8), b"2")
    die(registry, leases, now=100.0)
    assert registry.attach(wants(b"b" * 16, guarantee=8), b"2")[0].guarantee == 8


def test_nothing_can_be_offered_to_the_dead(registry: Registry, pool: Pool, leases: TestLeases) -> None:
    dead = holder_of(registry, pool)
    other, _ = registry.attach(wants(b"b" * 16), b"2")
    pool.grant(other, 2, 2)
    pool.commit()
    die(registry, leases, now=100.0, ended=False)
    with pytest.raises(InvalidSlots, match="is no other session"):
        pool.offers.make(other, pool.ledger.held_by(other.number), dead.number, 102)


def test_the_audit_counts_them_as_quarantined(registry: Registry, pool: Pool, leases: TestLeases) -> None:
    dead, _ = registry.attach(wants(guarantee=8), b"1")
    pool.grant(dead, 8, GUARANTEE_REQUEST)
    pool.commit()
    die(registry, leases, now=100.0, ended=False)
    registry.attach(wants(b"b" * 16, guarantee=8), b"2")  # promised, and waits for the quarantine to be over
    found = AuditedPool(unpackb(packb(snapshot(pool, 101.0))))
    found.holders[2]["waits"] = True
    assert violations(found) == []
    assert found.counts() == {"free": 0, "held": 0, "windows": 0, "offered": 0, "quarantined": 8}
    assert {(holding.kind, holding.state) for holding in found.holdings()} == {("quarantined", "gone")}


def ranks_of(registry: Registry, pool: Pool) -> list[Session]:
    """A group of two, each with a shard, whose slots rank 0 holds."""
    pool.shards = (*pool.shards, Shard("keeper-default-1.sock", bytes(16), CUDA_IPC))
    ranks = [
        registry.attach(wants(lease, group="engine", world_size=2, rank=rank), b"%d" % rank)[0]
        for rank, lease in enumerate(RANKS)
    ]
    pool.grant(ranks[0], 3, 2)
    pool.commit()
    return ranks


def test_a_groups_slots_stay_back_until_the_quarantine_of_its_last_rank_is_over(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    """Which holds no slot by itself, and has a shard of each."""
    first, second = ranks_of(registry, pool)
    registry.end(first, "left", dead=False)
    die(registry, leases, now=100.0, ended=False, lease=RANKS[1])
    assert (pool.ledger.free_count, second.dead_since) == (5, 100.0)
    assert registry.release_quarantined(102.0) == set()  # its process has not ended
    leases.ended[RANKS[1]] = True
    assert registry.release_quarantined(102.0) == {pool}
    assert (pool.ledger.free_count, pool.groups, pool.sessions) == (8, {}, {})


def test_the_other_ranks_hear_of_a_death_before_its_quarantine_is_over_and_keep_the_slots_after_it(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    first, second = ranks_of(registry, pool)
    assert first.group is not None
    page = first.group.page
    die(registry, leases, now=100.0, lease=RANKS[0])
    assert (page.word(0, gp.R_END), page.word(1, gp.R_END)) == (gp.DIED, 0)
    assert registry.release_quarantined(102.0) == {pool}
    assert (pool.ledger.free_count, first.gone) == (5, True)
    registry.end(second, "left", dead=False)
    assert (pool.ledger.free_count, pool.groups) == (8, {})


def test_a_rank_that_died_before_all_have_joined_is_named_to_those_that_then_have(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    """Its guarantee is kept back, and with it its place."""
    options = {"group": "engine", "world_size": 2, "guarantee": 3}
    pool.shards = (*pool.shards, Shard("keeper-default-1.sock", bytes(16), CUDA_IPC))
    first, _ = registry.attach(wants(RANKS[0], rank=0, **options), b"0")
    pool.grant(first, 3, GUARANTEE_REQUEST)
    pool.commit()
    die(registry, leases, now=100.0, lease=RANKS[0])
    assert first.group is not None
    page = first.group.page
    assert page.word(0, gp.R_END) == 0
    registry.attach(wants(RANKS[1], rank=1, **options), b"1")
    assert (page.word(0, gp.R_END), page.items[gp.H_TROUBLE]) == (gp.DIED, 1)


def test_a_group_on_gpus_of_which_all_have_died_is_quarantined_by_the_next_allocator(
    tmp_path: Path, registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    ranks_of(registry, pool)
    leases.dead.update(RANKS)
    table = SlotTableWriter.recover(pool.table.path)
    again = Pool("default", table, pool.uuid, None, pool.shards, ends_with_last_session=False)
    restore(again, leases, 500.0)
    next_registry = make_registry(tmp_path, again, leases=leases)
    leases.ended.update(dict.fromkeys(RANKS))
    assert next_registry.release_quarantined(501.0) == set()
    assert next_registry.release_quarantined(500.0 + UNSEEN_END_S) == {again}
    assert (again.ledger.free_count, again.groups) == (8, {})


def test_an_allocator_that_is_restarted_keeps_the_quarantine(
    tmp_path: Path, registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    holder_of(registry, pool)
    die(registry, leases, now=100.0)
    table = SlotTableWriter.recover(pool.table.path)
    again = Pool("default", table, pool.uuid, None, pool.shards, ends_with_last_session=False)
    restore(again, leases, 500.0)
    next_registry = make_registry(tmp_path, again, leases=leases)
    assert pool_status(again, 500.0)["quarantined"] == 3
    leases.ended[LEASE] = None  # the pidfd was the earlier allocator's
    assert next_registry.release_quarantined(500.0 + UNSEEN_END_S) == {again}
    assert again.ledger.free_count == 8
