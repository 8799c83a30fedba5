"""What is read back from a slot table is what was there, whoever has died since."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dispatching import EPOCH, Client, Connection, make_pool, make_registry, slots_of
from hypothesis import given, settings
from hypothesis import strategies as some
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.errors import GeometryMismatch, RuntimeDirError
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.ledger import OFFERED
from mambapool.service.pools import Pool
from mambapool.service.recovery import recover_table, restore

SLOTS = 24
NO_DIGEST = bytes(16)
CALLS = ("alloc", "alloc", "free", "free", "begin", "end", "offer", "accept", "clear", "cancel")
GEOMETRY = Geometry((TensorSpec.parse("conv=bfloat16:2x8x2"),))


def taken_over(path: Path, leases: TestLeases, digest: bytes = NO_DIGEST) -> Pool:
    """The pool of that table as the next allocator has it."""
    table = recover_table(path, SLOTS, digest, None)
    pool = Pool("default", table, table.uuid, None, (), ends_with_last_session=table.created_by_client)
    restore(pool, leases, now=0.0)
    return pool


def told(pool: Pool) -> dict[str, Any]:
    """All that a pool says that is durable."""
    told_of = ("row", "name", "pid", "rank", "limit", "guarantee", "applied", "window", "held", "offered")
    sessions = {s.number: [s.lease.name, *(getattr(s, word) for word in told_of)] for s in pool.sessions.values()}
    offered: dict[tuple[int, int], list[set[int]]] = {}
    for offer in pool.offers:
        offered.setdefault((offer.giver.number, offer.receiver), []).append(set(offer.ids.tolist()))
    return {
        "free": pool.ledger.free_slots().tolist(),
        "held": {number: pool.ledger.held_by(number).tolist() for number in pool.sessions},
        "not to be freed": np.flatnonzero(pool.ledger._state > OFFERED).tolist(),
        "generations": pool.ledger.generation.tolist(),
        "sessions": sessions,
        "offers": offered,
        "windows": pool.windows(),
    }


class Party:
    """Up to four clients of one allocator that make random calls."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.chance = chance
        self.leases = TestLeases()
        self.pool = make_pool(directory, SLOTS)
        self.dispatcher = Dispatcher(EPOCH, make_registry(directory, self.pool, leases=self.leases))
        self.clients = [self._join(number) for number in range(4)]

    def _join(self, number: int) -> Client:
        options = {"name": f"engine-{number}", "rank": number, "pid": 100 + number}
        if number == 3:
            options |= {"guarantee": 3, "limit": 20}
        return Client(Connection(self.dispatcher, b"zmq-%d" % number), bytes([65 + number]) * 16, options)

    def call(self) -> None:
        client = self.chance.choice(self.clients)
        held = self.pool.ledger.held_by(client.number)
        plain = [int(s) for s in held if not self.pool.table.offers[s]]
        some_of_it = self.chance.sample(plain, min(len(plain), self.chance.randint(1, 4)))
        match self.chance.choice(CALLS):
            case "alloc":
                client.alloc(self.chance.randint(1, 5))
            case "free" if some_of_it:
                client.post(protocol.FREE, protocol.pack_ids(np.array(some_of_it, np.int32)))
            case "begin":
                client.begin(self.chance.randint(1, 5), partial=self.chance.random() < 0.5)
            case "end":
                client.post(protocol.END)
            case "offer" if some_of_it:
                client.offer(self.chance.choice(self.clients).number, *some_of_it)
            case "accept":
                client.accept()
            case "clear" if self.chance.random() < 0.2:
                client.post(protocol.CLEAR)
            case "cancel":
                client.post(protocol.CANCEL, client.request_id)


