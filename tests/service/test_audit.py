"""The audit: what it says of a sound pool, and that it finds each thing that can be wrong in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dispatching import EPOCH, Client, Connection, audit_reply, audited, everything
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.errors import ProtocolError
from mambapool.pool.protocol import AUDIT, CANCEL, CLEAR, FREE, MALFORMED, REFUSED, UNKNOWN_POOL
from mambapool.service.audit_checks import violations
from mambapool.service.audited import AuditedPool
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.ledger import OFFERED
from mambapool.service.pools import Pool
from mambapool.service.sessions import SUSPECT_AFTER_S

Join = Callable[[str], Client]


@pytest.fixture
def busy(dispatcher: Dispatcher, client: Client, join: Join) -> Dispatcher:
    """Session 1 holds 1 and 2 and offers 3 to session 2, which has 4 to 6 in a window; 3 has 7 to 10 guaranteed.

    Slots 11 and 12 were held and freed: the list is 13, 14, 15, 16, 11, 12.
    """
    other = join("other")
    client.alloc(3)
    other.begin(3)
    guaranteed = Client(Connection(dispatcher, b"zmq-g"), b"G" * 16, {"name": "guaranteed", "guarantee": 4})
    assert guaranteed.session.held == 4
    client.alloc(2)
    client.post(FREE, 11)
    client.post(FREE, 12)
    client.offer(other.number, 3)
    return dispatcher


def test_a_sound_pool_is_sound_and_every_slot_is_counted_once(busy: Dispatcher) -> None:
    pool = audited(busy)
    assert violations(pool) == []
    assert pool.counts() == {"free": 6, "held": 6, "windows": 3, "offered": 1, "quarantined": 0}


def test_who_holds_what_and_in_which_way(busy: Dispatcher) -> None:
    holdings = audited(busy).holdings()
    shown = {(h.slot, h.session, h.name, h.kind, h.offered_to, h.generation) for h in holdings}
    assert shown == {
        (1, 1, "engine-0", "held", None, 1),
        (2, 1, "engine-0", "held", None, 1),
        (3, 1, "engine-0", "offered", 2, 1),
        *((slot, 2, "other", "window", None, 1) for slot in (4, 5, 6)),
        *((slot, 3, "guaranteed", "guarantee", None, 1) for slot in (7, 8, 9, 10)),
    }


def test_since_when_is_told_per_grant_and_older_ones_can_be_asked_for(client: Client, pool: Pool) -> None:
    dispatcher, connection = client.connection.dispatcher, client.connection

    def alloc(count: int, now: float) -> None:
        client.request_id += 1
        dispatcher.handle(
            connection.identity, client.body(protocol.ALLOC, count, None, False), connection.peer, now
        )

    alloc(2, now=10.0)
    alloc(1, now=15.0)
    assert client.post(FREE, 1) is None
    alloc(14, now=20.0)  # slot 1 among them, again
    found = audited(dispatcher, now=22.5)
    ages = {holding.slot: holding.age_s for holding in found.holdings()}
    assert ages == {2: 12.5, 3: 7.5, **dict.fromkeys([1, *range(4, 17)], 2.5)}
    assert {holding.generation for holding in found.holdings() if holding.slot == 1} == {2}
    assert [holding.slot for holding in found.holdings(older_than_s=5.0)] == [2, 3]
    assert not any(holding.at_least for holding in found.holdings())


def test_what_was_accepted_counts_from_then_on(busy: Dispatcher, client: Client) -> None:
    receiver = busy.registry.sessions[2]
    body = protocol.pack((protocol.ACCEPT, 2, 90, EPOCH, 0, 0, False))
    assert busy.handle(receiver.identity, body, client.connection.peer, 30.0) is not None
    (holding,) = [holding for holding in audited(busy, now=31.0).holdings() if holding.slot == 3]
    assert (holding.session, holding.kind, holding.age_s) == (2, "held", 1.0)


def test_tags_are_shown_with_what_they_are_for(client: Client) -> None:
    client.request(protocol.ALLOC, 2, None, False, "request 17")
    client.alloc(1)
    client.request(protocol.BEGIN, 3, None, False, "batch 3")
    holdings = audited(client.connection.dispatcher).holdings()
    assert {holding.slot: holding.tag for holding in holdings} == {
        **dict.fromkeys([1, 2], "request 17"),
        3: None,
        **dict.fromkeys([4, 5, 6], "batch 3"),
    }


def test_the_tag_of_one_that_waits_is_shown_when_it_has_its_slots(client: Client, join: Join) -> None:
    other = join("other")
    client.alloc(16)
    assert other.send(protocol.ALLOC, 2, None, True, "later") is None
    client.post(FREE, 5)
    client.post(FREE, 6)
    holdings = audited(client.connection.dispatcher).holdings()
    assert {h.slot: h.tag for h in holdings if h.session == other.number} == {5: "later", 6: "later"}


TAGS = ["", "x" * 129, "ü" * 65, "two\nlines", "\x1b[31m", 17, b"bytes", None, True, ["x"]]


@pytest.mark.parametrize("tag", TAGS, ids=lambda tag: repr(tag)[:20])
@pytest.mark.parametrize("op", [protocol.ALLOC, protocol.BEGIN])
def test_a_tag_that_is_none_is_malformed_and_changes_nothing(client: Client, op: int, tag: object) -> None:
    client.alloc(3)
    before = everything(client.connection.dispatcher)
    reply = client.request(op, 2, None, False, tag)
    assert reply[2] == MALFORMED
    assert "tag" in reply[3]
    assert everything(client.connection.dispatcher) == before
    assert client.session.tags == {}


@pytest.mark.parametrize("tag", ["x", "x" * 128, "ü" * 64, "request 17/1 [a]"])
def test_a_tag_has_up_to_128_bytes(client: Client, tag: str) -> None:
    assert client.request(protocol.ALLOC, 1, None, False, tag)[2] == protocol.OK
    assert [holding.tag for holding in audited(client.connection.dispatcher).holdings()] == [tag]


def test_a_field_too_many_is_malformed(client: Client) -> None:
    reply = client.request(protocol.ALLOC, 1, None, False, "tag", "more")
    assert reply[2:] == [MALFORMED, "ALLOC has 9 fields: …, count, frees, wait, or 10 with a tag"]
    assert client.request(protocol.BEGIN, 1, None)[2] == MALFORMED


def test_notes_on_what_was_freed_are_forgotten_and_the_others_kept(client: Client) -> None:
    session, dispatcher = client.session, client.connection.dispatcher
    client.request(protocol.ALLOC, 1, None, False, "kept")
    kept = client.request_id
    for turn in range(5000):
        slot = client.request(protocol.ALLOC, 1, None, False, f"turn {turn}", oldest_open=client.request_id)[3]
        client.post(FREE, slot)
        if not turn % 100:
            dispatcher.tidy()
    assert len(session.granted_at) + len(session.tags) < 2500
    assert session.tags[kept] == "kept"
    assert kept in session.granted_at
    assert [(holding.slot, holding.tag) for holding in audited(dispatcher).holdings()] == [(1, "kept")]


def test_notes_on_one_that_waits_are_kept(client: Client, join: Join) -> None:
    other = join("other")
    client.alloc(16)
    assert other.send(protocol.ALLOC, 1, None, True, "later") is None
    other.session.most_notes = 0
    client.connection.dispatcher.tidy()
    client.post(CLEAR)
    assert {holding.tag for holding in audited(client.connection.dispatcher).holdings()} == {"later"}


def test_a_dead_process_is_shown_before_it_is_buried(client: Client, leases: TestLeases) -> None:
    client.alloc(2)
    assert {h.state for h in audited(client.connection.dispatcher).holdings()} == {"live"}
    assert {h.state for h in audited(client.connection.dispatcher, now=SUSPECT_AFTER_S).holdings()} == {"suspect"}
    leases.dead.add(client.lease)
    pool = audited(client.connection.dispatcher)
    assert {holding.state for holding in pool.holdings()} == {"gone"}
    assert violations(pool) == [], "its slots are still its own"


def test_what_is_cancelled_leaves_a_sound_pool(client: Client) -> None:
    client.alloc(3)
    client.post(CANCEL, client.request_id)
    pool = audited(client.connection.dispatcher)
    assert (violations(pool), pool.counts()["free"]) == ([], 16)


def test_an_audit_changes_nothing(busy: Dispatcher) -> None:
    before = everything(busy)
    audit_reply(busy)
    assert everything(busy) == before


@pytest.mark.parametrize("fields", [(), (5,), (None,), ("default", 1)])
def test_an_audit_names_a_pool(connection: Connection, fields: tuple[object, ...]) -> None:
    assert connection.ask(AUDIT, 0, 1, 0, 0, 0, *fields)[2:] == [MALFORMED, "AUDIT has 7 fields: …, pool"]


def test_an_audit_of_no_pool_lists_those_that_there_are(connection: Connection) -> None:
    reply = connection.ask(AUDIT, 0, 1, 0, 0, 0, "other")
    assert reply[2:] == [UNKNOWN_POOL, "there is no pool 'other'; pools here: default"]


def test_an_audit_is_for_the_daemons_own_user(dispatcher: Dispatcher) -> None:
    stranger = Connection(dispatcher, peer=lambda: "localhost:12345:12345:1")
    reply = stranger.ask(AUDIT, 0, 1, 0, 0, 0, "default")
    assert reply[2] == REFUSED
    assert "not uid 12345" in reply[3]


@pytest.mark.parametrize("field", ["rows", "state", "holders", "offers", "sessions", "slots"])
def test_a_reply_that_is_no_audit_is_a_protocol_error(busy: Dispatcher, field: str) -> None:
    reply = audit_reply(busy)
    for wrong in (reply | {field: b"123456789"}, {key: reply[key] for key in reply if key != field}):
        with pytest.raises(ProtocolError, match="answered AUDIT with something else"):
            AuditedPool(wrong)


# What can be wrong: the words of a sound snapshot, changed. In the pool of `busy`.


class Words:
    """The parts of a reply, to be written to."""

    def __init__(self, reply: dict[str, Any]) -> None:
        def numbers(field: str, dtype: str) -> Any:
            return np.frombuffer(bytearray(reply[field]), dtype)

        self.reply = reply
        self.slots = reply["slots"]
        self.free = numbers("free", "<i4")
        self.state = numbers("state", "<i4")
        self.generation = numbers("generation", "<u8")
        self.header = numbers("header", "<u8")
        self.rows = numbers("rows", "<u8").reshape(st.ROW_FIELDS, -1)
        self.sessions = numbers("sessions", "<u8").reshape(-1, st.SESSION_WORDS)
        self.holders = {holder["session"]: holder for holder in reply["holders"]}

    def audited(self) -> AuditedPool:
        parts = ("free", "state", "generation", "header", "rows", "sessions")
        return AuditedPool(self.reply | {part: getattr(self, part).tobytes() for part in parts})


def owner(session: int) -> int:
    return st.owner_word(session)


def _set(array: str, *place: int, to: int) -> Callable[[Words], None]:
    def change(words: Words) -> None:
        getattr(words, array)[place] = to

    return change


def _holder(session: int, **fields: object) -> Callable[[Words], None]:
    return lambda words: words.holders[session].update(fields)


def _offers(*offers: tuple[int, int, list[int]]) -> Callable[[Words], None]:
    def change(words: Words) -> None:
        words.reply["offers"] = [[giver, to, np.array(slots, "<i4").tobytes()] for giver, to, slots in offers]

    return change


def _no_session(session: int) -> Callable[[Words], None]:
    def change(words: Words) -> None:
        words.reply["holders"] = [holder for holder in words.reply["holders"] if holder["session"] != session]

    return change


def _shorter_list(words: Words) -> None:
    words.free = words.free[:-1]


def _swap_places(words: Words) -> None:
    words.free[[1, 2]] = words.free[[2, 1]]


WRONG: dict[str, tuple[Callable[[Words], None], str, tuple[int, ...]]] = {
    "reserved row: held": (_set("rows", st.OWNER, 0, to=owner(1)), "slot 0 is the reserved row", (0,)),
    "reserved row: handed out": (_set("rows", st.GENERATION, 0, to=1), "slot 0 is the reserved row", (0,)),
    "reserved row: listed": (_set("free", 0, to=0), "slot 0 is the reserved row", (0,)),
    "reserved row: in the ledger": (_set("state", 0, to=1), "slot 0 is the reserved row", (0,)),
    "listed twice": (_set("free", 0, to=16), "more than once on the free list", (16,)),
    "not listed": (_set("free", 0, to=16), "neither held nor on the free list", (13,)),
    "one less listed": (_shorter_list, "neither held nor on the free list", (12,)),
    "one less listed: counts": (_shorter_list, "6 slots are counted free, 5 are on the free list", ()),
    "listed and held": (_set("free", 0, to=1), "on the free list, and held", (1,)),
    "listed beyond": (_set("free", 0, to=17), "on the free list, and no slots of 1 to 16", (17,)),
    "listed below": (_set("free", 0, to=-3), "on the free list, and no slots of 1 to 16", (-3,)),
    "listed elsewhere": (_swap_places, "elsewhere on the free list than the slot table says", (14, 15)),
    "one place for two": (
        _set("rows", st.ORDER, 13, to=14),
        "on one place of the free list with another",
        (13, 14),
    ),
    "free in the table": (_set("rows", st.OWNER, 2, to=0), "held, and free in the slot table", (2,)),
    "held in the table": (_set("rows", st.OWNER, 16, to=owner(1)), "free, and held in the slot table", (16,)),
    "two holders": (_set("rows", st.OWNER, 2, to=owner(2)), "held by another in the slot table", (2,)),
    "another holder in the ledger": (_set("state", 2, to=2), "held by another in the slot table", (2,)),
    "offered in the ledger": (
        _set("state", 2, to=1 | OFFERED),
        "offered in one of slot table and ledger only",
        (2,),
    ),
    "not offered in the ledger": (_set("state", 3, to=1), "offered in one of slot table and ledger only", (3,)),
    "another generation": (_set("generation", 4, to=7), "handed out more often in one of slot table", (4,)),
    "never handed out": (_set("rows", st.GENERATION, 1, to=0), "held, and were never handed out", (1,)),
    "unfinished": (_set("header", st.H_DONE, to=1), "left in the middle of a change", ()),
    "unknown kind": (_set("rows", st.OWNER, 1, to=owner(1) + 1), "held in a way that there is not", (1,)),
    "unknown holder": (_set("rows", st.OWNER, 1, to=owner(99)), "held by a session that there is not", (1,)),
    "holder that went": (_no_session(2), "held by a session that there is not", (4, 5, 6)),
    "unknown in the ledger": (_set("state", 1, to=99), "that there is not, for the ledger", (1,)),
    "offered by nobody": (_set("rows", st.OFFERED, 13, to=2), "offered, and held by nobody", (13,)),
    "offered to nobody": (_set("rows", st.OFFERED, 3, to=99), "offered to a session that there is not", (3,)),
    "offered to itself": (_set("rows", st.OFFERED, 3, to=1), "offered to the session that holds them", (3,)),
    "an offer too few": (_offers(), "in an offer that the slot table does not have, or not in one", (3,)),
    "an offer too many": (
        _offers((1, 2, [3]), (1, 2, [2])),
        "in an offer that the slot table does not have",
        (2,),
    ),
    "offered twice": (_offers((1, 2, [3]), (1, 2, [3])), "in more than one offer", (3,)),
    "another's offer": (_offers((2, 1, [3])), "offered by session 2, which has them not", (3,)),
    "free count of the table": (_set("header", st.H_FREE_COUNT, to=5), "5 slots are counted free in the slot", ()),
    "free count of the ledger": (
        lambda words: words.reply.update(free_count=7),
        "7 slots are counted free by the ledger, 6 rows are",
        (),
    ),
    "sum": (_holder(1, held=2), "6 slots are counted free and 9 held, of 16", ()),
    "held count": (_holder(1, held=2), "session 1 (engine-0) is counted to hold 2 slots, not 3", (1, 2, 3)),
    "offered count": (_holder(1, offered=0), "is counted to have offered 0 slots, not 1", (1, 2, 3)),
    "limit": (_holder(1, limit=2), "session 1 (engine-0) holds 3 slots, with a limit of 2", ()),
    "size": (_set("header", st.H_SLOTS, to=15), "the slot table is of 15 slots, the pool has 16", ()),
    "no such session": (_set("sessions", 1, st.S_NUMBER, to=9), "session 9 is in the slot table", ()),
    "session not written": (
        _set("sessions", 1, st.S_NUMBER, to=9),
        "session 2 (other) is not in the slot table",
        (),
    ),
    "session twice": (_set("sessions", 1, st.S_NUMBER, to=1), "a session is more than once in the slot table", ()),
    "applied": (_set("sessions", 0, st.S_APPLIED, to=9), "applied is 2, in the slot table 9", ()),
    "window": (_set("sessions", 1, st.S_WINDOW, to=0), "window is 2, in the slot table 0", ()),
    "guarantee": (_set("sessions", 2, st.S_GUARANTEE, to=5), "promised is 4, in the slot table 5", ()),
    "guarantee not whole": (
        _set("rows", st.REQUEST, 7, to=5),
        "session 3 (guaranteed) has 3 slots of its guarantee of 4",
        (8, 9, 10),
    ),
    "guarantee too large": (_holder(3, guarantee=17), "17 slots are guaranteed, of 16", ()),
    "guarantee that waits": (_holder(3, waits=True), "has 4 slots of its guarantee of 4", (7, 8, 9, 10)),
    "guarantee offered": (_set("rows", st.OFFERED, 7, to=1), "of a guarantee, and offered", (7,)),
}


@pytest.mark.parametrize(("change", "says", "slots"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found_and_the_slots_are_named(
    busy: Dispatcher, change: Callable[[Words], None], says: str, slots: tuple[int, ...]
) -> None:
    words = Words(audit_reply(busy))
    assert violations(words.audited()) == [], "before"
    change(words)
    found = violations(words.audited())
    assert (slots, True) in {(violation.slots, says in violation.what) for violation in found}, found


def test_a_guarantee_of_which_its_holder_gave_something_back_is_no_fault(busy: Dispatcher) -> None:
    holder = busy.registry.sessions[3]
    body = protocol.pack((FREE, 3, 0, EPOCH, 1, 0, 8))
    assert busy.handle(holder.identity, body, lambda: None, 0.0) is None
    assert violations(audited(busy)) == []
