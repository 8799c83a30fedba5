"""A session's calls that wait for their turn, and what keeps it alive, on top of its :class:`Exchange`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mambapool.client.connection import CLOSED, REPEAT_S
from mambapool.client.exchange import Exchange
from mambapool.client.posted import Posted
from mambapool.pool import protocol
from mambapool.pool.errors import ClientClosed, MambaPoolError

#: How often a session says that it lives when nothing else does.
PING_S = 1.0

# How often a call that waits for its turn looks whether it has come.
_TURN_LOOK_S = 0.002
# How long the background thread waits for an allocator.
_TICK_WAITS_S = 0.5


class Transport(Exchange):
    """Requests that wait for their reply, and posted messages that do not. Safe in several threads.

    Outlives its allocator: after a restart it says HELLO again, as the same session, and repeats what was not
    answered or applied. Not usable after a fork: see :mod:`mambapool.client.worker`, which looks.
    """

    @contextlib.contextmanager
    def waited_for(
        self, op: int, *arguments: Any, frees: Posted | None = None, wait: float
    ) -> Iterator[list[Any] | None]:
        """:meth:`call_and_wait`, whose answer the allocator keeps until the end: a CANCEL posted inside finds it."""
        reply = self.call_and_wait(op, *arguments, frees=frees, wait=wait, leave_open=True)
        try:
            yield reply
        finally:
            if reply is not None and reply[2] == protocol.OK:
                self._close(reply[0])

    def call_and_wait(
        self,
        op: int,
        *arguments: Any,
        frees: Posted | None = None,
        wait: float,
        kept: bool = False,
        leave_open: bool = False,
    ) -> list[Any] | None:
        """Like :meth:`call` for a request that is answered when its turn comes; None after ``wait`` seconds.

        Other threads' calls go on meanwhile. A request that was not answered is cancelled. ``kept``: nothing takes
        back what it was granted, so that it stays open and is asked for again, at the next such call at the latest.
        """
        deadline = time.monotonic() + wait
        if kept and self._unresolved:
            reply = self._resolve(self._unresolved, op)
            if reply is not None:
                return self._checked(op, reply)
        with self._turn() as connection:
            request_id = connection.new_request()
            connection.waiting[request_id] = None
        reply = None
        try:
            self._await_turn(request_id, op, arguments, frees, deadline)
        finally:
            with self.lock:
                reply = connection.waiting[request_id]
                if reply is None and kept:
                    # A later allocator knows no more what came by a transfer: a CANCEL would free it.
                    self._unresolved = request_id
                else:
                    if reply is None:
                        cancel = self.posted.append(protocol.CANCEL, request_id, 0)
                    if not leave_open or reply is None or reply[2] != protocol.OK:
                        connection.close_request(request_id)
            self.flush()
        if reply is None:
            if kept:
                reply = self._resolve(request_id, op)
            else:
                self._until_applied(cancel.number)
        try:
            return None if reply is None else self._checked(op, reply)
        except MambaPoolError:
            if leave_open:
                self._close(request_id)
            raise

    def _close(self, request_id: int) -> None:
        with self.lock:
            self.connection.close_request(request_id)
        self.flush()

    @property
    def has_unresolved(self) -> bool:
        """Whether there is a kept request of before, of which the next such call says what became of it."""
        return bool(self._unresolved)

    def _resolve(self, request_id: int, op: int) -> list[Any] | None:
        """What became of a kept request that was not answered in time: its grant, or None; it waits no longer."""
        with self._turn() as connection:
            # Open until it is known: nothing that is sent meanwhile says that its reply has arrived.
            connection.waiting[request_id] = None
            self._unresolved = request_id
            reply = self._exchange(request_id, op, (False,), None, self._deadline())
            connection.close_request(request_id)
            self._unresolved = 0
        return None if reply[2] == protocol.NONE else reply

    def _until_applied(self, number: int) -> None:
        """None is an answer only of an allocator that answers: wait until it has that posted message."""
        deadline = self._deadline()
        while not self.is_applied(number, deadline):
            time.sleep(_TURN_LOOK_S / 10)

    def is_applied(self, number: int, deadline: float) -> bool:
        """Whether the allocator has posted message ``number``, which is sent if need be; raises after the deadline."""
        self.flush()
        if self.table.applied_and_free(self.session["row"])[0] >= number:
            return True
        self._check_open()
        self._check_waited(deadline, f"no answer within {self.timeout:g} s")
        return False

    def settle(self) -> npt.NDArray[np.int64]:
        """Wait until the allocator has applied what was posted; returns the free list of that moment."""
        deadline = self._deadline()
        while (free := self.settled(deadline)) is None:
            time.sleep(0.0002)
        return free

    def settled(self, deadline: float) -> npt.NDArray[np.int64] | None:
        """The free list if what was posted is applied, None if not yet; raises after the deadline."""
        self.flush()
        applied, free = self.table.applied_and_free_slots(self.session["row"])
        self.posted.forget_applied(applied)
        if not self.posted:
            return free
        self._check_open()
        self._check_waited(deadline, f"posted messages were not applied within {self.timeout:g} s")
        return None

    def _check_open(self) -> None:
        """Another thread has closed the client: what is awaited here never comes."""
        if self.closed:
            raise ClientClosed(CLOSED)

    def tick(self) -> None:
        """For the background thread: see what came, say that we live, find the allocator after a restart."""
        connection = self.connection
        connection.tell_end()
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.closed or connection.ended:
                return
            connection.drain()
            if not connection.is_known:
                self.wanted = True
                with contextlib.suppress(MambaPoolError):
                    connection.attach_again(time.monotonic() + _TICK_WAITS_S)
            elif connection.messages != self._messages_seen:
                self._messages_seen = connection.messages
                self.quiet_since = time.monotonic()
            elif time.monotonic() - self.quiet_since > PING_S:
                self.quiet_since = time.monotonic()
                self.wanted = True
                connection.ping()
        finally:
            self.lock.release()
            self._abandon_if_closed()
            self.flush()

    def detach(self, timeout: float) -> None:
        """End the session and close; returns after ``timeout`` seconds at the latest, answered or not."""
        if not self.lock.acquire(timeout=timeout):
            # Another thread waits for an answer: who has the socket closes it, when that is over.
            self.closed = True
            self._abandon_if_closed()
            return
        try:
            # Nobody there to leave: what is held there ends with the daemon, or with the lease.
            with contextlib.suppress(MambaPoolError):
                request_id = self.connection.new_request()
                self._exchange(request_id, protocol.DETACH, (), None, time.monotonic() + timeout)
        finally:
            self.abandon()
            self.lock.release()

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's lease connection, which would hide the parent's death."""
        self.forked = True
        self.connection.lease.abandon()

    def _await_turn(
        self, request_id: int, op: int, arguments: tuple[Any, ...], frees: Posted | None, deadline: float
    ) -> None:
        """Until something came for the request, or the deadline."""
        repeat_at = 0.0
        while True:
            with self._turn() as connection:
                if (reason := connection.end()) is not None:
                    raise reason
                now = time.monotonic()
                if not connection.is_known:
                    connection.attach_again(max(deadline, now + _TICK_WAITS_S))
                    repeat_at = 0.0
                if now >= repeat_at:
                    connection.transmit(request_id, op, arguments, frees)
                    repeat_at = now + REPEAT_S
                connection.drain()
                reply = connection.waiting[request_id]
                if reply is None:
                    if now >= deadline:
                        return
                elif reply[2] == protocol.GAP:
                    self.posted.rewind(reply[3])
                elif reply[2] in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
                    connection.attached = False
                else:
                    return
                if reply is not None:  # not answered, but to be asked again
                    connection.waiting[request_id] = None
                    repeat_at = 0.0
            time.sleep(_TURN_LOOK_S)
