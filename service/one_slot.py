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

# An array of so many fields, and the operation: what every client of ours sends. Others are answered all the same.
_ALLOC: Final = bytes((0x90 | 9, protocol.ALLOC))
_FREE: Final = bytes((0x90 | 7, protocol.FREE))

#: Longer ones name more than one slot. Nothing in so short a body can be over any limit of the wire.
_LONGEST: Final = 96


class OneSlot:
    """Answers what is plain; None for everything else, which is then handled as if this had not been asked."""

    def __init__(
        self, epoch: int, sessions: Mapping[int, Session], pack: Callable[[Sequence[Any]], bytes]
    ) -> None:
        self._epoch = epoch
        self._sessions = sessions
        self._pack = pack

    def answer(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        """The reply to an ALLOC, ``b""`` for a FREE that was applied, None if this is for others to handle."""
        if len(body) > _LONGEST:
            return None
        if body.startswith(_ALLOC):
            return self._alloc(identity, body, now)
        if body.startswith(_FREE):
            return self._free(identity, body, now)
        return None

    def _alloc(self, identity: bytes, body: bytes, now: float) -> bytes | None:
        try:
            _, number, request_id, epoch, posted, oldest_open, count, freed, wait = _unpack(body)
        except (ValueError, TypeError):
            return None
        if not (
            type(number) is type(request_id) is type(posted) is type(oldest_open) is type(count) is int
            and count == 1
            and wait is False
            and epoch == self._epoch
            and type(epoch) is int
            and 0 <= oldest_open <= request_id < MAX_NUMBER
        ):
            return None
        session = self._sessions.get(number)
        if session is None or session.identity != identity or session.barred or session.recovered:
            return None
        pool = session.pool
        answers = session.answers
        if pool.waiting.slots or pool.one_slot is None or request_id in answers or not request_id:
            return None
        if pool.lost is not None or request_id < session.oldest_open or len(answers) >= MAX_OPEN:
            return None
        if type(freed) is int:
            if posted != session.applied + 1 or session.held > session.limit:
                return None
            try:
                slot = pool.one_slot.swap(session, freed, posted, request_id)
            except InvalidSlots:
                return None  # nothing was changed yet
        elif freed is None and posted == session.applied and session.held < session.limit:
            slot = pool.one_slot.grant(session, request_id)
            if not slot:
                return None
        else:
            return None
        session.heard = now
        session.granted_at[request_id] = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        reply = self._pack((request_id, epoch, OK, slot))
        answers[request_id] = Answer(reply, slot)
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
        if pool.waiting.slots or pool.one_slot is None:
            return None
        try:
            pool.one_slot.free(session, freed, posted)
        except InvalidSlots:
            return None
        session.heard = now
        if oldest_open > session.oldest_open:
            session.close_requests_below(oldest_open)
        return b""
