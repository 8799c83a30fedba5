"""Random histories against a model of lists and maps: the bare ledger, and all of it behind a dispatcher.

After every message the slot table is read back, and its last change applied again over a part of itself, as a
recovery would find it.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dispatching import EPOCH, Client, Connection, TableFile, ids, make_pool, make_registry
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as draw
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_histories

from mambapool.pool import protocol, slot_table
from mambapool.pool.errors import InvalidSlots
from mambapool.pool.protocol import GAP, MALFORMED, NONE, NOT_OPEN, OK, UNKNOWN_SESSION, WRONG_EPOCH
from mambapool.pool.slot_table import owner_word
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.ledger import Ledger

MAX_SESSIONS = 4

#: Sizes at which the list wraps around often, and batches of both kinds fit.
pool_sizes = draw.sampled_from([1, 2, 17, 40, 60])
counts = draw.sampled_from([1, 1, 2, 3, 8, 16, 17, 25, 61])
who = draw.integers(0, MAX_SESSIONS - 1)

#: Which of some slots: from where on, every how many, how many at most, in which direction. One list of all, since
#: what a step draws costs more than what it does.
Pick = tuple[int, int, int, bool]
PICKS: list[Pick] = list(itertools.product((0, 1, 4), (1, 2, 3), (1, 2, 5, 17, 60), (False, True)))
NO_PICKS: list[Pick | None] = [None] * len(PICKS)
picks = draw.sampled_from(PICKS)
maybe_picks = draw.sampled_from([*NO_PICKS, *PICKS])

FAULTS = {
    "reserved": protocol.RESERVED_SLOT,
    "out of range": protocol.SLOT_OUT_OF_RANGE,
    "duplicate": protocol.DUPLICATE_SLOT,
    "free": protocol.DOUBLE_FREE,
    "foreign": protocol.NOT_HOLDER,
}


def some(slots: list[int], pick: Pick) -> list[int]:
    start, stride, most, backwards = pick
    if not slots:
        return []
    chosen = slots[start % len(slots) :: stride][:most]
    return chosen[::-1] if backwards else chosen


@dataclass
class Model:
    """What a pool's slots do: taken from the head of a list, given back at its tail."""

    slots: int
    free: list[int] = field(default_factory=list)
    holder: dict[int, int] = field(default_factory=dict)
    request: dict[int, int] = field(default_factory=dict)
    generation: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.slots + 1))
        self.generation = [0] * (self.slots + 1)

    def held_by(self, holder: int) -> list[int]:
        return sorted(slot for slot, of in self.holder.items() if of == holder)

    def take(self, count: int, holder: int, request: int = 0) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for slot in taken:
            self.holder[slot] = holder
            self.request[slot] = request
            self.generation[slot] += 1
        return taken

    def give_back(self, slots: list[int]) -> None:
        for slot in slots:
            del self.holder[slot]
        self.free += slots

    def release(self, holder: int) -> list[int]:
        slots = self.held_by(holder)
        self.give_back(slots)
        if not self.holder:
            self.free = sorted(self.free)
        return slots

    def spoiled(self, fault: str, good: list[int], holder: int) -> tuple[list[int], list[int]] | None:
        """A batch with that fault among ``good`` slots, and the slots at fault; None if there can be none."""
        bad = {
            "reserved": [0],
            "out of range": [self.slots + 1],
            "duplicate": good[:1],
            "free": self.free[-2:],
            "foreign": [slot for slot, of in self.holder.items() if of != holder][:2],
        }[fault]
        middle = len(good) // 2
        return ([*good[:middle], *bad, *good[middle:]], bad) if bad else None


