from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dispatching import hello_map, make_pool, make_registry
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool.errors import (
    AllocatorUnavailable,
    GeometryMismatch,
    GuaranteeExceeded,
    PoolLost,
    ProtocolError,
    RuntimeDirError,
    UnknownPool,
)
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.service.attach import AttachRequest
from mambapool.service.pools import Pool, Shard
from mambapool.service.registry import Registry
from mambapool.service.sessions import Session

GEOMETRY = Geometry((TensorSpec.parse("conv=bfloat16:4x96x3"), TensorSpec.parse("temporal=float32:4x2x16x8")))


def lease_name(short: str) -> bytes:
    return short.encode().ljust(16, b".")


def wants(lease: str = "a", **changes: Any) -> AttachRequest:
    return AttachRequest.from_wire(hello_map(lease_name(lease), **changes))


def attach(registry: Registry, request: AttachRequest, identity: bytes = b"1") -> Session:
    return registry.attach(request, identity)[0]


def leave(registry: Registry, session: Session) -> None:
    registry.end(session, "left", dead=False)


@pytest.fixture
def states(tmp_path: Path) -> Registry:
    """One pool named default of 8 slots with two tensors on two ranks, and an allocator-only one."""
    shards = [Shard(f"keeper-default-{rank}.sock", bytes([rank]) * 16) for rank in range(2)]
    return make_registry(
        tmp_path, make_pool(tmp_path, 8, geometry=GEOMETRY, shards=shards), make_pool(tmp_path, 4, "bare")
    )


def test_sessions_are_numbered_and_a_number_is_never_used_twice(registry: Registry) -> None:
    first = attach(registry, wants("a"))
    second = attach(registry, wants("b"), b"2")
    leave(registry, first)
    third = attach(registry, wants("a"))
    assert [first.number, second.number, third.number] == [1, 2, 3]
    assert third.row == first.row
    assert list(registry.sessions) == [2, 3]


def test_a_lease_has_one_session_however_often_it_attaches(registry: Registry) -> None:
    first, made = registry.attach(wants("a"), b"1")
    assert made
    assert registry.attach(wants("a", resume=1), b"2") == (first, False)
    assert first.identity == b"2"
    assert len(registry.sessions) == 1


def test_a_lease_stays_with_its_pool(registry: Registry) -> None:
    attach(registry, wants("a"))
    with pytest.raises(ProtocolError, match="this lease is attached to pool 'default'"):
        attach(registry, wants("a", pool="other", create_slots=4))
    assert sorted(registry.pools) == ["default"]


def test_a_session_that_is_not_known_here_cannot_be_resumed(registry: Registry) -> None:
    with pytest.raises(AllocatorUnavailable, match=r"session 12 is not known here.*connect again"):
        attach(registry, wants(resume=12))
    assert not registry.sessions


def test_nobody_new_is_taken_while_the_allocator_ends(registry: Registry) -> None:
    known = attach(registry, wants("a"))
    registry.ending = True
    with pytest.raises(AllocatorUnavailable, match="ending"):
        attach(registry, wants("b"), b"2")
    assert attach(registry, wants("a"), b"2") is known


def test_a_session_too_many_is_refused_and_leaves_nothing(registry: Registry, pool: Pool) -> None:
    for lease in "abcd":
        attach(registry, wants(lease))
    with pytest.raises(AllocatorUnavailable, match="all 4 sessions"):
        attach(registry, wants("e"))
    assert len(registry.sessions) == len(pool.sessions) == 4
    leave(registry, registry.sessions[1])
    assert attach(registry, wants("e")).number == 5


def test_a_pool_that_a_client_makes_ends_with_its_last_session(registry: Registry, tmp_path: Path) -> None:
    first = attach(registry, wants("a", pool="mine", create_slots=5))
    second = attach(registry, wants("b", pool="mine", create_slots=5), b"2")
    third = attach(registry, wants("c", pool="mine"), b"3")
    assert first.pool is second.pool is third.pool
    assert (first.pool.slots, first.pool.shards) == (5, ())
    for session in (second, first):
        leave(registry, session)
        assert (tmp_path / "mine.table").exists()
    leave(registry, third)
    assert sorted(registry.pools) == ["default"]
    assert not (tmp_path / "mine.table").exists()


def test_a_configured_pool_stays_without_sessions(registry: Registry, tmp_path: Path) -> None:
    leave(registry, attach(registry, wants("a", create_slots=16)))
    assert sorted(registry.pools) == ["default"]
    assert (tmp_path / "default.table").exists()


