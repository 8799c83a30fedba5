from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dispatching import hello_map, make_pool, make_registry

from mambapool.pool import protocol
from mambapool.pool.errors import (
    AllocatorUnavailable,
    GeometryMismatch,
    ProtocolError,
    RuntimeDirError,
    UnknownPool,
)
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.service.attach import AttachRequest
from mambapool.service.pools import Pool, Shard
from mambapool.service.registry import Registry

GEOMETRY = Geometry((TensorSpec.parse("conv=bfloat16:4x96x3"), TensorSpec.parse("temporal=float32:4x2x16x8")))


def wants(lease: str = "a", **changes: Any) -> AttachRequest:
    return AttachRequest.from_wire(hello_map(lease.encode().ljust(16, b"."), **changes))


@pytest.fixture
def states(tmp_path: Path) -> Registry:
    """One pool named default of 8 slots with two tensors on two ranks, and an allocator-only one."""
    shards = [Shard(f"keeper-default-{rank}.sock", bytes([rank]) * 16) for rank in range(2)]
    return make_registry(
        tmp_path, make_pool(tmp_path, 8, geometry=GEOMETRY, shards=shards), make_pool(tmp_path, 4, "bare")
    )


def test_sessions_are_numbered_and_a_number_is_never_used_twice(registry: Registry) -> None:
    first = registry.attach(wants("a"), b"1")
    second = registry.attach(wants("b"), b"2")
    registry.detach(first)
    third = registry.attach(wants("a"), b"1")
    assert [first.number, second.number, third.number] == [1, 2, 3]
    assert third.row == first.row
    assert list(registry.sessions) == [2, 3]


def test_a_lease_has_one_session_however_often_it_attaches(registry: Registry) -> None:
    first = registry.attach(wants("a"), b"1")
    again = registry.attach(wants("a", resume=1), b"2")
    assert again is first
    assert first.identity == b"2"
    assert len(registry.sessions) == 1


def test_a_lease_stays_with_its_pool(registry: Registry) -> None:
    registry.attach(wants("a"), b"1")
    with pytest.raises(ProtocolError, match="this lease is attached to pool 'default'"):
        registry.attach(wants("a", pool="other", create_slots=4), b"1")
    assert sorted(registry.pools) == ["default"]


def test_a_session_that_is_not_known_here_cannot_be_resumed(registry: Registry) -> None:
    with pytest.raises(AllocatorUnavailable, match=r"session 12 is not known here.*connect again"):
        registry.attach(wants(resume=12), b"1")
    assert not registry.sessions


def test_nobody_new_is_taken_while_the_allocator_ends(registry: Registry) -> None:
    known = registry.attach(wants("a"), b"1")
    registry.ending = True
    with pytest.raises(AllocatorUnavailable, match="ending"):
        registry.attach(wants("b"), b"2")
    assert registry.attach(wants("a"), b"2") is known


def test_a_session_too_many_is_refused_and_leaves_nothing(registry: Registry, pool: Pool) -> None:
    for lease in "abcd":
        registry.attach(wants(lease), b"1")
    with pytest.raises(AllocatorUnavailable, match="all 4 sessions"):
        registry.attach(wants("e"), b"1")
    assert len(registry.sessions) == len(pool.sessions) == 4
    registry.detach(registry.sessions[1])
    assert registry.attach(wants("e"), b"1").number == 5


def test_a_pool_that_a_client_makes_ends_with_its_last_session(registry: Registry, tmp_path: Path) -> None:
    first = registry.attach(wants("a", pool="mine", create_slots=5), b"1")
    second = registry.attach(wants("b", pool="mine", create_slots=5), b"2")
    third = registry.attach(wants("c", pool="mine"), b"3")
    assert first.pool is second.pool is third.pool
    assert (first.pool.slots, first.pool.shards) == (5, ())
    for session in (second, first):
        registry.detach(session)
        assert (tmp_path / "mine.table").exists()
    registry.detach(third)
    assert sorted(registry.pools) == ["default"]
    assert not (tmp_path / "mine.table").exists()


def test_a_configured_pool_stays_without_sessions(registry: Registry, tmp_path: Path) -> None:
    registry.detach(registry.attach(wants("a", create_slots=16), b"1"))
    assert sorted(registry.pools) == ["default"]
    assert (tmp_path / "default.table").exists()


def test_a_pool_that_ended_can_be_made_anew_with_another_size(registry: Registry) -> None:
    registry.detach(registry.attach(wants("a", pool="mine", create_slots=5), b"1"))
    assert registry.attach(wants("a", pool="mine", create_slots=6), b"1").pool.slots == 6


def test_an_unknown_pool_is_refused_with_the_names_of_those_that_are_served(states: Registry) -> None:
    with pytest.raises(UnknownPool, match="there is no pool 'mine'; pools here: bare, default"):
        states.attach(wants(pool="mine"), b"1")


def test_an_allocator_without_pools_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UnknownPool, match="none; a client can make one with create_slots=N"):
        make_registry(tmp_path).attach(wants(), b"1")


def test_a_pool_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    registry = make_registry(tmp_path / "missing")
    with pytest.raises(RuntimeDirError):
        registry.attach(wants(create_slots=4), b"1")
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
        states.attach(wants(**changes), b"1")
    assert str(caught.value) == text
    assert not states.sessions
    assert sorted(states.pools) == ["bare", "default"]


def test_what_is_expected_may_be_what_is_there(states: Registry) -> None:
    expect = [["temporal", "float32", [4, 2, 16, 8]], ["conv", "bfloat16", [4, 96, 3]]]
    session = states.attach(wants(slots=8, rank=1, expect=expect), b"1")
    assert session.rank == 1


def test_a_session_is_described_with_its_pool(states: Registry) -> None:
    session = states.attach(wants(), b"1")
    assert states.describe(session) == {
        "session": 1,
        "row": 0,
        "applied": 0,
        "slots": 8,
        "uuid": bytes(range(16)),
        "geometry": GEOMETRY.to_wire(),
        "table": "default.table",
        "shards": [["keeper-default-0.sock", bytes(16)], ["keeper-default-1.sock", b"\1" * 16]],
    }
    bare = states.attach(wants("b", pool="bare"), b"2")
    assert (states.describe(bare)["geometry"], states.describe(bare)["shards"]) == (None, [])


def test_the_longest_message_follows_the_largest_pool(registry: Registry) -> None:
    assert registry.max_body_bytes == protocol.max_body_bytes(16)
    session = registry.attach(wants(pool="large", create_slots=1000), b"1")
    assert registry.max_body_bytes == protocol.max_body_bytes(1000)
    registry.detach(session)
    assert registry.max_body_bytes == protocol.max_body_bytes(16)
