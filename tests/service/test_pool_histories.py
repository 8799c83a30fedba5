"""Random histories of everything behind a dispatcher, against a model of lists and maps.

After every message the slot table is read back. Every change is applied again over a part of itself, as a
recovery would find it.
"""

from __future__ import annotations

import logging
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dispatching import EPOCH, Client, Connection, TableFile, audited, hello_map, ids, make_pool, make_registry
from hypothesis import strategies as draw
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slot_model import (
    FAULTS,
    MAX_SESSIONS,
    Model,
    Offered,
    Pick,
    counts,
    maybe_picks,
    picks,
    pool_sizes,
    some,
    steps_of,
    who,
)

from mambapool.pool import protocol, slot_table
from mambapool.pool.protocol import (
    ACCEPT,
    ALLOC,
    BEGIN,
    GAP,
    GUARANTEE_EXCEEDED,
    MALFORMED,
    NONE,
    NOT_OPEN,
    OK,
    REFUSED,
    UNKNOWN_SESSION,
    WRONG_EPOCH,
)
from mambapool.pool.slot_table import owner_word
from mambapool.service.audit_checks import violations
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.pool_report import check_pool
from mambapool.service.sessions import GUARANTEE_REQUEST


@dataclass
class Open:
    """A request that was answered: what was sent, what came back, what was granted."""

    body: bytes
    reply: bytes
    granted: list[int] = field(default_factory=list)
    #: Accepted slots, which no CANCEL gives back.
    kept: bool = False


@dataclass
class Attached:
    """A session as the model has it, and the client that speaks for it."""

    client: Client
    row: int
    limit: int
    guarantee: int = 0
    #: False while its HELLO waits for its guarantee.
    greeted: bool = True
    applied: int = 0
    window: int = 0
    accepting: int = 0
    guaranteed: set[int] = field(default_factory=set)
    open: dict[int, Open] = field(default_factory=dict)
    #: Bodies of requests that wait, by id.
    waiting: dict[int, bytes] = field(default_factory=dict)
    barred: set[int] = field(default_factory=set)

    @property
    def number(self) -> int:
        return self.client.number


class AnyClient(Client):
    """A client whose HELLO may be answered later."""

    def __post_init__(self) -> None:
        self.hello = self.connection.send(protocol.HELLO, 0, 1, 0, 0, 0, hello_map(self.lease, **self.options))
        self.number = max(self.connection.dispatcher.registry.sessions, default=0)


@dataclass
class Turn:
    """What somebody waits for; no id: a guarantee."""

    session: Attached
    request_id: int
    count: int


@dataclass
class Late:
    """A reply that has to come to somebody who waited."""

    request_id: int
    status: int
    granted: list[int] = field(default_factory=list)
    kept: bool = False


