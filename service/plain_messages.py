"""The messages that come most, each in one go: BEGIN and ALLOC, maybe with frees, FREE of one slot, END with some.

What they mean is what :class:`~mambapool.service.requests.Requests` and
:class:`~mambapool.service.posted.PostedMessages` say. Whatever is not plain here (a repeat, a gap, a refusal,
somebody who waits, a limit, a fault) changes nothing and is left to them; so there is one place for each rule,
and this one only has to know when none of them applies. Why it is worth a file: a request is answered in half
the time (``bench/README.md``). Ids of several slots stay the bytes that came, from the message into list, record
and reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgpack

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.errors import InvalidSlots
from mambapool.pool.protocol import MAX_NUMBER, OK
from mambapool.service.pools import Pool
from mambapool.service.sessions import MAX_OPEN, Answer, Session

_unpack = msgpack.unpackb
#: Makes a named tuple in half the time that calling its class takes.
_new = tuple.__new__

# An array of so many fields, and the operation: what every client of ours sends. Others are answered all the same.
_REQUESTS: Final = (bytes((0x90 | 9, protocol.ALLOC)), bytes((0x90 | 9, protocol.BEGIN)))
_POSTED: Final = (bytes((0x90 | 7, protocol.FREE)), bytes((0x90 | 7, protocol.END)))

#: Nothing in so short a body can be over any limit of the wire; a longer one holds ids, and no list or map.
_SHORT: Final = 96


class PlainMessages:
    """Answers what is plain. Returns None for all else, which is then handled as if this had not been asked."""

    def __init__(
        self, epoch: int, sessions: Mapping[int, Session], pack: Callable[[Sequence[Any]], bytes]
    ) -> None:
        self._epoch = epoch
        self._sessions = sessions
        self._pack = pack

    def answer(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        """The reply to a BEGIN or ALLOC, ``b""`` for a FREE or END that was applied, None for others to handle."""
        if not body.startswith(_REQUESTS):
            return self._give_back(identity, body, now) if body.startswith(_POSTED) else None
        # One slot is granted in this very function: each call more would be a good part of the rest.
        try:
            op, number, request_id, epoch, posted, oldest_open, count, freed, otherwise = (
                _unpack(body) if len(body) <= _SHORT else _unpack(body, max_array_len=9, max_map_len=0)
            )
        except (ValueError, TypeError):
            return None
        if not (
            type(number)
            is type(request_id)
            is type(posted)
            is type(oldest_open)
            is type(count)
            is type(epoch)
            is int
            and epoch == self._epoch
            and 0 <= oldest_open <= request_id < MAX_NUMBER
            and otherwise is False  # neither partial nor to be waited for
        ):
            return None
        session = self._sessions.get(number)
        if session is None or session.identity != identity or session.barred or session.recovered:
            return None
        pool = session.pool
        answers = session.answers
        if pool.waiting.slots or pool.lost is not None or request_id in answers or not request_id:
            return None
        if request_id < session.oldest_open or len(answers) >= MAX_OPEN:
            return None
        granted: int | bytes | None
        commits = pool.one_slot
        if count != 1 or op != protocol.ALLOC or commits is None:
            granted = self._grant_several(pool, session, op, request_id, posted, count, freed)
            if granted is None:
                return None
        elif type(freed) is int:
            if posted != session.applied + 1 or session.held > session.limit:
                return None
            ledger = pool.ledger
            order = ledger.next_order
            try:
                granted = ledger.swap_one(freed, number)
            except InvalidSlots:
                return None  # nothing was changed yet
            commits.swap(freed, order, session.row, posted, granted, number, request_id, ledger.free_count)
            session.applied = posted
        elif freed is None and posted == session.applied and session.held < session.limit:
            ledger = pool.ledger
            granted = ledger.take_one(number)
            if not granted:
                return None
            commits.grant(granted, number, request_id, ledger.free_count)
            session.held += 1
        else:
            return None
        session.heard = now
        session.granted_at[request_id] = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        reply = self._pack((request_id, epoch, OK, granted))
        answers[request_id] = _new(Answer, (reply, granted, False))
        return reply

    @staticmethod
    def _grant_several(
        pool: Pool, session: Session, op: int, request_id: int, posted: int, count: int, freed: object
    ) -> bytes | None:
        """The ids, when all of them are to be had and all frees are good; nothing has changed otherwise."""
        commits = pool.batches
        if count < 2 or commits is None:
            return None
        freeing = 0
        if freed is not None:
            freeing = _count(freed)
            if not freeing:
                return None
        if posted != session.applied + (freeing > 0):
            return None
        ledger = pool.ledger
        if session.held + count - freeing > session.limit or ledger.free_count + freeing < count:
            return None
        # Nothing is refused from here on, but what give_back_packed() refuses before it changes anything.
        at = pool.table.layout.session(session.row)
        if isinstance(freed, bytes):
            order = ledger.next_order
            try:
                index = ledger.give_back_packed(freed, session.number)
            except InvalidSlots:
                return None
            commits.free(freed, index, order, at + st.S_APPLIED, posted)
            session.applied = posted
        taken = ledger.take_packed(count, session.number)
        assert taken is not None, f"pool {pool.name} counted {ledger.free_count} slots as free"
        packed, index, generations = taken
        commits.grant(packed, index, generations, st.owner_word(session.number), request_id)
        if op == protocol.BEGIN:
            commits.window(at + st.S_WINDOW, request_id)
            session.window = request_id
        commits.commit(ledger.free_count)
        session.held += count - freeing
        return packed

    def _give_back(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        try:
            op, number, request_id, epoch, posted, oldest_open, freed = (
                _unpack(body) if len(body) <= _SHORT else _unpack(body, max_array_len=7, max_map_len=0)
            )
        except (ValueError, TypeError):
            return None
        if not (
            type(number) is type(request_id) is type(posted) is type(oldest_open) is type(epoch) is int
            and epoch == self._epoch
            and 0 <= request_id < MAX_NUMBER
            and 0 <= oldest_open < MAX_NUMBER
        ):
            return None
        session = self._sessions.get(number)
        if session is None or session.identity != identity or posted != session.applied + 1:
            return None
        pool = session.pool
        one_slot, batches = pool.one_slot, pool.batches
        if pool.waiting.slots or one_slot is None or batches is None:
            return None
        ledger = pool.ledger
        order = ledger.next_order
        freeing = 1 if type(freed) is int else _count(freed)
        try:
            if op == protocol.FREE:
                if type(freed) is not int:
                    return None
                ledger.give_back_one(freed, number)
                one_slot.free(freed, order, session.row, posted, ledger.free_count)
            else:
                if type(freed) is not bytes or not freeing:
                    return None
                index = ledger.give_back_packed(freed, number)
                at = pool.table.layout.session(session.row)
                batches.free(freed, index, order, at + st.S_APPLIED, posted)
                batches.window(at + st.S_WINDOW, 0)
                batches.commit(ledger.free_count)
                session.window = 0
        except InvalidSlots:
            return None  # nothing was changed yet
        session.held -= freeing
        session.applied = posted
        session.heard = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        return b""


def _count(packed: object) -> int:
    """How many ids these are; 0 for what is no ``bin`` of some."""
    return 0 if type(packed) is not bytes or len(packed) % 4 else len(packed) // 4
