"""Requests of a session: answered once, and the same way again while they are open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots, MambaPoolError, ProtocolError
from mambapool.pool.protocol import check_tag, unpack_ids
from mambapool.service.pools import Pool
from mambapool.service.posted import apply_frees
from mambapool.service.replies import Replies
from mambapool.service.sessions import Answer, Session
from mambapool.service.turns import Turns
from mambapool.service.waiting import Waiter

_Handler = Callable[[Pool, Session, list[Any]], Answer | None]


class Requests:
    """ALLOC, BEGIN, OFFER, ACCEPT, PING."""

    def __init__(self, replies: Replies, turns: Turns) -> None:
        self._replies = replies
        self._turns = turns
        self._handlers: dict[int, _Handler] = {
            protocol.ALLOC: self._alloc,
            protocol.BEGIN: self._begin,
            protocol.OFFER: self._offer,
            protocol.ACCEPT: self._accept,
        }

    def answer(
        self, session: Session, op: int, request_id: int, posted: int, oldest_open: int, message: list[Any]
    ) -> bytes | None:
        """The reply; None when it comes later, or for PING never."""
        answer = session.answers.get(request_id)
        if answer is not None:
            return answer.body
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        if op == protocol.PING:
            if len(message) != 6:
                raise ProtocolError("PING has 6 fields")
            return self._replies.gap(0, session.applied) if posted > session.applied else None
        if request_id < session.oldest_open or request_id in session.barred or not request_id:
            text = f"request {request_id} is not open: it was cancelled, or its reply was acknowledged"
            return self._replies.error(request_id, protocol.NOT_OPEN, text)
        pool = session.pool
        if pool.lost is not None:
            return self._replies.error(request_id, protocol.POOL_LOST, f"pool {pool.name} is lost: {pool.lost}")
        handler = self._handlers.get(op)
        if handler is None:
            raise ProtocolError(f"unknown operation {op}")
        # A request that carries frees is itself posted message number `posted`, and brings it.
        carries = len(message) > 8 and message[7] is not None
        if posted > session.applied + carries:
            return self._replies.gap(request_id, session.applied)
        session.check_room()
        answer = self._granted_before(session, op, request_id)
        if answer is None:
            try:
                answer = handler(pool, session, message)
            except ProtocolError:
                raise
            except MambaPoolError as error:
                answer = Answer(self._replies.refusal(request_id, error))
        if answer is None:
            return None
        session.answers[request_id] = answer
        return answer.body

    def _granted_before(self, session: Session, op: int, request_id: int) -> Answer | None:
        """What the allocator before this one granted, when its reply did not arrive."""
        ids = session.recovered.pop(request_id, None)
        if ids is None:
            return None
        return self._replies.granted(request_id, ids, kept=op == protocol.ACCEPT)

    def _alloc(self, pool: Pool, session: Session, message: list[Any]) -> Answer | None:
        """``[.., count, frees, wait]``: the frees first, then the grant, in one commit."""
        try:
            _, _, request_id, _, posted, _, count, frees, wait = message
        except ValueError:
            return self._tagged(self._alloc, pool, session, message)
        _check_count(count)
        if type(wait) is not bool:
            raise ProtocolError(f"ALLOC: wait must be true or false, not {type(wait).__name__}")
        if pool.waiting:
            return self._alloc_behind_others(pool, session, message)
        if frees is not None:
            apply_frees(pool, session, posted, frees)
        granted = pool.grant(session, count, request_id)
        pool.commit()
        if granted is None and wait:
            return self._wait(pool, session, request_id, count)
        return self._replies.granted(request_id, granted)

    def _alloc_behind_others(self, pool: Pool, session: Session, message: list[Any]) -> Answer | None:
        """Somebody waits: what this one frees is theirs first, and it overtakes nobody."""
        _, _, request_id, _, posted, _, count, frees, wait = message
        if pool.waiting.find(session, request_id) is not None:
            return None  # asked again while it waits
        if frees is not None:
            apply_frees(pool, session, posted, frees)
            pool.commit()
            self._turns.serve(pool)
        granted = None
        if not pool.waiting:
            granted = pool.grant(session, count, request_id)
            pool.commit()
        if granted is None and wait:
            return self._wait(pool, session, request_id, count)
        return self._replies.granted(request_id, granted)

    def _wait(self, pool: Pool, session: Session, request_id: int, count: int) -> Answer | None:
        if count > session.limit or session.held + count > session.limit < pool.slots:
            # Not waited for: everybody else would wait behind it, until this client itself frees something.
            # Without a limit of its own it waits: then there are not so many for anybody else either.
            return self._replies.granted(request_id, None)
        if count > pool.not_promised:
            # As little: guarantees are kept until their engines end.
            return self._replies.granted(request_id, None)
        pool.waiting.add(Waiter(session, request_id, protocol.ALLOC, count))
        pool.table.set_waiting(pool.waiting.slots)
        return None

    def _begin(self, pool: Pool, session: Session, message: list[Any]) -> Answer | None:
        """``[.., count, frees, partial]``: ends an open window, applies the frees, opens a new one."""
        try:
            _, _, request_id, _, posted, _, count, frees, partial = message
        except ValueError:
            return self._tagged(self._begin, pool, session, message)
        _check_count(count)
        if type(partial) is not bool:
            raise ProtocolError(f"BEGIN: partial must be true or false, not {type(partial).__name__}")
        if frees is not None:
            apply_frees(pool, session, posted, frees)
        pool.close_window(session)
        if pool.waiting:
            pool.commit()
            self._turns.serve(pool)
        if partial:
            count = min(count, pool.ledger.free_count, session.limit - session.held)
        granted = None
        if count > 0 and not pool.waiting:
            granted = pool.grant(session, count, request_id)
        if granted is not None:
            pool.open_window(session, request_id)
        pool.commit()
        return self._replies.granted(request_id, granted)

    def _tagged(self, handler: _Handler, pool: Pool, session: Session, message: list[Any]) -> Answer | None:
        """ALLOC or BEGIN with a tag as its last field: remembered for audit, if the request is not refused."""
        if len(message) != 10:
            flag = "wait" if message[0] == protocol.ALLOC else "partial"
            name = protocol.OP_NAMES[message[0]]
            raise ProtocolError(f"{name} has 9 fields: …, count, frees, {flag}, or 10 with a tag")
        try:
            check_tag(message[9])
        except (TypeError, ValueError) as error:
            raise ProtocolError(str(error)) from None
        answer = handler(pool, session, message[:9])
        session.tags[message[2]] = message[9]
        return answer

    def _offer(self, pool: Pool, session: Session, message: list[Any]) -> Answer:
        """``[.., ids, receiver]``."""
        if len(message) != 8 or type(message[7]) is not int:
            raise ProtocolError("OFFER has 8 fields: …, ids, receiver")
        ids, receiver = unpack_ids(message[6]), pool.holder(message[7])
        if not len(ids):
            raise InvalidSlots("an offer of no slots")
        if not pool.offers.is_made(session, ids, receiver):  # a repeat, from before a restart
            pool.offers.make(session, ids, receiver, message[2])
            self._turns.offered(pool, pool.sessions[receiver])
        return self._replies.done(message[2])

    def _accept(self, pool: Pool, session: Session, message: list[Any]) -> Answer | None:
        """``[.., wait]``: the oldest offer to this session, or the next one; asked again without, no more."""
        if len(message) != 7 or type(message[6]) is not bool:
            raise ProtocolError("ACCEPT has 7 fields: …, wait")
        ids = pool.offers.accept(session, message[2])
        session.accepting = message[2] if ids is None and message[6] else 0
        if session.accepting:
            return None
        return self._replies.granted(message[2], ids, kept=True)


def _check_count(count: object) -> None:
    if type(count) is not int or not 0 < count < 2**31:
        raise ProtocolError(f"count must be a whole number from 1 to {2**31 - 1}, not {count!r}"[:200])
