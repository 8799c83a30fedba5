"""Duplicates, reorderings, replays of recorded messages, messages of old epochs: refused or answered the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from daemons import Daemon, wait_until
from leased_clients import restart
from soaking import RawSession, applied, audit

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.protocol import NOT_OPEN, OK, UNKNOWN_SESSION, WRONG_EPOCH

SLOTS = 16


@contextmanager
def history(daemon: Daemon, pool: str) -> Iterator[tuple[RawSession, RawSession, st.SlotTableReader]]:
    """A session that has said one message of every kind, its neighbour, and their pool's table."""
    with closing(RawSession(daemon.dir, pool, create_slots=SLOTS)) as session:
        session.hello()
        with closing(RawSession(daemon.dir, pool)) as neighbour:
            neighbour.hello()
            table = st.SlotTableReader(daemon.directory.slot_table(pool))
            say_everything(session, neighbour)
            wait_until(lambda: applied(table, session.number) == session.posted, "everything is applied")
            yield session, neighbour, table
            assert audit(table)


def say_everything(session: RawSession, neighbour: RawSession) -> None:
    slots = session.ask(protocol.ALLOC, 3, None, False)[1]
    session.post(protocol.FREE, slots[:1])
    session.ask(protocol.OFFER, slots[1:], neighbour.number)
    assert neighbour.ask(protocol.ACCEPT, False) == [OK, slots[1:]]
    neighbour.ask(protocol.OFFER, slots[1:], session.number)
    assert session.ask(protocol.ACCEPT, False) == [OK, slots[1:]]
    window = session.ask(protocol.BEGIN, 4, None, True)[1]
    session.post(protocol.END, window[2:])
    session.post(protocol.CLEAR, None)
    session.ask(protocol.ALLOC, 5, None, True)
    session.post(protocol.CANCEL, 10**6)
    assert len(session.ask(protocol.ALLOC, 2, None, False)[1]) == 2


def durable(table: st.SlotTableReader) -> bytes:
    """Sessions and rows: what messages can change."""
    return table.words[table.layout.sessions : table.layout.redo].tobytes()


def answers_to(sender: RawSession, bodies: list[bytes], marker: RawSession) -> list[Any]:
    """Send them; the statuses of what comes back. When ``marker`` is answered, all of them were read."""
    for body in bodies:
        sender.send_body(body)
    found = []
    while (reply := sender.receive(0.2)) is not None:
        found.append(reply)
    assert marker.ask(protocol.ACCEPT, False) == [protocol.NONE]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_recorded_messages_in_any_order_change_nothing(lasting_daemon: Daemon, seed: int) -> None:
    with history(lasting_daemon, f"replay-{seed}") as (session, neighbour, table):
        recorded = session.sent * 2
        random.Random(seed).shuffle(recorded)
        before = durable(table)
        answers_to(session, recorded, neighbour)
        assert durable(table) == before


def test_the_last_request_is_answered_the_same_and_those_before_it_are_closed(lasting_daemon: Daemon) -> None:
    with history(lasting_daemon, "repeats") as (session, _, table):
        before = durable(table)
        session.repeat()
        first = session.receive()
        session.repeat()
        assert session.receive() == first
        assert (first[0], len(first[1])) == (OK, 2)
        closed = protocol.pack(
            (protocol.ALLOC, session.number, 2, session.epoch, session.posted, 0, 3, None, False)
        )
        assert session.exchange(closed)[0] == NOT_OPEN
        assert durable(table) == before


def test_another_connection_cannot_speak_for_a_session(lasting_daemon: Daemon) -> None:
    with history(lasting_daemon, "stranger") as (session, neighbour, table):
        before = durable(table)
        bodies = [body for body in session.sent if protocol.unpack(body, len(body))[0] != protocol.HELLO]
        with closing(RawSession(lasting_daemon.dir, "stranger")) as stranger:
            for body in bodies:
                assert stranger.exchange(body)[0] == UNKNOWN_SESSION
        assert neighbour.ask(protocol.ACCEPT, False) == [protocol.NONE]
        assert durable(table) == before


def test_posted_messages_out_of_order_wait_for_the_one_that_is_missing(lasting_daemon: Daemon) -> None:
    with history(lasting_daemon, "order") as (session, _, table):
        slots = session.ask(protocol.ALLOC, 3, None, False)[1]
        first = session.posted + 1
        bodies = [
            protocol.pack((protocol.FREE, session.number, 0, session.epoch, first + place, 0, slot))
            for place, slot in enumerate(slots)
        ]
        for place in (2, 1):
            session.send_body(bodies[place])
            assert session.receive() == [protocol.GAP, first - 1]
        for place in (0, 0, 1, 0, 2, 1):
            session.send_body(bodies[place])
        wait_until(lambda: applied(table, session.number) == first + 2, "each was applied once, in order")
        session.posted = first + 2
        assert session.receive(0.1) is None


def test_messages_of_an_old_epoch_are_refused_and_change_nothing(lasting_daemon: Daemon) -> None:
    with history(lasting_daemon, "epochs") as (session, neighbour, table):
        recorded = [body for body in session.sent if protocol.unpack(body, len(body))[0] != protocol.HELLO]
        restart(lasting_daemon)
        assert session.come_back()[0] == neighbour.come_back()[0] == OK
        before = durable(table)
        for body in recorded:
            assert session.exchange(body)[0] == WRONG_EPOCH
        assert neighbour.ask(protocol.ACCEPT, False) == [protocol.NONE]
        assert durable(table) == before
