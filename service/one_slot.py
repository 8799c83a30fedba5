"""The two messages that come most, each in one go: ALLOC of one slot, maybe with the free of one, and FREE of one.

What they mean is what :class:`~mambapool.service.requests.Requests` and
:class:`~mambapool.service.posted.PostedMessages` say. Whatever is not plain here (a repeat, a gap, a refusal,
somebody who waits, a limit, a fault) changes nothing and is left to them; so there is one place for each rule,
and this one only has to know when none of them applies. Why it is worth a file: a request is answered in half
the time (``bench/README.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgpack

from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots
from mambapool.pool.protocol import MAX_NUMBER, OK
from mambapool.service.sessions import MAX_OPEN, Answer, Session

_unpack = msgpack.unpackb
#: Makes a named tuple in half the time that calling its class takes.
_new = tuple.__new__

# An array of so many fields, and the operation: what every client of ours sends. Others are answered all the same.
_ALLOC: Final = bytes((0x90 | 9, protocol.ALLOC))
_FREE: Final = bytes((0x90 | 7, protocol.FREE))

#: Longer ones name more than one slot. Nothing in so short a body can be over any limit of the wire.
_LONGEST: Final = 96


class OneSlot:
    """Answers what is plain; what has several slots is for ``several``, which does the same there.

    Returns None for everything else, which is then handled as if this had not been asked.
    """

    def __init__(
        self,
        epoch: int,
        sessions: Mapping[int, Session],
        pack: Callable[[Sequence[Any]], bytes],
        several: Callable[[bytes, bytes, float], bytes | None],
    ) -> None:
        self._epoch = epoch
        self._sessions = sessions
        self._pack = pack
        self._several = several

    def answer(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        """The reply to an ALLOC, ``b""`` for a FREE that was applied, None if this is for others to handle."""
        if len(body) > _LONGEST:
            return self._several(identity, body, now)
        if not body.startswith(_ALLOC):
            return (
                self._free(identity, body, now) if body.startswith(_FREE) else self._several(identity, body, now)
            )
        # All in one function, but for what list and table are asked to do: each call would be a good part of the rest.
        try:
            _, number, request_id, epoch, posted, oldest_open, count, freed, wait = _unpack(body)
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
            and count == 1
            and wait is False
            and epoch == self._epoch
            and 0 <= oldest_open <= request_id < MAX_NUMBER
        ):
            return self._several(identity, body, now)
        session = self._sessions.get(number)
        if session is None or session.identity != identity or session.barred or session.recovered:
            return None
        pool = session.pool
        commits = pool.one_slot
        answers = session.answers
        if pool.waiting.slots or commits is None or request_id in answers or not request_id:
            return None
        if pool.lost is not None or request_id < session.oldest_open or len(answers) >= MAX_OPEN:
            return None
        ledger = pool.ledger
        if type(freed) is int:
            if posted != session.applied + 1 or session.held > session.limit:
                return None
            order = ledger.next_order
            try:
                slot = ledger.swap_one(freed, number)
            except InvalidSlots:
                return None  # nothing was changed yet
            commits.swap(freed, order, session.row, posted, slot, number, request_id, ledger.free_count)
            session.applied = posted
        elif freed is None and posted == session.applied and session.held < session.limit:
            slot = ledger.take_one(number)
            if not slot:
                return None
            commits.grant(slot, number, request_id, ledger.free_count)
            session.held += 1
        else:
            return None
        session.heard = now
        session.granted_at[request_id] = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        reply = self._pack((request_id, epoch, OK, slot))
        answers[request_id] = _new(Answer, (reply, slot, False))
        return reply

    def _free(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        try:
            _, number, request_id, epoch, posted, oldest_open, freed = _unpack(body)
        except (ValueError, TypeError):
            return None
        if not (
            type(number)
            is type(request_id)
            is type(posted)
            is type(oldest_open)
            is type(epoch)
            is type(freed)
            is int
            and epoch == self._epoch
            and 0 <= request_id < MAX_NUMBER
            and 0 <= oldest_open < MAX_NUMBER
        ):
            return None
        session = self._sessions.get(number)
        if session is None or session.identity != identity or posted != session.applied + 1:
            return None
        pool = session.pool
        commits = pool.one_slot
        if pool.waiting.slots or commits is None:
            return None
        ledger = pool.ledger
        order = ledger.next_order
        try:
            ledger.give_back_one(freed, number)
        except InvalidSlots:
            return None
        commits.free(freed, order, session.row, posted, ledger.free_count)
        session.held -= 1
        session.applied = posted
        session.heard = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        return b""
