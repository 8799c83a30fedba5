"""What each message means: body in, replies out. Knows no socket, no file and no clock.

``docs/protocol.md`` has the rules. In short: the epoch belongs to the transmission, the request id to the
request; a request that is open is answered the same however often it comes; posted messages are applied in
the order of their numbers, each once; what is malformed is answered and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError, ProtocolError
from mambapool.pool.protocol import MAX_NUMBER, OK
from mambapool.service.attach import AttachRequest, PeerAddress, check_peer
from mambapool.service.audit import snapshot
from mambapool.service.grant_notes import forget_what_was_freed
from mambapool.service.plain_messages import PlainMessages
from mambapool.service.pool_report import pool_status
from mambapool.service.pools import Pool
from mambapool.service.posted import PostedMessages
from mambapool.service.registry import Registry
from mambapool.service.replies import Replies
from mambapool.service.requests import Requests
from mambapool.service.sessions import GUARANTEE_REQUEST, Session
from mambapool.service.turns import Turns
from mambapool.service.waiting import Waiter


class Dispatcher:
    """What one allocator does with a message. Not thread-safe: it belongs to the loop."""

    def __init__(
        self, epoch: int, registry: Registry, *, status_header: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self.epoch = epoch
        self.registry = registry
        self.replies = Replies(epoch)
        #: Messages that were refused because they could not be understood.
        self.malformed = 0
        self._status_header = status_header
        self._turns = Turns(self.replies, self._greeting)
        self._requests = Requests(self.replies, self._turns)
        self._posted = PostedMessages(self.replies, self._turns)
        #: ``(identity, body, now)`` of what comes most and is plain: the reply, ``b""`` where there is none to send.
        #: None, and nothing is changed, for all else.
        self.handle_plain = PlainMessages(epoch, registry.sessions, self.replies.pack).answer
        self._without_session = {
            protocol.HELLO: self._hello,
            protocol.STATUS: self._status,
            protocol.EVICT: self._evict,
            protocol.AUDIT: self._audit,
        }

    @property
    def outbox(self) -> list[tuple[bytes, bytes]]:
        """``(identity, body)`` of replies to others than the sender: whose waiting has ended."""
        return self._turns.outbox

    def handle(self, identity: bytes, body: bytes, peer: PeerAddress, now: float) -> bytes | None:
        """Apply one message from ``identity``; the body to send back, or None. Look at :attr:`outbox` too.

        ``now`` is the monotonic clock in seconds.
        """
        reply = self.handle_plain(identity, body, now)
        if reply is None:
            return self.handle_any(identity, body, peer, now)
        return reply or None

    def handle_any(self, identity: bytes, body: bytes, peer: PeerAddress, now: float) -> bytes | None:
        """:meth:`handle` without a look whether it is plain."""
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
            if op in self._without_session:
                return self._for_anybody(op, identity, request_id, message, peer, now)
            if epoch != self.epoch:
                text = f"this is epoch {self.epoch}, not {epoch}: say HELLO again"
                return self.replies.error(request_id, protocol.WRONG_EPOCH, text)
            session = self.registry.sessions.get(number)
            if session is None or session.identity != identity:
                text = f"no session {number} on this connection: say HELLO"
                return self.replies.error(request_id, protocol.UNKNOWN_SESSION, text)
            session.heard = now
            if op in protocol.POSTED_OPS:
                return self._posted.apply(session, op, posted, message)
            if op == protocol.DETACH:
                return self._detach(session, request_id, message)
            return self._requests.answer(session, op, request_id, posted, oldest_open, message)
        # RecursionError: a value may be nested deeper than Python can show it in the text of an error.
        except (ProtocolError, RecursionError) as error:
            self.malformed += 1
            known = request_id if type(request_id) is int and 0 <= request_id < MAX_NUMBER else 0
            return self.replies.error(known, protocol.MALFORMED, str(error))

    def answer_malformed(self, reason: str) -> bytes:
        """The reply to something that is no message at all."""
        self.malformed += 1
        return self.replies.error(0, protocol.MALFORMED, reason)

    def tidy(self) -> None:
        """Now and then: forget what nobody asks for any more."""
        for session in self.registry.sessions.values():
            forget_what_was_freed(session)

    def lease_released(self, lease_name: bytes, how: str, now: float = 0.0) -> None:
        """The watcher saw a session's lock released; whoever waits for its slots is answered."""
        pool = self.registry.bury(lease_name, how, now)
        if pool is not None:
            self._turns.serve(pool)

    def tick(self, now: float) -> None:
        """Time passes: quarantines end, and whoever waits for their slots is answered."""
        for pool in self.registry.release_quarantined(now):
            self._turns.serve(pool)

    def _for_anybody(
        self, op: int, identity: bytes, request_id: int, message: list[Any], peer: PeerAddress, now: float
    ) -> bytes | None:
        """HELLO, STATUS, EVICT, AUDIT: they need no session, but the daemon's own uid."""
        try:
            check_peer(peer)
            return self._without_session[op](identity, request_id, message, now)
        except ProtocolError:
            raise  # answered, and counted, like anything else that is malformed
        except MambaPoolError as error:
            return self.replies.refusal(request_id, error)

    def _hello(self, identity: bytes, request_id: int, message: list[Any], now: float) -> bytes | None:
        if len(message) != 7:
            raise ProtocolError("HELLO has 7 fields")
        request = AttachRequest.from_wire(message[6])
        session, _ = self.registry.attach(request, identity)
        session.heard = now
        session.hello = (request_id, request.version)
        if session.guarantee and not session.held and not self._guarantee(session.pool, session):
            return None
        return self._greeting(session)

    def _guarantee(self, pool: Pool, session: Session) -> bool:
        """Grant a session's guarantee whole, now or, if False, as soon as its turn comes."""
        if not pool.waiting and pool.grant(session, session.guarantee, GUARANTEE_REQUEST) is not None:
            pool.commit()
            return True
        if pool.waiting.find(session, protocol.HELLO) is None:
            pool.waiting.add(Waiter(session, protocol.HELLO, protocol.HELLO, session.guarantee))
        self._turns.serve(pool, silently=session)
        return bool(session.held)

    def _greeting(self, session: Session) -> bytes:
        """The answer to a session's last HELLO."""
        if session.group is not None:
            session.group.greet(session)
        request_id, version = session.hello
        greeting = {"version": version, "pid": os.getpid(), **self.registry.describe(session)}
        if session.guarantee:
            greeting["granted"] = session.pool.guaranteed_ids(session).astype("<i4").tobytes()
        return self.replies.pack((request_id, self.epoch, OK, greeting))

    def _detach(self, session: Session, request_id: int, message: list[Any]) -> bytes:
        if len(message) != 6:
            raise ProtocolError("DETACH has 6 fields")
        self.registry.end(session, "left", dead=False)
        self._turns.serve(session.pool)
        return self.replies.pack((request_id, self.epoch, OK))

    def _status(self, _identity: bytes, request_id: int, message: list[Any], now: float) -> bytes:
        if len(message) != 6:
            raise ProtocolError("STATUS has 6 fields")
        pools = [pool_status(pool, now) for pool in self.registry.pools.values()]
        status = {"epoch": self.epoch, "pid": os.getpid(), **self._status_header(), "pools": pools}
        return self.replies.pack((request_id, self.epoch, OK, status))

    def _evict(self, _identity: bytes, request_id: int, message: list[Any], _now: float) -> bytes:
        """``[.., session, force]``: the operator ends a session."""
        if len(message) != 8 or type(message[6]) is not int or type(message[7]) is not bool:
            raise ProtocolError("EVICT has 8 fields: …, session, force")
        session = self.registry.find(message[6])
        if session is None:
            raise AllocatorUnavailable(f"there is no session {message[6]}: see `mambapool status`")
        group = session.group
        members = [session] if group is None or not group.formed else list(group.members.values())
        alive = [member for member in members if not member.gone and member.lease.is_held()]
        if alive and not message[7]:
            held = sum(member.held for member in members)
            who = f"session {session.number} ({session.name}, pid {session.pid}) is alive and may"
            if group is not None and group.formed:
                alive.sort(key=lambda member: member.rank)
                pids = ", ".join(f"rank {member.rank} (pid {member.pid})" for member in alive)
                who = f"session {session.number} is of group {group.name}, of which {pids} live and may"
            raise AllocatorUnavailable(
                f"{who} still write to its {held} slots: end that process, or evict it by force"
            )
        if session.dead_since is not None and not message[7]:
            raise AllocatorUnavailable(
                f"session {session.number} ({session.name}, pid {session.pid}) is dead, and its {session.held} slots "
                "are kept back until no work of it on the GPU can write to them: wait, or evict it by force"
            )
        freed = self.registry.evict(session)
        self._turns.serve(session.pool)
        return self.replies.pack((request_id, self.epoch, OK, {"slots": len(freed), "alive": bool(alive)}))

    def _audit(self, _identity: bytes, request_id: int, message: list[Any], now: float) -> bytes:
        """``[.., pool]``: all that is known of one pool, for the operator's process to check."""
        if len(message) != 7 or type(message[6]) is not str:
            raise ProtocolError("AUDIT has 7 fields: …, pool")
        pool = self.registry.pool_named(message[6])
        # Not with the packer that is kept, which would keep room for the longest reply.
        return protocol.pack((request_id, self.epoch, OK, snapshot(pool, now)))