def test_a_pool_that_ended_can_be_made_anew_with_another_size(registry: Registry) -> None:
    leave(registry, attach(registry, wants("a", pool="mine", create_slots=5)))
    assert attach(registry, wants("a", pool="mine", create_slots=6)).pool.slots == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"guarantee": 9},
        {"lease": lease_name("nobody's")},
        {"slots": 4},
    ],
    ids=["guarantee", "lease", "expectation"],
)
def test_a_refused_session_leaves_neither_the_pool_nor_the_lease_that_it_came_with(
    registry: Registry, leases: TestLeases, tmp_path: Path, changes: dict[str, Any]
) -> None:
    leases.dead.add(lease_name("nobody's"))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    fields = {**hello_map(lease_name("a"), pool="made", create_slots=8), **changes}
    with pytest.raises((GuaranteeExceeded, ProtocolError, GeometryMismatch)):
        attach(registry, AttachRequest.from_wire(fields))
    assert set(registry.pools) == {"default"}
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert not leases.open_names
    made = attach(registry, wants(pool="made", create_slots=16))
    assert made.pool.slots == 16


def test_a_group_that_cannot_have_its_page_leaves_no_pool(
    registry: Registry, leases: TestLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise RuntimeDirError("no space left")

    monkeypatch.setattr("mambapool.service.registry.new_group", full)
    with pytest.raises(RuntimeDirError):
        attach(registry, wants(pool="made", create_slots=8, group="engine", rank=0, world_size=2))
    assert set(registry.pools) == {"default"}
    assert not leases.open_names


def test_an_unknown_pool_is_refused_with_the_names_of_those_that_are_served(states: Registry) -> None:
    with pytest.raises(UnknownPool, match="there is no pool 'mine'; pools here: bare, default"):
        attach(states, wants(pool="mine"))


def test_an_allocator_without_pools_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownPool, match="none; a client can make one with create_slots=N"):
        attach(make_registry(tmp_path), wants())


def test_a_pool_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    registry = make_registry(tmp_path / "missing")
    with pytest.raises(RuntimeDirError):
        attach(registry, wants(create_slots=4))
    assert not registry.pools
    assert not registry.sessions


MISMATCHES = [
    ({"slots": 9}, "slots: expected 9, pool 'default' has 8 slots"),
    ({"create_slots": 9}, "create_slots: expected 9, pool 'default' has 8 slots"),
    ({"rank": 2}, "rank: expected 2, pool 'default' has shards for ranks 0 to 1"),
    ({"expect": [["conv", "float16", [4, 96, 3]]]}, "tensor conv, dtype: expected float16, the pool has bfloat16"),
    (
        {"expect": [["conv", "bfloat16", [4, 96, 3]], ["temporal", "float32", [4, 2, 8, 16]]]},
        "tensor temporal, shape: expected [4, 2, 8, 16], the pool has [4, 2, 16, 8] "
        "(layers first, without the slot dimension)",
    ),
    (
        {"expect": [["ssm", "float32", [4, 2, 16, 8]]]},
        "tensor ssm: expected float32 [4, 2, 16, 8], pool 'default' has conv, temporal",
    ),
    (
        {"pool": "bare", "expect": [["conv", "bfloat16", [4, 96, 3]]]},
        "tensor conv: expected bfloat16 [4, 96, 3], pool 'bare' has no tensors: it is allocator-only",
    ),
    ({"pool": "new", "create_slots": 4, "slots": 5}, "slots: expected 5, pool 'new' has 4 slots"),
]


