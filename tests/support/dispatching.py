"""A dispatcher without a socket, and connections that hand it bodies as a socket would."""

from __future__ import annotations

import json
import multiprocessing.synchronize
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.layout import Geometry
from mambapool.pool.protocol import pack, unpack
from mambapool.service.audited import AuditedPool
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.pools import Pool, Shard
from mambapool.service.registry import Registry
from mambapool.service.sessions import Session
from mambapool.service.table_writer import SlotTableWriter

#: Below 2^48, as the allocator's; takes all eight bytes of a msgpack uint64 all the same.
EPOCH = 0x0123_4567_89AB

# Of :func:`write_busily`.
BUSY_SLOTS = 64
BUSY_CYCLE = 23

#: The allocator's process in ``messages.json``.
GOLDEN_PID = 4242
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "messages.json"


#: Bodies that no allocator can understand.
NOT_MESSAGES = {
    "nothing": b"",
    "unused code": b"\xc1",
    "array of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
    "bin of 2^32 - 1": b"\xc6\xff\xff\xff\xff",
    "text of 2^32 - 1": b"\xdb\xff\xff\xff\xff",
    "map of 2^32 - 1": b"\xdf\xff\xff\xff\xff",
    "500 deep": b"\x91" * 500 + b"\xc0",
    "1025 deep": b"\x91" * 1025 + b"\xc0",
    "100000 deep": b"\x91" * 100_000 + b"\xc0",
    "bad text": b"\xa2\xff\xfe",
    "two values": b"\x01\x02",
    "message and more": pack((protocol.STATUS, 0, 1, 0, 0, 0)) + b"\x00",
    "half a message": pack((protocol.STATUS, 0, 1, 0, 0, 0))[:-1],
    "array as key": b"\x97\x05\x00\x01\x00\x00\x00\x81\x91\x01\x02",
    "number as key": b"\x97\x05\x00\x01\x00\x00\x00\x81\x01\x02",
    "time stamp": msgpack.packb([5, 0, 1, 0, 0, 0, msgpack.Timestamp(1)]),
    "extension": msgpack.packb([5, 0, 1, 0, 0, 0, msgpack.ExtType(5, b"x")]),
    "empty extension": b"\x97\x05\x00\x01\x00\x00\x00\xc7\x00\x05",
    "empty time stamp": b"\x97\x05\x00\x01\x00\x00\x00\xc7\x00\xff",
    "number": b"\x07",
    "text": b"\xa5hello",
    "map": b"\x81\xa2op\x05",
    "nil": b"\xc0",
    "empty array": b"\x90",
    "1025 fields": msgpack.packb([1] * 1025),
    "long text": msgpack.packb([5, 0, 1, 0, 0, 0, "x" * 20_000]),
    "long bin": msgpack.packb([5, 0, 1, 0, 0, 0, bytes(100_000)]),
}


def own_peer() -> str:
    """What zmq says of a peer that is this very process."""
    return f"localhost:{os.geteuid()}:{os.getegid()}:{os.getpid()}"


def make_pool(
    directory: Path,
    slots: int = 16,
    name: str = "default",
    *,
    geometry: Geometry | None = None,
    shards: Sequence[Shard] = (),
    uuid: bytes = bytes(range(16)),
    max_sessions: int = 4,
    ends_with_last_session: bool = False,
) -> Pool:
    """A pool with a real slot table in ``directory``."""
    layout = st.TableLayout(slots, max_sessions)
    digest = geometry.digest if geometry else bytes(16)
    table = SlotTableWriter.create(
        directory / f"{name}.table",
        layout,
        uuid=uuid,
        digest=digest,
        epoch=EPOCH,
        created_by_client=ends_with_last_session,
    )
    return Pool(name, table, uuid, geometry, tuple(shards), ends_with_last_session=ends_with_last_session)


def make_registry(directory: Path, *pools: Pool, leases: TestLeases | None = None) -> Registry:
    """The registry of ``pools``; those that clients ask for are made in ``directory``."""

    def make(name: str, slots: int) -> Pool:
        return make_pool(directory, slots, name, ends_with_last_session=True)

    return Registry(pools, make, leases or TestLeases())


def make_session(pool: Pool, number: int = 1, **options: Any) -> Session:
    """A session attached to ``pool`` without a dispatcher; ``options`` override its fields."""
    usual: dict[str, Any] = {
        "lease": TestLeases().open(number.to_bytes(16, "little")),
        "limit": pool.slots,
        "name": f"engine-{number}",
        "pid": 4000 + number,
        "rank": 0,
        "identity": b"zmq-%d" % number,
    }
    session = Session(number=number, row=pool.rows.take(), pool=pool, **(usual | options))
    pool.attach(session)
    return session


def hello_map(lease: bytes = b"L" * 16, **changes: Any) -> dict[str, Any]:
    """The map of a HELLO as a client sends it."""
    usual = {
        "versions": [1, 1],
        "lease": lease,
        "pool": "default",
        "name": "engine-0",
        "pid": 4310,
        "rank": 0,
        "guarantee": 0,
        "limit": None,
        "create_slots": None,
        "slots": None,
        "expect": None,
    }
    return usual | changes


