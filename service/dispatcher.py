"""What each message means: body in, reply out. Knows no socket, no file and no clock.

``docs/protocol.md`` has the rules. In short: the epoch belongs to the transmission, the request id to the
request; a request that is open is answered the same however often it comes; posted messages are applied in
the order of their numbers, each once; what is malformed is answered and changes nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots, MambaPoolError, ProtocolError
from mambapool.pool.protocol import MAX_NUMBER, NONE, OK, pack_ids, unpack_ids
from mambapool.service.attach import AttachRequest, PeerAddress, check_peer
from mambapool.service.ledger import Ids
from mambapool.service.pools import Pool
from mambapool.service.registry import Registry
from mambapool.service.sessions import Answer, Session

_log = logging.getLogger("mambapool.allocator")


class Dispatcher:
    """What one allocator does with a message. Not thread-safe: it belongs to the loop."""

    def __init__(
        self, epoch: int, registry: Registry, *, status_header: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self.epoch = epoch
        self.registry = registry
        self._pack = protocol.packer()
        self._status_header = status_header
        #: Messages that were refused because they could not be understood.
        self.malformed = 0
        self._handlers: dict[int, Callable[[Pool, Session, list[Any]], Answer]] = {
            protocol.ALLOC: self._alloc,
            protocol.BEGIN: self._begin,
        }

    def handle(self, identity: bytes, body: bytes, peer: PeerAddress) -> bytes | None:
        """Apply one message from ``identity``; the body to send back, or None."""
        request_id: object = 0
        try:
            message = protocol.unpack(body, self.registry.max_body_bytes)
            if len(message) < 6:
                raise ProtocolError(f"a request has at least 6 fields, this one {len(message)}")
            op, number, request_id, epoch, posted, oldest_open = message[:6]
            if not (
                type(op)
                is type(number)
                is type(request_id)
                is type(epoch)
                is type(posted)
                is type(oldest_open)
                is int
                and 0 <= request_id < MAX_NUMBER
                and 0 <= posted < MAX_NUMBER
                and 0 <= oldest_open < MAX_NUMBER
            ):
                raise ProtocolError(
                    "op, session, request id, epoch, posted and oldest open are whole numbers from 0 to 2^63 - 1"
                )
            if op == protocol.HELLO:
                return self._hello(identity, request_id, message, peer)
            if op == protocol.STATUS:
                return self._status(request_id, message, peer)
            if epoch != self.epoch:
                return self._error(request_id, protocol.WRONG_EPOCH, f"this is epoch {self.epoch}, not {epoch}")
            session = self.registry.sessions.get(number)
            if session is None or session.identity != identity:
                text = f"no session {number} on this connection: connect again"
                return self._error(request_id, protocol.UNKNOWN_SESSION, text)
            if op in protocol.POSTED_OPS:
                return self._posted(session, op, posted, message)
            return self._request(session, op, request_id, posted, oldest_open, message)
        # RecursionError: a value may be nested deeper than Python can show it in the text of an error.
        except (ProtocolError, RecursionError) as error:
            self.malformed += 1
            known = request_id if type(request_id) is int and 0 <= request_id < MAX_NUMBER else 0
            return self._error(known, protocol.MALFORMED, str(error))

    def answer_malformed(self, reason: str) -> bytes:
        """The reply to something that is no message at all."""
        self.malformed += 1
        return self._error(0, protocol.MALFORMED, reason)

    def _request(
        self, session: Session, op: int, request_id: int, posted: int, oldest_open: int, message: list[Any]
    ) -> bytes:
        answer = session.answers.get(request_id)
        if answer is not None:
            return answer.body
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        if request_id < session.oldest_open or request_id in session.barred or not request_id:
            text = f"request {request_id} is not open: it was cancelled, or its reply was acknowledged"
            return self._error(request_id, protocol.NOT_OPEN, text)
        pool = session.pool
        if op == protocol.DETACH:
            if len(message) != 6:
                raise ProtocolError("DETACH has 6 fields")
            self.registry.detach(session)
            return self._pack((request_id, self.epoch, OK))
        handler = self._handlers.get(op)
        if handler is None:
            raise ProtocolError(f"unknown operation {op}")
        # A request that carries frees is itself posted message number `posted`, and brings it.
        carries = len(message) > 7 and message[7] is not None
        if posted > session.applied + carries:
            return self._pack((request_id, self.epoch, protocol.GAP, session.applied))
        session.check_room()
        try:
            answer = handler(pool, session, message)
        except InvalidSlots as error:
            answer = Answer(self._pack((request_id, self.epoch, *protocol.error_payload(error))))
        session.answers[request_id] = answer
        return answer.body

    def _alloc(self, pool: Pool, session: Session, message: list[Any]) -> Answer:
        """``[.., count, frees]``: the frees first, then the grant, in one commit."""
        try:
            _, _, request_id, _, posted, _, count, frees = message
        except ValueError:
            raise ProtocolError("ALLOC has 8 fields: …, count, frees") from None
        _check_count(count)
        if frees is not None:
            self._apply_frees(pool, session, posted, frees)
        granted = pool.grant(session, count, request_id)
        pool.commit()
        return self._granted(request_id, granted)

    def _begin(self, pool: Pool, session: Session, message: list[Any]) -> Answer:
        """``[.., count, frees, partial]``: ends an open window, applies the frees, opens a new one."""
        try:
            _, _, request_id, _, posted, _, count, frees, partial = message
        except ValueError:
            raise ProtocolError("BEGIN has 9 fields: …, count, frees, partial") from None
        _check_count(count)
        if type(partial) is not bool:
            raise ProtocolError(f"BEGIN: partial must be true or false, not {type(partial).__name__}")
        if frees is not None:
            self._apply_frees(pool, session, posted, frees)
        pool.close_window(session)
        if partial:
            count = min(count, pool.ledger.free_count)
        granted = pool.grant(session, count, request_id) if count else None
        if granted is not None:
            pool.open_window(session, request_id)
        pool.commit()
        return self._granted(request_id, granted)

    def _posted(self, session: Session, op: int, number: int, message: list[Any]) -> bytes | None:
        """Apply posted message ``number`` if it is the next one; answer only what is wrong."""
        if number <= session.applied:
            _check_number(number)
            return None  # a repeat
        if number != session.applied + 1:
            return self._pack((0, self.epoch, protocol.GAP, session.applied))
        if len(message) != 7:
            raise ProtocolError(f"{protocol.OP_NAMES[op]} has 7 fields")
        pool = session.pool
        session.close_requests_below(message[5])
        try:
            if op == protocol.CANCEL:
                self._cancel(pool, session, number, message[6])
            elif op == protocol.CLEAR:
                if message[6] is not None:
                    raise ProtocolError(f"CLEAR takes nil, not {type(message[6]).__name__}")
                pool.clear(session, number)
            else:
                self._apply_frees(pool, session, number, message[6], nil_allowed=op == protocol.END)
                if op == protocol.END:
                    pool.close_window(session)
        except InvalidSlots as error:
            _log.warning("session %d (%s), posted message %d: %s", session.number, session.name, number, error)
            return self._pack((0, self.epoch, *protocol.error_payload(error)))
        pool.commit()
        return None

    def _apply_frees(
        self, pool: Pool, session: Session, number: int, frees: object, *, nil_allowed: bool = False
    ) -> None:
        """Stage posted message ``number``. One that is refused is used up all the same."""
        if frees is None and nil_allowed:
            pool.skip(session, number)
            return
        ids = frees if type(frees) is int else unpack_ids(frees)
        if number <= session.applied:
            _check_number(number)
            return  # carried by a request that was sent again
        try:
            pool.give_back(session, ids, number)
        except InvalidSlots:
            pool.skip(session, number)
            pool.commit()
            raise

    def _cancel(self, pool: Pool, session: Session, number: int, request_id: object) -> None:
        """Give back what ``request_id`` was granted, or bar it if it has not come yet."""
        if type(request_id) is not int or not 0 < request_id < MAX_NUMBER:
            raise ProtocolError("CANCEL names a request id")
        if request_id not in session.answers:
            session.check_room()
        answer = session.answers.pop(request_id, None)
        ids: Ids | None = None
        if answer is not None and answer.granted is not None:
            ids = pool.still_granted(session, answer.granted, request_id)
        if ids is not None and len(ids):
            pool.give_back(session, ids, number)
        else:
            pool.skip(session, number)
        if session.window == request_id:
            pool.close_window(session)
        if request_id >= session.oldest_open:
            session.barred.add(request_id)

    def _hello(self, identity: bytes, request_id: int, message: list[Any], peer: PeerAddress) -> bytes:
        try:
            if len(message) != 7:
                raise ProtocolError("HELLO has 7 fields")
            check_peer(peer)
            request = AttachRequest.from_wire(message[6])
            session = self.registry.attach(request, identity)
        except ProtocolError:
            raise  # answered, and counted, like anything else that is malformed
        except MambaPoolError as error:
            return self._pack((request_id, self.epoch, *protocol.error_payload(error)))
        reply = {"version": request.version, "pid": os.getpid(), **self.registry.describe(session)}
        return self._pack((request_id, self.epoch, OK, reply))

    def _status(self, request_id: int, message: list[Any], peer: PeerAddress) -> bytes:
        if len(message) != 6:
            raise ProtocolError("STATUS has 6 fields")
        try:
            check_peer(peer)
        except MambaPoolError as error:
            return self._pack((request_id, self.epoch, *protocol.error_payload(error)))
        pools = [pool.status() for pool in self.registry.pools.values()]
        status = {"epoch": self.epoch, "pid": os.getpid(), **self._status_header(), "pools": pools}
        return self._pack((request_id, self.epoch, OK, status))

    def _granted(self, request_id: int, granted: int | Ids | None) -> Answer:
        if granted is None:
            return Answer(self._pack((request_id, self.epoch, NONE)))
        ids = granted if isinstance(granted, int) else pack_ids(granted)
        return Answer(self._pack((request_id, self.epoch, OK, ids)), granted)

    def _error(self, request_id: int, status: int, text: str) -> bytes:
        return self._pack((request_id, self.epoch, status, text))


def _check_number(posted: int) -> None:
    if not posted:
        raise ProtocolError("what frees slots, and every posted message, has a number from 1 on in posted")


def _check_count(count: object) -> None:
    if type(count) is not int or not 0 < count < 2**31:
        raise ProtocolError(f"count must be a whole number from 1 to {2**31 - 1}, not {count!r}"[:200])
