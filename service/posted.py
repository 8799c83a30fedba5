"""Posted messages of a session: numbered, applied in order and each once, answered only when refused."""

from __future__ import annotations

import logging
from typing import Any

from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots, ProtocolError
from mambapool.pool.protocol import MAX_NUMBER, unpack_ids
from mambapool.service.ledger import Ids
from mambapool.service.pools import Pool
from mambapool.service.replies import Replies
from mambapool.service.sessions import Session
from mambapool.service.turns import Turns

_log = logging.getLogger("mambapool.allocator")


class PostedMessages:
    """FREE, END, CLEAR, CANCEL, CLOSE."""

    def __init__(self, replies: Replies, turns: Turns) -> None:
        self._replies = replies
        self._turns = turns

    def apply(self, session: Session, op: int, number: int, message: list[Any]) -> bytes | None:
        """Apply posted message ``number`` if it is the next one; a notice if something is wrong with it."""
        if number <= session.applied:
            _check_number(number)
            return None  # a repeat
        if number != session.applied + 1:
            return self._replies.gap(0, session.applied)
        if len(message) != 7:
            raise ProtocolError(f"{protocol.OP_NAMES[op]} has 7 fields")
        pool = session.pool
        session.close_requests_below(message[5])
        try:
            if op == protocol.CANCEL:
                _cancel(pool, session, number, message[6])
            elif op == protocol.CLEAR:
                if message[6] is not None:
                    raise ProtocolError(f"CLEAR takes nil, not {type(message[6]).__name__}")
                pool.clear(session, number)
            elif op == protocol.CLOSE:
                _close(session, message[6])
                pool.skip(session, number)
            else:
                apply_frees(pool, session, number, message[6], nil_allowed=op == protocol.END)
                if op == protocol.END:
                    pool.close_window(session)
        except InvalidSlots as error:
            _log.warning("session %d (%s), message %d: %s", session.number, session.name, number, error)
            return self._replies.refusal(0, error)
        pool.commit()
        if pool.waiting:
            self._turns.serve(pool)
        return None


def apply_frees(pool: Pool, session: Session, number: int, frees: object, *, nil_allowed: bool = False) -> None:
    """Stage posted message ``number``, which frees. One that is refused is used up all the same."""
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


def _cancel(pool: Pool, session: Session, number: int, request_id: object) -> None:
    """Give back what ``request_id`` was granted, end its offer, or bar it if it has not come yet or still waits."""
    if type(request_id) is not int or not 0 < request_id < MAX_NUMBER:
        raise ProtocolError("CANCEL names a request id")
    if request_id not in session.answers:
        session.check_room()
    answer = session.answers.get(request_id)
    if answer is not None and answer.kept:
        # A transfer that was accepted: given back it would be nobody's. The client asks for it again.
        pool.skip(session, number)
        return
    session.answers.pop(request_id, None)
    if pool.waiting.remove(session, request_id):
        pool.table.set_waiting(pool.waiting.slots)
    if session.accepting == request_id:
        session.accepting = 0
    pool.offers.take_back(session, request_id)
    granted = session.recovered.pop(request_id, None) if answer is None else answer.granted
    if isinstance(granted, bytes):
        granted = unpack_ids(granted)
    ids: Ids | None = None if granted is None else pool.still_granted(session, granted, request_id)
    if ids is not None and len(ids):
        pool.give_back(session, ids, number)
    else:
        pool.skip(session, number)
    if session.window == request_id:
        pool.close_window(session)
    if request_id >= session.oldest_open:
        session.barred.add(request_id)


def _close(session: Session, requests: object) -> None:
    """The client has the replies to these requests, or has cancelled them: they may be forgotten."""
    if type(requests) is not list or not all(type(known) is int and 0 < known < MAX_NUMBER for known in requests):
        raise ProtocolError("CLOSE names request ids")
    for known in requests:
        session.answers.pop(known, None)
        session.recovered.pop(known, None)
        session.barred.discard(known)


def _check_number(posted: int) -> None:
    if not posted:
        raise ProtocolError("what frees slots, and every posted message, has a number from 1 on in posted")