def ids(*slots: int) -> bytes:
    """Several ids as they travel."""
    return np.array(slots, "<i4").tobytes()


def slots_of(reply: Sequence[Any]) -> list[int]:
    """The ids in a reply, or in its refusal."""
    slots: list[int] = protocol.unpack_ids(reply[3]).tolist()
    return slots


@dataclass
class Connection:
    """One zmq connection: whatever is sent comes to the dispatcher under one routing id."""

    dispatcher: Dispatcher
    identity: bytes = b"zmq-1"
    peer: Callable[[], str | None] = own_peer

    def send_body(self, body: bytes) -> bytes | None:
        return self.dispatcher.handle(self.identity, body, self.peer, now=0.0)

    def send(self, *fields: Any) -> list[Any] | None:
        """Hand over one message; the fields of what comes back, or None."""
        reply = self.send_body(pack(fields))
        return None if reply is None else unpack(reply, len(reply))

    def ask(self, *fields: Any) -> list[Any]:
        """Like :meth:`send`, of a message that has to be answered."""
        reply = self.send(*fields)
        assert reply is not None, f"{fields} was not answered"
        return reply

    def hello(self, lease: bytes = b"L" * 16, **changes: Any) -> list[Any]:
        return self.ask(protocol.HELLO, 0, 1, 0, 0, 0, hello_map(lease, **changes))

    def late_bodies(self) -> list[bytes]:
        """Take what has come for this connection since the last look, and is no answer to what it just sent."""
        outbox = self.dispatcher.outbox
        taken = [body for identity, body in outbox if identity == self.identity]
        outbox[:] = [(identity, body) for identity, body in outbox if identity != self.identity]
        return taken

    def late(self) -> list[list[Any]]:
        """Like :meth:`late_bodies`, decoded."""
        return [unpack(body, len(body)) for body in self.late_bodies()]


@dataclass
class Client:
    """An attached session that numbers its messages as a client does, unless told otherwise."""

    connection: Connection
    lease: bytes = b"L" * 16
    options: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    request_id: int = 1
    posted: int = 0

    def __post_init__(self) -> None:
        reply = self.connection.hello(self.lease, **self.options)
        assert reply[2] == protocol.OK, reply
        self.number = reply[3]["session"]

    @property
    def session(self) -> Session:
        """What the allocator knows of it."""
        return self.connection.dispatcher.registry.sessions[self.number]

    def body(self, op: int, *arguments: Any, **header: int) -> bytes:
        """A request's body; ``header`` overrides id, epoch, posted or oldest_open."""
        usual = {"id": self.request_id, "epoch": EPOCH, "posted": self.posted, "oldest_open": 0}
        fields = usual | header
        return pack((op, self.number, *fields.values(), *arguments))

    def send(self, op: int, *arguments: Any, **header: int) -> list[Any] | None:
        """Send a request under a new id, unless ``id`` names one; None if its answer comes later."""
        self.request_id = header.setdefault("id", self.request_id + 1)
        reply = self.connection.send_body(self.body(op, *arguments, **header))
        return None if reply is None else unpack(reply, len(reply))

    def request(self, op: int, *arguments: Any, **header: int) -> list[Any]:
        """Like :meth:`send`, of a request that is answered at once."""
        reply = self.send(op, *arguments, **header)
        assert reply is not None, "a request was not answered"
        return reply

    def alloc(self, count: int, frees: int | bytes | None = None, **header: int) -> list[Any]:
        """ALLOC; one that carries frees is the next posted message too."""
        return self._carrying(protocol.ALLOC, (count, frees, False), header)

    def wait_for(self, count: int, frees: int | bytes | None = None, **header: int) -> list[Any] | None:
        """ALLOC that waits for its turn, None then."""
        if frees is not None and "posted" not in header:
            self.posted += 1
        return self.send(protocol.ALLOC, count, frees, True, **header)

    def offer(self, receiver: int, *slots: int, **header: int) -> list[Any]:
        return self.request(protocol.OFFER, protocol.pack_ids(np.array(slots, np.int32)), receiver, **header)

    def accept(self, *, wait: bool = False, **header: int) -> list[Any] | None:
        return self.send(protocol.ACCEPT, wait, **header)

    def late(self) -> list[list[Any]]:
        """Answers that have come since the last look."""
        return self.connection.late()

    def begin(
        self, count: int, frees: int | bytes | None = None, partial: bool = False, **header: int
    ) -> list[Any]:
        return self._carrying(protocol.BEGIN, (count, frees, partial), header)

    def post(self, op: int, argument: Any = None, **header: int) -> list[Any] | None:
        """Send the next posted message, or the one that ``posted`` numbers."""
        number = header.pop("posted", self.posted + 1)
        self.posted = max(self.posted, number)
        reply = self.connection.send_body(self.body(op, argument, id=0, posted=number, **header))
        return None if reply is None else unpack(reply, len(reply))

    def _carrying(self, op: int, arguments: tuple[Any, ...], header: dict[str, int]) -> list[Any]:
        if arguments[1] is not None and "posted" not in header:
            self.posted += 1
        return self.request(op, *arguments, **header)