def steps_of(machine: type[RuleBasedStateMachine], histories: int, steps: int) -> None:
    """Run that many histories of so many steps; the same ones each time."""
    run_histories(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


class LedgerHistory(RuleBasedStateMachine):
    """The ledger alone."""

    steps = 0

    @initialize(slots=pool_sizes)
    def start(self, slots: int) -> None:
        self.model = Model(slots)
        self.ledger = Ledger(slots)

    @rule(count=counts, holder=who)
    def take(self, count: int, holder: int) -> None:
        expected = self.model.take(count, holder + 1)
        taken = self.ledger.take(count, holder + 1)
        assert (taken and taken[0].tolist()) == expected
        if taken:
            assert taken[1].tolist() == [self.model.generation[slot] for slot in taken[0]]

    @rule(holder=who)
    def take_one(self, holder: int) -> None:
        expected = self.model.take(1, holder + 1)
        assert self.ledger.take_one(holder + 1) == (expected[0] if expected else 0)

    @rule(holder=who, pick=picks)
    def give_back(self, holder: int, pick: Pick) -> None:
        slots = some(self.model.held_by(holder + 1), pick)
        self.model.give_back(slots)
        if len(slots) == 1:
            self.ledger.give_back_one(slots[0], holder + 1)
        else:
            self.ledger.give_back(np.array(slots, np.int32), holder + 1)

    @rule(holder=who, pick=picks, fault=draw.sampled_from(list(FAULTS)))
    def misuse(self, holder: int, pick: Pick, fault: str) -> None:
        batch = self.model.spoiled(fault, some(self.model.held_by(holder + 1), pick), holder + 1)
        if batch is None:
            return
        with pytest.raises(InvalidSlots) as caught:
            self.ledger.give_back(np.array(batch[0], np.int32), holder + 1)
        assert protocol.error_payload(caught.value)[0] == FAULTS[fault]
        assert list(caught.value.slots) == batch[1]

    @rule(holder=who)
    def release(self, holder: int) -> None:
        assert self.ledger.release(holder + 1).tolist() == self.model.release(holder + 1)

    @invariant()
    def the_ledger_is_as_the_model(self) -> None:
        LedgerHistory.steps += 1
        self.ledger.check()
        assert self.ledger.free_slots().tolist() == self.model.free
        assert self.ledger.generation.tolist() == self.model.generation
        for holder in range(1, MAX_SESSIONS + 1):
            assert self.ledger.held_by(holder).tolist() == self.model.held_by(holder)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            for holder in range(1, MAX_SESSIONS + 1):
                self.ledger.release(holder)
            assert self.ledger.free_slots().tolist() == list(range(1, self.model.slots + 1))


@dataclass
class Attached:
    """A session as the model has it, and the client that speaks for it."""

    client: Client
    row: int
    applied: int = 0
    window: int = 0
    #: Open requests: what was sent, what came back, what was granted.
    open: dict[int, tuple[bytes, bytes | None, list[int]]] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)

    @property
    def number(self) -> int:
        return self.client.number


