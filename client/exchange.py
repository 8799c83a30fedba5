"""One request at a time over a session's connection, by any thread of its process.

Whoever makes a call uses the connection itself, under a lock: a thread of its own for the socket would cost two
wake-ups per call, more than the round trip. What is posted never waits for that lock: who holds it looks for
posted messages once more after letting go.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from mambapool.client.connection import CLOSED, Connection
from mambapool.client.dealer import LOOK_MS
from mambapool.client.posted import Posted
from mambapool.client.replies import plain_grant
from mambapool.pool import protocol
from mambapool.pool.errors import ClientClosed, MambaPoolError
from mambapool.pool.runtime_dir import RuntimeDir

_GRANTS = (protocol.ALLOC, protocol.BEGIN)


class Exchange:
    """Requests that are answered at once, and posted messages. Safe in several threads.

    Not usable after a fork: see :mod:`mambapool.client.worker`, which looks.
    """

    def __init__(
        self, directory: RuntimeDir, timeout: float, hello: dict[str, Any], *, deadline: float | None = None
    ) -> None:
        """Connect and attach; ``hello`` is the map of HELLO, ``timeout`` in seconds bounds every wait.

        Attaching ends at ``deadline``, on the monotonic clock, if that comes first.
        """
        self.directory = directory
        self.timeout = timeout
        attached_by = self._deadline() if deadline is None else deadline
        self.connection = Connection(directory, timeout, hello, attached_by)
        #: What the allocator told of the session and its pool.
        self.session = self.connection.session
        self.number = self.connection.number
        self._slots: int = self.session["slots"]
        self.table = self.connection.table
        self.posted = self.connection.posted
        self.refusals = self.connection.refusals
        #: Whoever uses the connection has it.
        self.lock = threading.Lock()
        #: Who only tries the lock sets this first, and is then told, by :attr:`on_used`, when it is free.
        self.wanted = False
        #: Called, without the lock, after something was sent, too: then a sign on the socket may be gone.
        self.on_used: Callable[[], None] | None = None
        self.closed = False
        #: In a forked child: what is here is the parent's.
        self.forked = False
        #: A kept request that was given up while nobody answered.
        self._unresolved = 0
        #: Since when nothing was sent, as the background thread sees it: so no call has to look at the clock.
        self.quiet_since = time.monotonic()
        self._messages_seen = 0

    @property
    def messages(self) -> int:
        """Messages sent so far, requests and posted ones."""
        return self.connection.messages

    def call(
        self, op: int, *arguments: Any, frees: Posted | None = None, deadline: float | None = None
    ) -> list[Any]:
        """Send a request and wait for its reply: ``[id, epoch, status, …]``, status OK or NONE.

        Other statuses raise. ``frees`` travels inside the request, as the posted message that it is. Raises
        :class:`AllocatorUnavailable` after ``timeout`` seconds, or at ``deadline``, on the monotonic clock,
        waiting for other threads' calls included; what the request was granted meanwhile is given back by a
        CANCEL.
        """
        # What most calls need is in this function, and no clock: each step more is felt, with the caches cold.
        lock = self.lock
        if not lock.acquire(blocking=False):
            self.take()
        elif self.closed:
            self._refuse_closed()
        request_id = 0
        try:
            connection = self.connection
            posted = self.posted
            number = posted.last if frees is None else frees.number
            before = number if frees is None else number - 1
            request_id = connection.last_request = connection.last_request + 1
            if posted.sent == before and connection.attached and not connection.waiting:
                # Nothing else is under way: the answer is the next thing that comes.
                header = (op, self.number, request_id, connection.epoch, number, request_id)
                body = connection.dealer.exchange(connection.pack(header + arguments))
                connection.messages += 1
                posted.sent = number
                if body is None:
                    deadline = self._deadline() - LOOK_MS / 1e3 if deadline is None else deadline
                    self._check_waited(deadline, f"no answer within {self.timeout:g} s")
                    reply = None
                else:
                    reply = plain_grant(body, request_id) or connection.take(body, request_id)
            else:
                self._transmit(request_id, op, arguments, frees, deadline)
                reply = None
            if reply is None or reply[2] > protocol.NONE:
                deadline = self._deadline() if deadline is None else deadline
                reply = self._await_reply(request_id, op, arguments, frees, deadline, reply)
            elif posted.queue:
                # What went before is applied: else the answer were another one.
                posted.forget_applied(number)
            if self.refusals and op in _GRANTS:
                # Something before it was refused: as if this had not been asked. An offer stands: its receiver has it.
                self._raise_refusal()
        except BaseException:  # Ctrl-C too: whatever ends the wait, nobody takes the answer any more
            if request_id and op in protocol.CANCELLED_OPS:
                self.posted.append(protocol.CANCEL, request_id, 0)
            raise
        finally:
            if self.connection.waiting:
                self.connection.close_request(request_id)
            lock.release()
            if self.closed or self.wanted or self.posted.sent != self.posted.last:
                self._after_use()
        if (
            reply[2] == protocol.OK
            and len(reply) == 4
            and type(slot := reply[3]) is int
            and 0 < slot <= self._slots
        ):
            return reply
        return self._checked(op, reply)

    def _raise_refusal(self) -> None:
        with contextlib.suppress(IndexError):  # another thread raises it
            raise self.refusals.pop(0)

    def _checked(self, op: int, reply: list[Any]) -> list[Any]:
        try:
            return self.connection.checked(op, reply)
        except MambaPoolError:
            self.flush()  # what makes no sense was given back
            raise

    def post(self, op: int, argument: int | bytes | None, slots: int) -> None:
        """Queue a posted message and send it, unless another thread has the socket, which then does."""
        self.posted.append(op, argument, slots)
        self.flush()

    def flush(self) -> None:
        """Send what is posted, without waiting. What the pipe does not take stays queued."""
        sent = False
        while self.posted.sent != self.posted.last and self.connection.attached:
            # If the lock is taken, its holder comes by here after having let go of it.
            if not self.lock.acquire(blocking=False):
                break
            try:
                if self.closed or not self.connection.send_posted(self.posted.last):
                    break
                sent = True
            finally:
                self.lock.release()
        if (sent or self.wanted) and self.on_used is not None:
            self.wanted = False
            self.on_used()

    def abandon(self) -> None:
        """Close the socket and the lease without a word."""
        self.closed = True
        self.connection.abandon()

    def _abandon_if_closed(self) -> None:
        """Called after the lock was let go of, and after a close() that did not get it: one of both gets it here."""
        if self.closed and self.lock.acquire(blocking=False):
            self.abandon()
            self.lock.release()

    def _turn(self) -> _Turn:
        """The connection is this thread's; what others posted meanwhile is sent afterwards."""
        return _Turn(self)  # a new one: kept, it would be a cycle, and a closed session's table would stay mapped

    def take(self) -> Connection:
        """The connection is this thread's until :meth:`let_go`."""
        # Without a timeout first: that is ten times faster where nobody has it.
        if not self.lock.acquire(blocking=False) and not self.lock.acquire(timeout=self.timeout):
            raise self.connection.unavailable(f"another thread waited for it for {self.timeout:g} s")
        if self.closed:
            self._refuse_closed()
        return self.connection

    def _refuse_closed(self) -> NoReturn:
        self.let_go()
        raise ClientClosed(CLOSED)

    def let_go(self) -> None:
        """What others posted meanwhile is sent now."""
        self.lock.release()
        self._after_use()

    def _after_use(self) -> None:
        self._abandon_if_closed()
        if self.wanted or self.posted.sent != self.posted.last:
            self.flush()

    def _exchange(
        self, request_id: int, op: int, arguments: tuple[Any, ...], frees: Posted | None, deadline: float
    ) -> list[Any]:
        """Send until there is a reply; the allocator answers a repeat with the same one."""
        self._transmit(request_id, op, arguments, frees, deadline)
        return self._await_reply(request_id, op, arguments, frees, deadline, None)

    def _transmit(
        self, request_id: int, op: int, arguments: tuple[Any, ...], frees: Posted | None, deadline: float | None
    ) -> None:
        if not self.connection.attached:
            self.connection.attach_again(self._deadline() if deadline is None else deadline)
        self.connection.transmit(request_id, op, arguments, frees)

    def _await_reply(
        self,
        request_id: int,
        op: int,
        arguments: tuple[Any, ...],
        frees: Posted | None,
        deadline: float,
        reply: list[Any] | None,
    ) -> list[Any]:
        """Until there is an answer to what was sent; ``reply`` is what has come for it already."""
        connection = self.connection
        while True:
            if reply is None:
                reply = connection.receive(request_id, deadline)
            if reply is None:
                if not connection.is_known:
                    connection.attach_again(deadline)
            elif reply[2] == protocol.GAP:
                self.posted.rewind(reply[3])
            elif reply[2] in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
                if op == protocol.DETACH:
                    return reply
                connection.attach_again(deadline)
            else:
                return reply
            # Whoever answers each time, and never with an answer, is not waited for any longer.
            if time.monotonic() >= deadline:
                raise connection.unavailable(f"no answer within {self.timeout:g} s")
            connection.transmit(request_id, op, arguments, frees)
            reply = None

    def _check_waited(self, deadline: float, reason: str) -> None:
        ended = self.connection.ended
        if ended or time.monotonic() > deadline:
            raise self.connection.unavailable(ended or reason)

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout


class _Turn:
    """Has the connection inside. No generator: every call comes by here."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __enter__(self) -> Connection:
        return self._exchange.take()

    def __exit__(self, *_error: object) -> None:
        self._exchange.let_go()