def audit_reply(dispatcher: Dispatcher, pool: str = "default", *, now: float = 0.0) -> dict[str, Any]:
    """What an operator's process is sent of a pool."""
    body = dispatcher.handle(b"operator", pack((protocol.AUDIT, 0, 1, 0, 0, 0, pool)), own_peer, now)
    assert body is not None
    reply: dict[str, Any] = unpack(body, len(body))[3]
    return reply


def audited(dispatcher: Dispatcher, pool: str = "default", *, now: float = 0.0) -> AuditedPool:
    return AuditedPool(audit_reply(dispatcher, pool, now=now))


def everything(dispatcher: Dispatcher) -> list[Any]:
    """All that an allocator keeps, to be compared: what is in the tables, and what it knows of sessions."""
    tables = {name: pool.table.path.read_bytes() for name, pool in dispatcher.registry.pools.items()}
    sessions = [
        (s.number, s.identity, s.applied, s.window, s.held, s.offered, s.accepting, s.oldest_open)
        for s in dispatcher.registry.sessions.values()
    ]
    requests = [
        (list(s.answers), s.barred.copy(), list(s.recovered)) for s in dispatcher.registry.sessions.values()
    ]
    offers = [
        (offer.giver.number, offer.receiver, offer.ids.tolist())
        for pool in dispatcher.registry.pools.values()
        for offer in pool.offers
    ]
    waiters = [
        (waiter.session.number, waiter.request_id, waiter.count)
        for pool in dispatcher.registry.pools.values()
        for waiter in pool.waiting._queue
    ]
    return [tables, sessions, requests, offers, waiters, dispatcher.outbox.copy()]


class TableFile:
    """All words of a slot table's file, to be read, and to be left as a crash would leave them."""

    def __init__(self, writer: SlotTableWriter) -> None:
        self.layout = writer.layout
        self._writer = writer
        self._words: st.Words = np.memmap(writer.path, np.uint64, "r+")

    def words(self) -> st.Words:
        """A copy of the whole file."""
        return np.array(self._words)

    def interrupt(self, before: st.Words, after: st.Words, stores: int) -> None:
        """Make it what a crash leaves after the commit point and so many of the stores that follow it.

        ``before`` and ``after`` are what :meth:`words` gave around one commit.
        """
        changed = np.flatnonzero(before[: self.layout.redo] != after[: self.layout.redo])
        changed = changed[(changed != st.H_SEQ) & (changed != st.H_DONE)]
        missing = changed[min(stores, len(changed)) :]
        self._words[:] = after
        self._words[missing] = before[missing]
        self._words[st.H_DONE] = before[st.H_DONE]

    def apply_record_again(self) -> None:
        """What a recovery does when ``seq`` and ``done`` differ; done here when they do not, too."""
        if self._words[st.H_DONE] == self._words[st.H_SEQ]:
            self._words[st.H_DONE] -= np.uint64(1)
        self._writer._finish()


def write_busily(directory: Path, stop: multiprocessing.synchronize.Event) -> None:
    """Commit as fast as possible: the k-th commit frees all and grants ``k % BUSY_CYCLE`` slots."""
    pool = make_pool(directory, BUSY_SLOTS)
    session = make_session(pool)
    while not stop.is_set():
        for _ in range(100):
            number = session.applied + 1
            pool.give_back(session, pool.ledger.held_by(session.number), number)
            if number % BUSY_CYCLE:
                pool.grant(session, number % BUSY_CYCLE, number)
            pool.commit()


@dataclass(frozen=True)
class Exchange:
    """One message to the allocator and what comes back, from ``messages.json``; see ``docs/protocol.md``."""

    name: str
    #: Which connection it comes over: each session's own, and another one after that was lost.
    connection: int
    #: ``"request"`` never reaches the allocator, ``"reply"`` never the client.
    lost: str | None
    #: The exchange with which the reply comes, if it was waited for.
    later: str | None
    request: bytes
    reply: bytes | None
    #: The decoded fields of both.
    request_fields: list[Any]
    reply_fields: list[Any]


def golden(part: str) -> list[Exchange]:
    """The exchanges of one part. Those of ``session`` and ``turns`` follow each other."""

    def read(exchange: dict[str, Any]) -> Exchange:
        request, reply = exchange["request"], exchange["reply"] or {"hex": None, "fields": []}
        return Exchange(
            exchange["name"],
            exchange["connection"],
            exchange["lost"],
            exchange["later"],
            bytes.fromhex(request["hex"]),
            bytes.fromhex(reply["hex"]) if reply["hex"] else None,
            _from_json(request["fields"]),
            _from_json(reply["fields"]),
        )

    return [read(exchange) for exchange in json.loads(GOLDEN.read_text())["exchanges"] if exchange["part"] == part]


def _from_json(value: Any) -> Any:
    """A msgpack value as the file writes it: a bin is ``{"bin": HEX}``."""
    if isinstance(value, dict):
        return bytes.fromhex(value["bin"]) if "bin" in value else {k: _from_json(v) for k, v in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
