"""Who is silent, who is put out by an operator, and what is left when a keeper dies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dispatching import EPOCH, Client, Connection, everything, ids
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.protocol import EVICT, FREE, GAP, OK, PING, POOL_LOST, REFUSED, UNKNOWN_SESSION
from mambapool.service.pool_report import pool_status
from mambapool.service.pools import Pool
from mambapool.service.registry import Registry
from mambapool.service.sessions import SUSPECT_AFTER_S

Join = Callable[[str], Client]


def evict(client: Client, number: int, *, force: bool = False) -> list[object]:
    """As an operator does, who has no session."""
    return Connection(client.connection.dispatcher, b"operator").ask(EVICT, 0, 1, 0, 0, 0, number, force)[1:]


def test_a_ping_is_not_answered_and_changes_nothing(client: Client) -> None:
    client.alloc(3)
    client.post(FREE, 2)
    before = everything(client.connection.dispatcher)
    assert client.send(PING, id=0) is None
    assert client.send(PING, id=0, posted=0) is None
    assert everything(client.connection.dispatcher) == before


def test_a_ping_tells_of_posted_messages_that_were_lost(client: Client) -> None:
    client.alloc(3)
    client.post(FREE, 2)
    assert client.send(PING, id=0, posted=2) == [0, EPOCH, GAP, 1]


def test_who_says_nothing_for_a_while_is_suspect_and_keeps_its_slots(client: Client, pool: Pool) -> None:
    client.alloc(3)

    def state(now: float) -> object:
        return pool_status(pool, now)["holders"][0]["state"]

    assert (state(0.0), state(SUSPECT_AFTER_S)) == ("live", "suspect")
    dispatcher, connection = client.connection.dispatcher, client.connection
    assert dispatcher.handle(connection.identity, client.body(PING, id=0), connection.peer, now=100.0) is None
    assert (state(100.0 + SUSPECT_AFTER_S - 0.1), state(100.0 + SUSPECT_AFTER_S)) == ("live", "suspect")
    assert client.session.held == 3


def test_a_living_session_is_evicted_by_force_only(client: Client, join: Join, pool: Pool) -> None:
    other = join("other")
    client.alloc(3)
    refused = evict(client, client.number)
    assert refused[:2] == [EPOCH, REFUSED]
    assert "session 1 (engine-0, pid 4310) is alive and may still write to its 3 slots" in str(refused[2])
    assert client.session.held == 3
    assert evict(client, client.number, force=True) == [EPOCH, OK, {"slots": 3, "alive": True}]
    assert client.alloc(1)[2] == UNKNOWN_SESSION
    assert (pool.ledger.free_count, list(pool.sessions)) == (16, [other.number])


def test_a_dead_session_is_evicted_without_force(client: Client, pool: Pool, leases: TestLeases) -> None:
    client.alloc(3)
    leases.dead.add(client.lease)
    assert evict(client, client.number) == [EPOCH, OK, {"slots": 3, "alive": False}]
    assert (pool.ledger.free_count, leases.open_names) == (16, set())


def test_an_eviction_is_for_who_waits_too(client: Client, join: Join) -> None:
    other = join("other")
    client.alloc(15)
    assert other.wait_for(4) is None
    assert evict(client, client.number, force=True)[1] == OK
    assert other.late() == [[2, EPOCH, OK, ids(1, 2, 3, 4)]]


@pytest.mark.parametrize("number", [0, 2, -1, 2**63, 2**64 - 1])
def test_who_is_not_there_cannot_be_evicted(client: Client, number: int) -> None:
    before = everything(client.connection.dispatcher)
    reply = evict(client, number, force=True)
    assert reply == [EPOCH, REFUSED, f"there is no session {number}: see `mambapool status`"]
    assert everything(client.connection.dispatcher) == before


# A keeper's death.


def test_every_request_to_a_lost_pool_is_told_so(client: Client, registry: Registry, pool: Pool) -> None:
    client.alloc(3)
    assert pool.table._items[st.H_LOST] == 0
    registry.lose("default", "its keeper died")
    assert pool.table._items[st.H_LOST] == 1
    assert pool_status(pool, 0.0)["lost"] == "its keeper died"
    requests = (
        client.alloc(1),
        client.begin(2),
        client.wait_for(20),
        client.offer(2, 1),
        client.accept(wait=True),
    )
    for reply in requests:
        assert reply is not None
        assert reply[2:] == [POOL_LOST, "pool default is lost: its keeper died"]
    assert client.session.held == 3


def test_a_lost_pool_takes_back_what_its_sessions_hold(client: Client, registry: Registry, pool: Pool) -> None:
    client.alloc(3)
    registry.lose("default", "its keeper died")
    assert client.post(FREE, 2) is None
    assert client.request(protocol.DETACH)[2] == OK
    assert pool.ledger.free_count == 16


def test_what_was_answered_before_the_loss_is_answered_again(client: Client, registry: Registry) -> None:
    first = client.alloc(3, id=9)
    registry.lose("default", "its keeper died")
    assert client.alloc(3, id=9) == first