@settings(max_examples=60, deadline=None)
@given(seed=some.integers(0, 2**32), calls=some.integers(0, 80), dead=some.sets(some.integers(0, 3)))
def test_a_taken_over_pool_is_the_one_before_without_the_dead(seed: int, calls: int, dead: set[int]) -> None:
    with tempfile.TemporaryDirectory() as place:
        party = Party(Path(place), random.Random(seed))
        for _ in range(calls):
            party.call()
        path = party.pool.table.path
        assert told(taken_over(path, TestLeases())) == told(party.pool)
        for number in dead:
            party.leases.dead.add(party.clients[number].lease)
        restored = taken_over(path, party.leases)
        # The allocator before would have buried them one by one, in the order of their rows.
        for number in sorted(dead):
            party.dispatcher.lease_released(party.clients[number].lease, "its process ended")
        assert told(restored) == told(party.pool)
        assert sorted(restored.rows._free) == sorted(party.pool.rows._free)


@settings(max_examples=30, deadline=None)
@given(seed=some.integers(0, 2**32), calls=some.integers(1, 60))
def test_what_was_granted_is_answered_again_as_it_was(seed: int, calls: int) -> None:
    """By request, in the order in which it was granted, as far as its slots are still held."""
    with tempfile.TemporaryDirectory() as place:
        party = Party(Path(place), random.Random(seed))
        for _ in range(calls):
            party.call()
        client = party.clients[0]
        reply = client.alloc(3)
        if reply[2] != protocol.OK:
            client.post(protocol.CLEAR)
            reply = client.alloc(3)
        if reply[2] != protocol.OK:
            return
        restored = taken_over(party.pool.table.path, TestLeases())
        session = restored.sessions[client.number]
        assert session.recovered[client.request_id].tolist() == slots_of(reply)


def test_sessions_of_the_dead_are_buried_and_their_files_removed(tmp_path: Path) -> None:
    party = Party(tmp_path, random.Random(1))
    doomed, heir = party.clients[0], party.clients[1]
    doomed.alloc(5)
    doomed.offer(heir.number, 4, 5)
    heir.alloc(2)
    heir.offer(doomed.number, 9)
    leases = TestLeases()
    leases.dead.add(doomed.lease)
    restored = taken_over(party.pool.table.path, leases)
    assert doomed.number not in restored.sessions
    assert not restored.offers
    assert restored.ledger.held_by(heir.number).tolist() == [9, 10]
    assert restored.sessions[heir.number].offered == 0
    restored.ledger.give_back_one(9, heir.number)  # plainly its own again


def test_a_waiting_count_that_was_left_behind_holds_nobody_up(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, SLOTS)
    pool.table.set_waiting(7)
    restored = taken_over(pool.table.path, TestLeases())
    assert restored.table._items[st.H_WAITING] == 0


@pytest.mark.parametrize(
    ("slots", "digest", "uuid", "kind", "advice"),
    [
        (
            SLOTS + 1,
            NO_DIGEST,
            None,
            GeometryMismatch,
            f"has {SLOTS} slots, the pool {SLOTS + 1}: .*--slots {SLOTS}",
        ),
        (SLOTS, GEOMETRY.digest, None, GeometryMismatch, "another geometry: remove it"),
        (SLOTS, NO_DIGEST, b"u" * 16, RuntimeDirError, "memory that is gone .*remove it"),
    ],
)
def test_a_table_of_another_pool_is_refused_with_what_to_do(
    tmp_path: Path, slots: int, digest: bytes, uuid: bytes | None, kind: type[Exception], advice: str
) -> None:
    path = make_pool(tmp_path, SLOTS).table.path
    before = path.read_bytes()
    with pytest.raises(kind, match=advice) as refusal:
        recover_table(path, slots, digest, uuid)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "an empty file": lambda words: b"",
    "half of it": lambda words: words[: len(words) // 2],
    "a page more": lambda words: words + bytes(4096),
    "somebody else's file": lambda words: b"#!/bin/sh\n" * 1000,
    "an older version": lambda words: words[:8] + (0).to_bytes(8, "little") + words[16:],
    "a newer version": lambda words: words[:8] + (99).to_bytes(8, "little") + words[16:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_no_whole_table_of_this_version_is_refused_and_left(tmp_path: Path, damage: str) -> None:
    path = make_pool(tmp_path, SLOTS).table.path
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(RuntimeDirError, match=r"cannot take over the slot table: .*remove it") as refusal:
        recover_table(path, SLOTS, NO_DIGEST, None)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before
