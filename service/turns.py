"""Whose turn it is: grants to those that waited, as soon as there are enough slots for the first of them."""

from __future__ import annotations

from collections.abc import Callable

from mambapool.pool import protocol
from mambapool.pool.errors import MambaPoolError
from mambapool.service.pools import Pool
from mambapool.service.replies import Replies
from mambapool.service.sessions import GUARANTEE_REQUEST, Answer, Session


class Turns:
    """Serves a pool's waiters in the step in which slots became free."""

    def __init__(self, replies: Replies, greeting: Callable[[Session], bytes]) -> None:
        """``greeting(session)`` is the answer to a HELLO whose guarantee was waited for."""
        #: ``(identity, body)`` of replies to those that waited.
        self.outbox: list[tuple[bytes, bytes]] = []
        self._replies = replies
        self._greeting = greeting

    def serve(self, pool: Pool, *, silently: Session | None = None) -> None:
        """Grant to the first in the queue, then the next, while there is enough; nobody is passed over.

        ``silently``: this session is answered by the caller.
        """
        waiting = pool.waiting
        while waiting and waiting.head.count <= pool.ledger.free_count:
            waiter = waiting.pop()
            session = waiter.session
            request_id = GUARANTEE_REQUEST if waiter.op == protocol.HELLO else waiter.request_id
            granted = pool.grant(session, waiter.count, request_id)
            pool.commit()
            if waiter.op == protocol.HELLO:
                body = self._greeting(session)
            else:
                # None: its limit was reached meanwhile.
                answer = self._replies.granted(request_id, granted)
                session.answers[request_id] = answer
                body = answer.body
            if session is not silently:
                self.outbox.append((session.identity, body))
        pool.table.set_waiting(waiting.slots)

    def offered(self, pool: Pool, receiver: Session) -> None:
        """There is an offer: a session that waits for one gets it."""
        request_id = receiver.accepting
        if not request_id:
            return
        receiver.accepting = 0
        try:
            answer = self._replies.granted(request_id, pool.offers.accept(receiver, request_id), kept=True)
        except MambaPoolError as error:  # beyond its limit: no fault of the giver's
            answer = Answer(self._replies.refusal(request_id, error))
        receiver.answers[request_id] = answer
        self.outbox.append((receiver.identity, answer.body))
