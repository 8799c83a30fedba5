"""Messages of several slots, each in one go: BEGIN and ALLOC, maybe with frees, and END with some.

As :mod:`~mambapool.service.one_slot` is for one slot: what is not plain changes nothing here and is left to
:class:`~mambapool.service.requests.Requests` and :class:`~mambapool.service.posted.PostedMessages`, which have the
rules. Ids stay the bytes that came, from the message into list, record and reply (``bench/README.md`` has what that
is worth).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgpack

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.errors import InvalidSlots
from mambapool.pool.protocol import MAX_NUMBER, OK
from mambapool.service.sessions import MAX_OPEN, Answer, Session

_unpack = msgpack.unpackb

# An array of so many fields, and the operation: what every client of ours sends. Others are answered all the same.
_GRANTS: Final = (bytes((0x90 | 9, protocol.BEGIN)), bytes((0x90 | 9, protocol.ALLOC)))
_END: Final = bytes((0x90 | 7, protocol.END))


class PlainBatches:
    """Answers what is plain; None for everything else, which is then handled as if this had not been asked."""

    def __init__(
        self, epoch: int, sessions: Mapping[int, Session], pack: Callable[[Sequence[Any]], bytes]
    ) -> None:
        self._epoch = epoch
        self._sessions = sessions
        self._pack = pack

    def answer(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        """The reply to a BEGIN or ALLOC, ``b""`` for an END that was applied, None if this is for others to handle."""
        if body.startswith(_GRANTS):
            return self._grant(identity, body, now)
        if body.startswith(_END):
            return self._end(identity, body, now)
        return None

    def _grant(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        try:
            # No list or map in it: nothing in a body of the wire's length is over any other limit.
            op, number, request_id, epoch, posted, oldest_open, count, freed, otherwise = _unpack(
                body, max_array_len=9, max_map_len=0
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
            and count > 1
            and otherwise is False  # neither partial nor to be waited for
        ):
            return None
        session = self._sessions.get(number)
        if session is None or session.identity != identity or session.barred or session.recovered:
            return None
        pool = session.pool
        answers = session.answers
        if pool.waiting.slots or pool.batches is None or pool.lost is not None:
            return None
        if request_id in answers or request_id < session.oldest_open or not request_id or len(answers) >= MAX_OPEN:
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
        commits = pool.batches
        at = pool.table.layout.session(session.row)
        if freeing:
            order = ledger.next_order
            try:
                index = ledger.give_back_packed(freed, number)
            except InvalidSlots:
                return None
            commits.free(freed, index, order, at + st.S_APPLIED, posted)
            session.applied = posted
        taken = ledger.take_packed(count, number)
        assert taken is not None, f"pool {pool.name} counted {ledger.free_count} slots as free"
        packed, index, generations = taken
        commits.grant(packed, index, generations, st.owner_word(number), request_id)
        if op == protocol.BEGIN:
            commits.window(at + st.S_WINDOW, request_id)
            session.window = request_id
        commits.commit(ledger.free_count)
        session.held += count - freeing
        session.heard = now
        session.granted_at[request_id] = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        reply = self._pack((request_id, epoch, OK, packed))
        answers[request_id] = Answer(reply, packed)
        return reply

    def _end(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        try:
            _, number, request_id, epoch, posted, oldest_open, freed = _unpack(
                body, max_array_len=7, max_map_len=0
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
        freeing = _count(freed)
        if pool.waiting.slots or pool.batches is None or not freeing:
            return None
        ledger = pool.ledger
        order = ledger.next_order
        try:
            index = ledger.give_back_packed(freed, number)
        except InvalidSlots:
            return None  # nothing was changed yet
        at = pool.table.layout.session(session.row)
        pool.batches.free(freed, index, order, at + st.S_APPLIED, posted)
        pool.batches.window(at + st.S_WINDOW, 0)
        pool.batches.commit(ledger.free_count)
        session.applied = posted
        session.held -= freeing
        session.window = 0
        session.heard = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        return b""


def _count(packed: object) -> int:
    """How many ids these are; 0 for what is no ``bin`` of some."""
    return 0 if type(packed) is not bytes or len(packed) % 4 else len(packed) // 4