@pytest.mark.parametrize(("changes", "text"), MISMATCHES)
def test_another_pool_than_expected_is_refused_with_the_field_and_both_values(
    states: Registry, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(GeometryMismatch) as caught:
        attach(states, wants(**changes))
    assert str(caught.value) == text
    assert not states.sessions
    assert sorted(states.pools) == ["bare", "default"]


def test_what_is_expected_may_be_what_is_there(states: Registry) -> None:
    expect = [["temporal", "float32", [4, 2, 16, 8]], ["conv", "bfloat16", [4, 96, 3]]]
    session = attach(states, wants(slots=8, rank=1, expect=expect))
    assert session.rank == 1


def test_a_session_is_described_with_its_pool(states: Registry) -> None:
    session = attach(states, wants())
    assert states.describe(session) == {
        "session": 1,
        "row": 0,
        "applied": 0,
        "slots": 8,
        "limit": 8,
        "guarantee": 0,
        "uuid": bytes(range(16)),
        "geometry": GEOMETRY.to_wire(),
        "table": "default.table",
        "shards": [["keeper-default-0.sock", bytes(16)], ["keeper-default-1.sock", b"\1" * 16]],
    }
    bare = attach(states, wants("b", pool="bare"), b"2")
    assert (states.describe(bare)["geometry"], states.describe(bare)["shards"]) == (None, [])


def test_the_longest_message_follows_the_largest_pool(registry: Registry) -> None:
    assert registry.max_body_bytes == protocol.max_body_bytes(16)
    session = attach(registry, wants(pool="large", create_slots=1000))
    assert registry.max_body_bytes == protocol.max_body_bytes(1000)
    leave(registry, session)
    assert registry.max_body_bytes == protocol.max_body_bytes(16)


# Leases.


def test_a_lease_is_looked_after_from_hello_to_the_sessions_end(registry: Registry, leases: TestLeases) -> None:
    session = attach(registry, wants("a"))
    attach(registry, wants("b"))
    assert leases.open_names == {lease_name("a"), lease_name("b")}
    leave(registry, session)
    assert leases.open_names == {lease_name("b")}


def test_a_lease_that_nobody_holds_is_refused_and_leaves_nothing(
    registry: Registry, pool: Pool, leases: TestLeases
) -> None:
    leases.dead.add(lease_name("a"))
    for _ in range(pool.rows.max_sessions + 1):
        with pytest.raises(ProtocolError, match="nobody holds the lease"):
            attach(registry, wants("a"))
    assert not registry.sessions
    assert attach(registry, wants("b")).number == 1


def test_a_session_too_many_leaves_its_lease_to_nobody(registry: Registry, leases: TestLeases) -> None:
    for lease in "abcd":
        attach(registry, wants(lease))
    with pytest.raises(AllocatorUnavailable, match="all 4 sessions"):
        attach(registry, wants("e"))
    assert leases.open_names == {lease_name(lease) for lease in "abcd"}


def test_only_a_released_lease_buries_its_session(registry: Registry, pool: Pool, leases: TestLeases) -> None:
    """What the watcher says is a hint; the lock is the proof."""
    session = attach(registry, wants("a"))
    pool.grant(session, 3, 2)
    pool.commit()
    assert registry.bury(lease_name("a"), "its connection closed") is None
    assert registry.bury(lease_name("z"), "its connection closed") is None
    assert (list(registry.sessions), session.held) == ([1], 3)
    leases.dead.add(lease_name("a"))
    assert registry.bury(lease_name("a"), "its connection closed") is pool
    assert (registry.sessions, pool.ledger.free_count, leases.open_names) == ({}, 16, set())
    assert registry.bury(lease_name("a"), "the sweep found its lock released") is None


def test_a_death_is_one_line_that_names_the_process_and_its_slots(
    registry: Registry, pool: Pool, leases: TestLeases, caplog: pytest.LogCaptureFixture
) -> None:
    session = attach(registry, wants("a", name="engine-7", pid=4310))
    pool.grant(session, 7, 2)
    pool.give_back(session, 4, 1)
    pool.commit()
    leases.dead.add(lease_name("a"))
    with caplog.at_level("INFO"):
        registry.bury(lease_name("a"), "its process ended")
    assert caplog.messages == [
        "session 1 (engine-7, pid 4310) is dead (its process ended): 6 slots freed: 1-3, 5-7"
    ]


# Guarantees and limits.


def test_guarantees_never_exceed_the_pool_whoever_holds_what(registry: Registry, pool: Pool) -> None:
    first = attach(registry, wants("a", name="engine-a", guarantee=10))
    attach(registry, wants("b", name="engine-b", guarantee=4))
    for guarantee in (3, 16, 2**31 - 2):
        with pytest.raises(GuaranteeExceeded) as caught:
            attach(registry, wants("c", guarantee=guarantee))
        assert str(caught.value) == (
            f"a guarantee of {guarantee} is not to be had: pool default has 16 slots, guaranteed are 14: "
            "engine-a (session 1) 10, engine-b (session 2) 4"
        )
    assert sorted(registry.sessions) == sorted(pool.sessions) == [1, 2]
    leave(registry, first)
    assert attach(registry, wants("c", guarantee=12)).guarantee == 12


def test_a_guarantee_that_one_pool_cannot_keep_names_nobody(registry: Registry) -> None:
    with pytest.raises(GuaranteeExceeded, match=r"16 slots, guaranteed are 0: nobody$"):
        attach(registry, wants(guarantee=17))


@pytest.mark.parametrize(("asked", "limit"), [(None, 16), (1, 1), (16, 16), (99, 16)])
def test_a_limit_is_at_most_the_pool(registry: Registry, asked: int | None, limit: int) -> None:
    session = attach(registry, wants(limit=asked))
    assert (session.limit, registry.describe(session)["limit"]) == (limit, limit)


def test_a_limit_below_the_guarantee_is_refused(registry: Registry) -> None:
    with pytest.raises(ProtocolError, match="limit 3 is below the guarantee of 4"):
        attach(registry, wants(limit=3, guarantee=4))
    assert not registry.sessions


# A keeper's death.


def test_a_lost_pool_takes_nobody_new_and_the_others_go_on(states: Registry) -> None:
    known = attach(states, wants("a"))
    states.lose("default", "its keeper died")
    states.lose("default", "the other keeper died too")
    states.lose("no such pool", "who knows")
    with pytest.raises(PoolLost, match=r"^pool default is lost: its keeper died$"):
        attach(states, wants("b"))
    assert attach(states, wants("a")) is known
    assert attach(states, wants("c", pool="bare")).number == 2