class PoolHistory(RuleBasedStateMachine):
    """Messages to a dispatcher with one pool."""

    steps = 0
    changes = 0

    @initialize(slots=pool_sizes)
    def start(self, slots: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="mambapool-")
        self.model = Model(slots)
        self.pool = make_pool(Path(self.directory.name), slots, max_sessions=MAX_SESSIONS)
        self.dispatcher = Dispatcher(EPOCH, make_registry(Path(self.directory.name), self.pool))
        self.table = TableFile(self.pool.table)
        self._commit = self.pool.table.commit
        self.pool.table.commit = self._commit_and_recover  # type: ignore[method-assign]
        self.sessions: list[Attached] = []
        self.queue: list[Turn] = []
        self.late: defaultdict[int, list[Late]] = defaultdict(list)
        self.connections = 0
        self.attach(0, None)
        self.attach(0, None)

    def _connection(self) -> Connection:
        self.connections += 1
        return Connection(self.dispatcher, b"zmq-%d" % self.connections)

    def _session(self, place: int) -> Attached:
        greeted = self._greeted()
        return greeted[place % len(greeted)]

    def _greeted(self) -> list[Attached]:
        return [session for session in self.sessions if session.greeted]

    def _own(self, session: Attached, pick: Pick) -> list[int]:
        """Some of what a session may free or offer; a guarantee stays whole, as a client keeps it."""
        own = self.model.own(session.number)
        return some([slot for slot in own if slot not in session.guaranteed], pick)

    @precondition(lambda self: len(self.sessions) < MAX_SESSIONS)
    @rule(
        guarantee=draw.sampled_from([0, 0, 0, 1, 3, 9, 41]), limit=draw.sampled_from([None, None, None, 1, 6, 99])
    )
    def attach(self, guarantee: int, limit: int | None) -> None:
        connection = self._connection()
        options = {"guarantee": guarantee, "limit": None if guarantee else limit}
        client = AnyClient(connection, connection.identity.ljust(16, b"."), options)
        if guarantee and guarantee + sum(session.guarantee for session in self.sessions) > self.model.slots:
            assert client.hello is not None
            assert client.hello[2] == GUARANTEE_EXCEEDED
            return
        slots = self.model.slots
        session = Attached(client, client.session.row, min(options["limit"] or slots, slots), guarantee)
        self.sessions.append(session)
        if guarantee:
            session.greeted = False
            self.queue.append(Turn(session, 0, guarantee))
            self._serve()
            late = self.late.pop(session.number, [])
            assert (client.hello is None) == (not late)
            if client.hello is not None:
                assert client.hello[3]["granted"] == ids(*late[0].granted)

    @precondition(lambda self: len(self._greeted()) > 1)
    @rule(place=who)
    def detach(self, place: int) -> None:
        session = self.sessions[place % len(self.sessions)]
        assert session.client.request(protocol.DETACH, id=10_000)[2] == OK
        self.sessions.remove(session)
        self.queue = [turn for turn in self.queue if turn.session is not session]
        self.model.end(session.number)
        self._serve()

    @rule(place=who)
    def reconnect(self, place: int) -> None:
        session = self._session(place)
        session.client.connection = self._connection()
        known = session.client.connection.hello(session.client.lease, resume=session.number)[3]
        assert (known["session"], known["applied"]) == (session.number, session.applied)
        assert set(protocol.unpack_ids(known.get("granted", b"")).tolist()) == session.guaranteed

    @rule(place=who, count=counts, pick=maybe_picks, acknowledge=draw.booleans(), wait=draw.booleans())
    def alloc(self, place: int, count: int, pick: Pick | None, acknowledge: bool, wait: bool) -> None:
        session = self._session(place)
        sent = self._request(session, ALLOC, count, pick, acknowledge, wait)
        if sent is None:
            return
        request_id, body, reply = sent
        granted = None if self.queue else self._grant(session, count, request_id)
        if granted is None and wait and not self._never(session, count):
            assert reply is None
            session.waiting[request_id] = body
            self.queue.append(Turn(session, request_id, count))
        else:
            self._answered(session, request_id, body, reply, granted)

    @rule(place=who, count=counts, pick=maybe_picks, acknowledge=draw.booleans(), partial=draw.booleans())
    def begin(self, place: int, count: int, pick: Pick | None, acknowledge: bool, partial: bool) -> None:
        session = self._session(place)
        sent = self._request(session, BEGIN, count, pick, acknowledge, partial)
        if sent is None:
            return
        request_id, body, reply = sent
        session.window = 0
        if partial:
            count = min(count, len(self.model.free), session.limit - len(self.model.held_by(session.number)))
        granted = self._grant(session, count, request_id) if count > 0 and not self.queue else None
        self._answered(session, request_id, body, reply, granted)
        if granted is not None:
            session.window = request_id

    def _request(
        self, session: Attached, op: int, count: int, pick: Pick | None, acknowledge: bool, more: bool
    ) -> tuple[int, bytes, bytes | None] | None:
        """Send one that may carry frees; None if it is not open."""
        frees = self._own(session, pick) if pick else []
        request_id = session.client.request_id + 1
        oldest_open = min([request_id, *session.waiting]) if acknowledge else 0
        body = session.client.body(
            op,
            count,
            protocol.pack_ids(array(frees)) if frees else None,
            more,
            id=request_id,
            posted=session.applied + bool(frees),
            oldest_open=oldest_open,
        )
        reply = session.client.connection.send_body(body)
        session.client.request_id = request_id
        session.open = {known: answer for known, answer in session.open.items() if known >= oldest_open}
        session.barred = {barred for barred in session.barred if barred >= oldest_open}
        if request_id in session.barred:
            assert fields(reply)[2] == NOT_OPEN
            return None
        session.applied += bool(frees)
        self.model.give_back(frees)
        if self.queue and (frees or op == BEGIN):
            self._serve()
        return request_id, body, reply

    def _grant(self, session: Attached, count: int, request_id: int) -> list[int] | None:
        if len(self.model.held_by(session.number)) + count > session.limit:
            return None
        return self.model.take(count, session.number, request_id)

    def _never(self, session: Attached, count: int) -> bool:
        """Whether a request is not waited for: its session's own limit is in its way."""
        held = len(self.model.held_by(session.number))
        promised = sum(other.guarantee for other in self.sessions)
        return count > self.model.slots - promised or (
            count > session.limit or held + count > session.limit < self.model.slots
        )

    def _answered(
        self, session: Attached, request_id: int, body: bytes, reply: bytes | None, granted: list[int] | None
    ) -> None:
        assert reply is not None
        told = [NONE] if granted is None else [OK, protocol.pack_ids(array(granted))]
        assert fields(reply) == [request_id, EPOCH, *told]
        session.open[request_id] = Open(body, reply, granted or [])

    def _serve(self) -> None:
        """Those who wait, in turn, as long as there is enough for the first of them."""
        while self.queue and self.queue[0].count <= len(self.model.free):
            turn = self.queue.pop(0)
            session, count = turn.session, turn.count
            request_id = turn.request_id or GUARANTEE_REQUEST
            granted = self._grant(session, count, request_id)
            self.late[session.number].append(Late(request_id, NONE if granted is None else OK, granted or []))
            if not turn.request_id:
                session.greeted = True
                session.guaranteed = set(granted or [])

    @rule(place=who, to=who, pick=picks)
    def offer(self, place: int, to: int, pick: Pick) -> None:
        # Of those who have something, to somebody else.
        givers = [session for session in self._greeted() if self._own(session, pick)]
        if not givers:
            return
        session = givers[place % len(givers)]
        others = [other for other in self._greeted() if other is not session]
        slots, request_id = self._own(session, pick), session.client.request_id + 1
        if not others or request_id in session.barred:
            return
        receiver = others[to % len(others)]
        body = session.client.body(
            protocol.OFFER, protocol.pack_ids(array(slots)), receiver.number, id=request_id, posted=session.applied
        )
        reply = session.client.connection.send_body(body)
        session.client.request_id = request_id
        assert fields(reply) == [request_id, EPOCH, OK]
        session.open[request_id] = Open(body, reply or b"")
        self.model.offers.append(Offered(session.number, receiver.number, tuple(slots), session.client.request_id))
        if receiver.accepting:
            self.late[receiver.number].append(self._accept(receiver, receiver.accepting))
            receiver.accepting = 0

    @rule(place=who, wait=draw.booleans())
    def accept(self, place: int, wait: bool) -> None:
        session = self._session(place)
        request_id = session.client.request_id + 1
        if request_id in session.barred:
            return
        body = session.client.body(ACCEPT, wait, id=request_id, posted=session.applied)
        reply = session.client.connection.send_body(body)
        session.client.request_id = request_id
        expected = self._accept(session, request_id)
        # One that waited before is not answered any more: a client has one at a time.
        session.waiting.pop(session.accepting, None)
        session.accepting = 0
        if expected.status == NONE and wait:
            assert reply is None
            session.accepting = request_id
            session.waiting[request_id] = body
        else:
            self._came(session, expected, body, reply or b"")

    def _accept(self, session: Attached, request_id: int) -> Late:
        offer = next((offer for offer in self.model.offers if offer.receiver == session.number), None)
        if offer is None:
            return Late(request_id, NONE)
        if len(self.model.held_by(session.number)) + len(offer.slots) > session.limit:
            return Late(request_id, REFUSED)
        return Late(request_id, OK, self.model.accept(offer, request_id), kept=True)

    def _came(self, session: Attached, expected: Late, body: bytes, reply: bytes) -> None:
        """Compare a reply that may come late, and keep it as an open one."""
        known, _, status, *more = fields(reply)
        assert (known, status) == (expected.request_id, expected.status)
        if expected.granted:
            assert more == [protocol.pack_ids(array(expected.granted))]
        session.open[known] = Open(body, reply, expected.granted, expected.kept)

    @rule(place=who, pick=picks, op=draw.sampled_from([protocol.FREE, protocol.END]))
    def free(self, place: int, pick: Pick, op: int) -> None:
        session = self._session(place)
        slots = self._own(session, pick)
        frees = protocol.pack_ids(array(slots)) if slots or op == protocol.FREE else None
        assert self._post(session, op, frees) is None
        self.model.give_back(slots)
        if op == protocol.END:
            session.window = 0
        self._serve()

    @rule(place=who)
    def clear(self, place: int) -> None:
        session = self._session(place)
        if session.guaranteed:
            return  # a client frees these by itself only
        assert self._post(session, protocol.CLEAR, None) is None
        self.model.release(session.number)
        session.window = 0
        self._serve()

    @rule(
        place=who,
        pick=picks,
        fault=draw.sampled_from(list(FAULTS)),
        op=draw.sampled_from([protocol.FREE, protocol.END, ALLOC, BEGIN]),
    )
    def misuse(self, place: int, pick: Pick, fault: str, op: int) -> None:
        session = self._session(place)
        batch = self.model.spoiled(fault, self._own(session, pick), session.number)
        if batch is None:
            return
        frees = protocol.pack_ids(array(batch[0]))
        if op in protocol.POSTED_OPS:
            told = self._post(session, op, frees)
        else:
            request_id = session.client.request_id + 1
            if request_id in session.barred:
                return
            body = session.client.body(op, 1, frees, False, id=request_id, posted=session.applied + 1)
            reply = session.client.connection.send_body(body)
            told = fields(reply)
            session.client.request_id = request_id
            session.applied += 1
            session.open[request_id] = Open(body, reply or b"")
        assert told is not None
        assert told[2:4] == [FAULTS[fault], ids(*batch[1])]

    @rule(place=who, which=who)
    def repeat(self, place: int, which: int) -> None:
        session = self._session(place)
        for answered in list(session.open.values())[which : which + 2]:
            assert session.client.connection.send_body(answered.body) == answered.reply
        for body in session.waiting.values():
            assert session.client.connection.send_body(body) is None
        if session.applied:
            assert session.client.post(protocol.CLEAR, None, posted=session.applied) is None

    @rule(place=who, ahead=draw.integers(2, 9))
    def gap(self, place: int, ahead: int) -> None:
        session = self._session(place)
        number = session.applied + ahead
        assert session.client.post(protocol.CLEAR, None, posted=number) == [0, EPOCH, GAP, session.applied]
        send, body = session.client.connection.send_body, session.client.body
        notice = fields(send(body(protocol.PING, id=0, posted=number)))
        reply = fields(send(body(ALLOC, 1, None, True, id=9_999, posted=number)))
        assert (notice, reply) == ([0, EPOCH, GAP, session.applied], [9_999, EPOCH, GAP, session.applied])

    @rule(place=who, which=draw.none() | who)
    def cancel(self, place: int, which: int | None) -> None:
        """One of the open requests, or the next one, which has not come yet."""
        session = self._session(place)
        request_id = session.client.request_id + 1
        known = [*session.waiting, *session.open]
        if which is not None and known:
            request_id = known[which % len(known)]
        assert self._post(session, protocol.CANCEL, request_id) is None
        answered = session.open.get(request_id)
        if answered is None or not answered.kept:
            self._give_up(session, request_id)
        self._serve()

    def _give_up(self, session: Attached, request_id: int) -> None:
        answered = session.open.pop(request_id, None)
        granted = answered.granted if answered else []
        own = self.model.own(session.number)
        self.model.give_back([slot for slot in granted if slot in own and self.model.request[slot] == request_id])
        self.queue = [turn for turn in self.queue if (turn.session, turn.request_id) != (session, request_id)]
        made = session.number, request_id
        self.model.offers = [offer for offer in self.model.offers if (offer.giver, offer.request) != made]
        session.waiting.pop(request_id, None)
        session.accepting = 0 if session.accepting == request_id else session.accepting
        session.window = 0 if session.window == request_id else session.window
        session.barred.add(request_id)

    @rule(place=who)
    def nonsense(self, place: int) -> None:
        session = self._session(place)
        header = {"id": 9_999, "posted": session.applied}
        send, body = session.client.connection.send_body, session.client.body
        assert fields(send(body(ALLOC, 0, None, False, **header)))[2] == MALFORMED
        assert fields(send(body(ALLOC, 1, None, None, **header)))[2] == MALFORMED
        assert fields(send(body(ALLOC, 1, None, False, **header, epoch=EPOCH + 1)))[2] == WRONG_EPOCH
        stranger = Connection(self.dispatcher, b"stranger")
        message = (ALLOC, session.number, 9_999, EPOCH, 0, 0, 1, None, False)
        assert stranger.ask(*message)[2] == UNKNOWN_SESSION

    def _post(self, session: Attached, op: int, argument: int | bytes | None) -> list[Any] | None:
        session.applied += 1
        return session.client.post(op, argument, posted=session.applied)

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        PoolHistory.steps += 1
        self._late_replies_came()
        check_pool(self.pool)
        assert self.pool.ledger.free_slots().tolist() == self.model.free
        image = self.table.words()
        self._compare_rows(image)
        if not PoolHistory.steps % 64:
            assert violations(audited(self.dispatcher, self.pool.name)) == []
        assert image[slot_table.H_WAITING] == sum(turn.count for turn in self.queue)
        for session in self.sessions:
            words = image[self.table.layout.session(session.row) :][: slot_table.SESSION_WORDS]
            told = (words[slot_table.S_NUMBER], words[slot_table.S_APPLIED], words[slot_table.S_WINDOW])
            assert told == (session.number, session.applied, session.window)

    def _late_replies_came(self) -> None:
        for session in self.sessions:
            expected = self.late.pop(session.number, [])
            bodies = session.client.connection.late_bodies()
            for late, reply in zip(expected, bodies, strict=True):
                if late.request_id == GUARANTEE_REQUEST:
                    assert fields(reply)[3]["granted"] == ids(*late.granted)
                else:
                    self._came(session, late, session.waiting.pop(late.request_id), reply)
        assert not self.late
        assert not self.dispatcher.outbox

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
        words = row(slot_table.OFFERED)
        receivers = [word & slot_table.RECEIVER_BITS for word in words]
        assert receivers == [self.model.offered.get(slot, 0) for slot in range(len(slots) + 1)]
        offers = {frozenset(offer.slots) for offer in self.model.offers}
        of_one = {
            (owners[slot], word): {s for s in slots if (owners[s], words[s]) == (owners[slot], word)}
            for slot, word in enumerate(words)
            if word
        }
        assert set(map(frozenset, of_one.values())) == offers
        assert image[slot_table.H_FREE_COUNT] == len(self.model.free)

    def _commit_and_recover(self, free_count: int) -> None:
        """Let the allocator die in the middle of every change, and look at what a recovery makes of it."""
        PoolHistory.changes += 1
        before = self.table.words()
        self._commit(free_count)
        after = self.table.words()
        assert after[slot_table.H_SEQ] == after[slot_table.H_DONE] == before[slot_table.H_SEQ] + 1
        self.table.interrupt(before, after, PoolHistory.changes % 64)
        self.table.apply_record_again()
        assert np.array_equal(self.table.words(), after)

    def teardown(self) -> None:
        if not hasattr(self, "directory"):
            return
        try:
            for session in self.sessions:
                assert session.client.request(protocol.DETACH, id=10_000)[2] == OK
            assert self.pool.table.free_list().tolist() == list(range(1, self.model.slots + 1))
        finally:
            self.directory.cleanup()


def array(slots: Iterable[int]) -> protocol.Ids:
    return np.array(list(slots), np.int32)


def fields(body: bytes | None) -> list[Any]:
    """A reply's, which has to have come."""
    assert body is not None
    return protocol.unpack(body, len(body))


@pytest.fixture(autouse=True)
def _no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of refusals are told here on purpose."""
    monkeypatch.setattr(logging.getLogger("mambapool.allocator"), "disabled", True)


def test_a_pool_does_what_the_model_does_and_its_table_tells_so_at_every_step() -> None:
    steps_of(PoolHistory, histories=70, steps=150)
    assert PoolHistory.steps >= 7_500