class PoolHistory(RuleBasedStateMachine):
    """Messages to a dispatcher with one pool."""

    steps = 0

    @initialize(slots=pool_sizes)
    def start(self, slots: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="mambapool-")
        self.model = Model(slots)
        self.pool = make_pool(Path(self.directory.name), slots, max_sessions=MAX_SESSIONS)
        self.dispatcher = Dispatcher(EPOCH, make_registry(Path(self.directory.name), self.pool))
        self.table = TableFile(self.pool.table)
        self.image = self.table.words()
        self.sessions: list[Attached] = []
        self.connections = 0
        self.attach()

    def _connection(self) -> Connection:
        self.connections += 1
        return Connection(self.dispatcher, b"zmq-%d" % self.connections)

    def _session(self, place: int) -> Attached:
        return self.sessions[place % len(self.sessions)]

    def _held(self, session: Attached, pick: Pick) -> list[int]:
        return some(self.model.held_by(session.number), pick)

    @precondition(lambda self: len(self.sessions) < MAX_SESSIONS)
    @rule()
    def attach(self) -> None:
        connection = self._connection()
        client = Client(connection, connection.identity.ljust(16, b"."))
        self.sessions.append(Attached(client, client.session.row))

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(place=who)
    def detach(self, place: int) -> None:
        session = self._session(place)
        assert session.client.request(protocol.DETACH, id=10_000)[2] == OK
        self.sessions.remove(session)
        self.model.release(session.number)

    @rule(place=who)
    def reconnect(self, place: int) -> None:
        session = self._session(place)
        session.client.connection = self._connection()
        known = session.client.connection.hello(session.client.lease, resume=session.number)[3]
        assert (known["session"], known["applied"]) == (session.number, session.applied)

    @rule(place=who, count=counts, pick=maybe_picks, acknowledge=draw.booleans())
    def alloc(self, place: int, count: int, pick: Pick | None, acknowledge: bool) -> None:
        self._request(self._session(place), protocol.ALLOC, count, pick, acknowledge, ())

    @rule(place=who, count=counts, pick=maybe_picks, acknowledge=draw.booleans(), partial=draw.booleans())
    def begin(self, place: int, count: int, pick: Pick | None, acknowledge: bool, partial: bool) -> None:
        self._request(self._session(place), protocol.BEGIN, count, pick, acknowledge, (partial,))

    def _request(
        self, session: Attached, op: int, count: int, pick: Pick | None, acknowledge: bool, more: tuple[bool, ...]
    ) -> None:
        frees = self._held(session, pick) if pick else []
        request_id = session.client.request_id + 1
        header = {
            "id": request_id,
            "posted": session.applied + bool(frees),
            "oldest_open": request_id if acknowledge else 0,
        }
        body = session.client.body(op, count, protocol.pack_ids(array(frees)) if frees else None, *more, **header)
        reply = self._send(session, body)
        session.client.request_id = request_id
        if acknowledge:
            session.open.clear()
            session.barred = {barred for barred in session.barred if barred >= request_id}
        if request_id in session.barred:
            assert reply[2] == NOT_OPEN
            return
        session.applied += bool(frees)
        self.model.give_back(frees)
        if more:
            session.window = 0
            count = min(count, len(self.model.free)) if more[0] else count
        granted = self.model.take(count, session.number, request_id) if count else None
        if granted is None:
            assert reply == [request_id, EPOCH, NONE]
        else:
            assert reply == [request_id, EPOCH, OK, protocol.pack_ids(array(granted))]
            session.window = request_id if more else session.window
        session.open[request_id] = (body, self.last_reply, granted or [])

    @rule(place=who, pick=picks, op=draw.sampled_from([protocol.FREE, protocol.END]))
    def free(self, place: int, pick: Pick, op: int) -> None:
        session = self._session(place)
        slots = self._held(session, pick)
        assert (
            self._post(session, op, protocol.pack_ids(array(slots)) if slots or op == protocol.FREE else None)
            is None
        )
        self.model.give_back(slots)
        if op == protocol.END:
            session.window = 0

    @rule(place=who)
    def clear(self, place: int) -> None:
        session = self._session(place)
        assert self._post(session, protocol.CLEAR, None) is None
        self.model.release(session.number)
        session.window = 0

    @rule(
        place=who,
        pick=picks,
        fault=draw.sampled_from(list(FAULTS)),
        op=draw.sampled_from([protocol.FREE, protocol.END, protocol.ALLOC, protocol.BEGIN]),
    )
    def misuse(self, place: int, pick: Pick, fault: str, op: int) -> None:
        session = self._session(place)
        batch = self.model.spoiled(fault, self._held(session, pick), session.number)
        if batch is None:
            return
        frees = protocol.pack_ids(array(batch[0]))
        if op in protocol.POSTED_OPS:
            reply = self._post(session, op, frees)
        else:
            request_id = session.client.request_id + 1
            more = (False,) if op == protocol.BEGIN else ()
            body = session.client.body(op, 1, frees, *more, id=request_id, posted=session.applied + 1)
            if request_id in session.barred:
                return
            reply = self._send(session, body)
            session.client.request_id = request_id
            session.applied += 1
            session.open[request_id] = (body, self.last_reply, [])
        assert reply is not None
        assert reply[2:4] == [FAULTS[fault], ids(*batch[1])]

    @rule(place=who, which=who)
    def repeat(self, place: int, which: int) -> None:
        session = self._session(place)
        for body, reply, _ in list(session.open.values())[which : which + 2]:
            assert session.client.connection.send_body(body) == reply
        if session.applied:
            assert session.client.post(protocol.CLEAR, None, posted=session.applied) is None

    @rule(place=who, ahead=draw.integers(2, 9))
    def gap(self, place: int, ahead: int) -> None:
        session = self._session(place)
        number = session.applied + ahead
        assert session.client.post(protocol.CLEAR, None, posted=number) == [0, EPOCH, GAP, session.applied]
        body = session.client.body(protocol.ALLOC, 1, None, id=9_999, posted=number)
        assert self._send(session, body) == [9_999, EPOCH, GAP, session.applied]

    @rule(place=who, which=draw.none() | who)
    def cancel(self, place: int, which: int | None) -> None:
        """One of the open requests, or the next one, which has not come yet."""
        session = self._session(place)
        request_id = session.client.request_id + 1
        if which is not None and session.open:
            request_id = sorted(session.open)[which % len(session.open)]
        assert self._post(session, protocol.CANCEL, request_id) is None
        _, _, granted = session.open.pop(request_id, (b"", b"", []))
        self.model.give_back(
            [
                slot
                for slot in granted
                if (self.model.holder.get(slot), self.model.request[slot]) == (session.number, request_id)
            ]
        )
        session.window = 0 if session.window == request_id else session.window
        session.barred.add(request_id)

    @rule(place=who)
    def nonsense(self, place: int) -> None:
        session = self._session(place)
        header = {"id": 9_999, "posted": session.applied}
        body = session.client.body
        assert self._send(session, body(protocol.ALLOC, 0, None, **header))[2] == MALFORMED
        assert self._send(session, body(protocol.ALLOC, 1, None, **header, epoch=EPOCH + 1))[2] == WRONG_EPOCH
        stranger = Connection(self.dispatcher, b"stranger")
        assert stranger.ask(protocol.ALLOC, session.number, 9_999, EPOCH, 0, 0, 1, None)[2] == UNKNOWN_SESSION

    def _send(self, session: Attached, body: bytes) -> list[Any]:
        self.last_reply = session.client.connection.send_body(body)
        assert self.last_reply is not None
        return protocol.unpack(self.last_reply, len(self.last_reply))

    def _post(self, session: Attached, op: int, argument: int | bytes | None) -> list[Any] | None:
        session.applied += 1
        return session.client.post(op, argument, posted=session.applied)

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        PoolHistory.steps += 1
        self.pool.check()
        assert self.pool.ledger.free_slots().tolist() == self.model.free
        image = self.table.words()
        self._compare_rows(image)
        for session in self.sessions:
            words = image[self.table.layout.session(session.row) :][: slot_table.SESSION_WORDS]
            told = (words[slot_table.S_NUMBER], words[slot_table.S_APPLIED], words[slot_table.S_WINDOW])
            assert told == (session.number, session.applied, session.window)
        self._recover(image)

    def _compare_rows(self, image: slot_table.Words) -> None:
        def row(field: int) -> list[int]:
            words: list[int] = image[self.table.layout.field(field) :][: self.model.slots + 1].tolist()
            return words

        owners, orders = row(slot_table.OWNER), row(slot_table.ORDER)
        holders = self.model.holder
        slots = range(1, self.model.slots + 1)
        assert owners == [0, *(owner_word(holders[slot]) if slot in holders else 0 for slot in slots)]
        assert sorted((slot for slot in slots if not owners[slot]), key=orders.__getitem__) == self.model.free
        assert row(slot_table.GENERATION) == self.model.generation
        requests = row(slot_table.REQUEST)
        assert all(requests[slot] == self.model.request[slot] for slot in holders)
        assert image[slot_table.H_FREE_COUNT] == len(self.model.free)

    def _recover(self, image: slot_table.Words) -> None:
        """Let the allocator die in the middle of the last change, and look at what a recovery makes of it."""
        seq, before = image[slot_table.H_SEQ], self.image[slot_table.H_SEQ]
        assert seq == image[slot_table.H_DONE]
        assert seq - before <= 1, "one message made more than one change"
        if seq != before:
            self.table.interrupt(self.image, image, PoolHistory.steps % 64)
            self.table.apply_record_again()
            assert np.array_equal(self.table.words(), image)
        self.image = image

    def teardown(self) -> None:
        if not hasattr(self, "directory"):
            return
        try:
            for session in self.sessions:
                self._post(session, protocol.CLEAR, None)
            assert self.pool.table.free_list().tolist() == list(range(1, self.model.slots + 1))
        finally:
            self.directory.cleanup()


def array(slots: Iterable[int]) -> protocol.Ids:
    return np.array(list(slots), np.int32)


@pytest.fixture(autouse=True)
def _no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of refusals are told here on purpose."""
    monkeypatch.setattr(logging.getLogger("mambapool.allocator"), "disabled", True)


def test_the_ledger_does_what_a_list_would_do() -> None:
    steps_of(LedgerHistory, histories=60, steps=100)
    assert LedgerHistory.steps >= 5_000


def test_a_pool_does_what_the_model_does_and_its_table_tells_so_at_every_step() -> None:
    steps_of(PoolHistory, histories=120, steps=200)
    assert PoolHistory.steps >= 20_000
