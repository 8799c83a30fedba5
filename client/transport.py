"""One session's connection to the allocator. The only file of the client that knows zmq.

Whoever makes a call uses the socket itself, under a lock: a thread of its own for the socket would cost two
wake-ups per call, more than the round trip. What is posted never waits for that lock: who holds it looks for
posted messages once more after letting go.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from zmq.backend import Socket as BackendSocket

from mambapool.client.lease import Lease
from mambapool.client.posted import Posted, PostedQueue
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError, PoolLost, ProtocolError
from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path
from mambapool.pool.slot_table import H_LOST, SlotTableReader

#: Messages that wait for an allocator that does not read; beyond, posted ones stay in their queue.
HIGH_WATER_MARK = 10_000

#: A request that was not answered is sent again so often: an allocator that was restarted may know nothing of it.
REPEAT_S = 0.5

#: How often a session says that it lives when nothing else does.
PING_S = 1.0

LOST = "the memory of this pool is gone, its keeper died: connect again when it is back"

# How often a call that waits for a reply looks whether the allocator is another one by now.
_LOOK_MS = 20
# … and one that waits for its turn, whether it has come.
_TURN_LOOK_S = 0.002
# How long the background thread waits for an allocator.
_TICK_WAITS_S = 0.5

_NOBLOCK = int(zmq.NOBLOCK)

_SESSION_KEYS = {"session", "row", "applied", "slots", "limit", "guarantee", "uuid", "table", "shards"}

_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}
_context_lock = threading.Lock()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's one context. A forked child makes its own: its parent's has no threads there."""
    with _context_lock:
        pid = os.getpid()
        if pid not in _contexts:
            _contexts[pid] = zmq.Context()
        return _contexts[pid]


class Transport:
    """Requests that wait for their reply, and posted messages that do not. Safe in several threads.

    Outlives its allocator: after a restart it says HELLO again, as the same session, and repeats what was not
    answered or applied. Not usable after a fork: see :mod:`mambapool.client.worker`, which looks.
    """

    def __init__(
        self, directory: RuntimeDir, timeout: float, hello: dict[str, Any], *, deadline: float | None = None
    ) -> None:
        """Connect and attach; ``hello`` is the map of HELLO, ``timeout`` in seconds bounds every wait.

        Attaching ends at ``deadline``, on the monotonic clock, if that comes first.
        """
        self.directory = directory
        self.timeout = timeout
        #: Messages sent so far, requests and posted ones.
        self.messages = 0
        self.epoch = 0
        self.posted = PostedQueue(0)
        #: Refusals of posted messages that no call has raised yet.
        self.refusals: list[MambaPoolError] = []
        #: Called once, with the reason, when the pool's memory is lost or the allocator ended the session.
        self.on_end: Callable[[MambaPoolError], None] | None = None
        self._hello = hello
        self._pack = protocol.packer()  # used by whoever has the lock
        self._lock = threading.Lock()
        self._last_request = 0
        #: Requests that wait for their turn, and what has come for them meanwhile.
        self._waiting: dict[int, list[Any] | None] = {}
        #: A kept request that was given up while nobody answered.
        self._unresolved = 0
        #: False once the allocator says that it does not know this connection.
        self._attached = True
        self._closed = False
        #: Why the session is gone for good.
        self._ended: str | None = None
        self._last_sent = time.monotonic()
        self._table: SlotTableReader | None = None
        self._socket = _new_socket(directory)
        try:
            self._lease = Lease(directory)
        except BaseException:
            self._socket.close(linger=0)
            raise
        try:
            #: What the allocator told of the session and its pool.
            self.session = self._say_hello(self._deadline() if deadline is None else deadline)
            self.number: int = self.session["session"]
            self.posted = PostedQueue(self.session["applied"])
            self._table = SlotTableReader(directory.path / self.session["table"], self.session["uuid"])
        except BaseException:
            self.abandon()
            raise

    @property
    def table(self) -> SlotTableReader:
        assert self._table is not None
        return self._table

    def call(
        self, op: int, *arguments: Any, frees: Posted | None = None, deadline: float | None = None
    ) -> list[Any]:
        """Send a request and wait for its reply: ``[id, epoch, status, …]``, status OK or NONE.

        Other statuses raise. ``frees`` travels inside the request, as the posted message that it is. Raises
        :class:`AllocatorUnavailable` after ``timeout`` seconds, or at ``deadline``, on the monotonic clock,
        waiting for other threads' calls included; what the request was granted meanwhile is given back by a
        CANCEL.
        """
        deadline = self._deadline() if deadline is None else deadline
        with self._turn():
            request_id = self._new_request()
            try:
                reply = self._exchange(request_id, op, arguments, frees, deadline)
            except BaseException:  # Ctrl-C too: whatever ends the wait, nobody takes the answer any more
                if op in (protocol.ALLOC, protocol.BEGIN):
                    self.posted.append(protocol.CANCEL, request_id, 0)
                raise
        return _checked(reply)

    def call_and_wait(
        self, op: int, *arguments: Any, frees: Posted | None = None, wait: float, kept: bool = False
    ) -> list[Any] | None:
        """Like :meth:`call` for a request that is answered when its turn comes; None after ``wait`` seconds.

        Other threads' calls go on meanwhile. A request that was not answered is cancelled. ``kept``: nothing takes
        back what it was granted, so that it stays open and is asked for again, at the next such call at the latest.
        """
        deadline = time.monotonic() + wait
        if kept and self._unresolved:
            reply = self._resolve(self._unresolved, op)
            if reply is not None:
                return _checked(reply)
        with self._turn():
            request_id = self._new_request()
            self._waiting[request_id] = None
        reply = None
        try:
            self._await_turn(request_id, op, arguments, frees, deadline)
        finally:
            with self._lock:
                reply = self._waiting[request_id]
                if reply is None and kept:
                    # A later allocator knows no more what came by a transfer: a CANCEL would free it.
                    self._unresolved = request_id
                else:
                    del self._waiting[request_id]
                    if reply is None:
                        cancel = self.posted.append(protocol.CANCEL, request_id, 0)
            self.flush()
        if reply is None:
            if kept:
                reply = self._resolve(request_id, op)
            else:
                self._until_applied(cancel.number)
        return None if reply is None else _checked(reply)

    def _resolve(self, request_id: int, op: int) -> list[Any] | None:
        """What became of a kept request that was not answered in time: its grant, or None; it waits no longer."""
        with self._turn():
            # Open until it is known: nothing that is sent meanwhile says that its reply has arrived.
            self._waiting[request_id] = None
            self._unresolved = request_id
            reply = self._exchange(request_id, op, (False,), None, self._deadline())
            del self._waiting[request_id]
            self._unresolved = 0
        return None if reply[2] == protocol.NONE else reply

    def _until_applied(self, number: int) -> None:
        """None is an answer only of an allocator that answers: wait until it has that posted message."""
        deadline = self._deadline()
        while self.table.applied_and_free(self.session["row"])[0] < number:
            if self._ended or time.monotonic() > deadline:
                raise self._unavailable(self._ended or f"no answer within {self.timeout:g} s")
            time.sleep(_TURN_LOOK_S / 10)
            self.flush()

    def post(self, op: int, argument: int | bytes | None, slots: int) -> None:
        """Queue a posted message and send it, unless another thread has the socket, which then does."""
        self.posted.append(op, argument, slots)
        self.flush()

    def flush(self) -> None:
        """Send what is posted, without waiting. What the pipe does not take stays queued."""
        while self.posted.sent != self.posted.last and self._attached:
            # If the lock is taken, its holder comes by here after having let go of it.
            if not self._lock.acquire(blocking=False):
                return
            try:
                if self._closed or not self._send_posted(self.posted.last):
                    return
            finally:
                self._lock.release()

    def settle(self) -> npt.NDArray[np.int64]:
        """Wait until the allocator has applied what was posted; returns the free list of that moment."""
        deadline = self._deadline()
        while True:
            self.flush()
            applied, free = self.table.applied_and_free_slots(self.session["row"])
            self.posted.forget_applied(applied)
            if not self.posted:
                return free
            if self._ended or time.monotonic() > deadline:
                reason = f"posted messages were not applied within {self.timeout:g} s"
                raise self._unavailable(self._ended or reason)
            time.sleep(0.0002)

    def tick(self) -> None:
        """For the background thread: see what came, say that we live, find the allocator after a restart."""
        self._tell_end()
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._closed or self._ended:
                return
            self._drain(0)
            if not self._attached or self.table.epoch != self.epoch:
                with contextlib.suppress(MambaPoolError):
                    self._attach_again(time.monotonic() + _TICK_WAITS_S)
            elif time.monotonic() - self._last_sent > PING_S:
                header = (protocol.PING, self.number, 0, self.epoch, self.posted.sent, 0)
                if self._send(self._pack(header)):
                    self.messages -= 1  # not one that a call costs
        finally:
            self._lock.release()
            self._abandon_if_closed()
            self.flush()

    def _tell_end(self) -> None:
        if self.on_end is not None and (reason := self._end()) is not None:
            on_end, self.on_end = self.on_end, None
            on_end(reason)

    def _end(self) -> MambaPoolError | None:
        """Why no call shall hand out a slot any more, one without a message either."""
        if self.table.items[H_LOST]:
            return PoolLost(LOST)
        if self.table.session_number(self.session["row"]) != self.number:
            self._ended = self._ended or (
                f"session {self.number} was ended by the allocator, by `mambapool evict` for one; connect again"
            )
        return self._unavailable(self._ended) if self._ended else None

    def detach(self, timeout: float) -> None:
        """End the session and close; returns after ``timeout`` seconds at the latest, answered or not."""
        if not self._lock.acquire(timeout=timeout):
            # Another thread waits for an answer: who has the socket closes it, when that is over.
            self._closed = True
            self._abandon_if_closed()
            return
        try:
            # Nobody there to leave: what is held there ends with the daemon, or with the lease.
            with contextlib.suppress(MambaPoolError):
                self._exchange(self._new_request(), protocol.DETACH, (), None, time.monotonic() + timeout)
        finally:
            self.abandon()
            self._lock.release()

    def abandon(self) -> None:
        """Close the socket and the lease without a word."""
        self._closed = True
        self._lease.close()
        self._socket.close(linger=0)

    def _abandon_if_closed(self) -> None:
        """Called after the lock was let go of, and after a close() that did not get it: one of both gets it here."""
        if self._closed and self._lock.acquire(blocking=False):
            self.abandon()
            self._lock.release()

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's lease connection, which would hide the parent's death."""
        self._lease.abandon()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The socket is this thread's; what others posted meanwhile is sent afterwards."""
        if not self._lock.acquire(timeout=self.timeout):
            raise self._unavailable(f"another thread waited for it for {self.timeout:g} s")
        try:
            if self._closed:
                raise self._unavailable("this client was closed")
            yield
        finally:
            self._lock.release()
            self._abandon_if_closed()
            self.flush()

    def _new_request(self) -> int:
        self._last_request += 1
        return self._last_request

    def _exchange(
        self, request_id: int, op: int, arguments: tuple[Any, ...], frees: Posted | None, deadline: float
    ) -> list[Any]:
        """Send until there is a reply; the allocator answers a repeat with the same one."""
        if not self._attached:
            self._attach_again(deadline)
        while True:
            self._transmit(request_id, op, arguments, frees)
            reply = self._receive(request_id, deadline)
            if reply is None:
                if self.table.epoch != self.epoch:
                    self._attach_again(deadline)
            elif reply[2] == protocol.GAP:
                self.posted.rewind(reply[3])
            elif reply[2] in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
                if op == protocol.DETACH:
                    return reply
                self._attach_again(deadline)
            else:
                return reply

    def _await_turn(
        self, request_id: int, op: int, arguments: tuple[Any, ...], frees: Posted | None, deadline: float
    ) -> None:
        """Until something came for the request, or the deadline."""
        repeat_at = 0.0
        while True:
            with self._turn():
                if (reason := self._end()) is not None:
                    raise reason
                now = time.monotonic()
                if not self._attached or self.table.epoch != self.epoch:
                    self._attach_again(max(deadline, now + _TICK_WAITS_S))
                    repeat_at = 0.0
                if now >= repeat_at:
                    self._transmit(request_id, op, arguments, frees)
                    repeat_at = now + REPEAT_S
                self._drain(0)
                reply = self._waiting[request_id]
                if reply is None:
                    if now >= deadline:
                        return
                elif reply[2] == protocol.GAP:
                    self.posted.rewind(reply[3])
                elif reply[2] in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
                    self._attached = False
                else:
                    return
                if reply is not None:  # not answered, but to be asked again
                    self._waiting[request_id] = None
                    repeat_at = 0.0
            time.sleep(_TURN_LOOK_S)

    def _transmit(self, request_id: int, op: int, arguments: tuple[Any, ...], frees: Posted | None) -> None:
        number = self.posted.last if frees is None else frees.number
        # What was posted before goes before; what the request carries goes inside it.
        before = number if frees is None else number - 1
        self._send_posted(before)
        oldest = min(self._waiting, default=request_id)
        header = (op, self.number, request_id, self.epoch, number, min(oldest, request_id))
        sent = self._send(self._pack((*header, *arguments)))
        if sent and frees is not None and self.posted.sent == before:
            self.posted.sent = number

    def _send_posted(self, up_to: int) -> bool:
        """Send posted messages up to that number; False if the pipe did not take all."""
        if self.posted.sent >= up_to:
            return True
        for message in self.posted.unsent():
            if message.number > up_to:
                break
            header = (message.op, self.number, 0, self.epoch, message.number, 0)
            if not self._send(self._pack((*header, message.argument))):
                return False
            self.posted.sent = message.number
        return True

    def _send(self, body: bytes) -> bool:
        try:
            BackendSocket.send(self._socket, body, _NOBLOCK)
        except zmq.Again:
            return False
        self.messages += 1
        self._last_sent = time.monotonic()
        return True

    def _receive(self, request_id: int, deadline: float) -> list[Any] | None:
        """The reply to that request; None when it is time to ask again; raises after the deadline."""
        repeat_at = time.monotonic() + REPEAT_S
        while True:
            try:
                # Returns after RCVTIMEO, a short one: the clock and the table are looked at in between.
                reply = self._take(BackendSocket.recv(self._socket), request_id)
            except zmq.Again:
                reply = None
                now = time.monotonic()
                if now >= deadline:
                    raise self._unavailable(f"no answer within {self.timeout:g} s") from None
                if now >= repeat_at or (self._table is not None and self._table.epoch != self.epoch):
                    return None
            if reply is not None:
                return reply

    def _drain(self, request_id: int) -> list[Any] | None:
        """Take what has come, without waiting; the reply to that request if it is among it."""
        found = None
        with contextlib.suppress(zmq.Again):
            while True:
                found = self._take(BackendSocket.recv(self._socket, _NOBLOCK), request_id) or found
        return found

    def _take(self, body: bytes, request_id: int) -> list[Any] | None:
        """The message if it answers that request. What others wait for and notices are noted, the rest dropped."""
        try:
            message = protocol.unpack(body, len(body))
            known, epoch, status, *payload = message
            if not (type(known) is type(epoch) is type(status) is int):
                raise ProtocolError("request id, epoch and status are numbers")
        except (ProtocolError, ValueError) as error:
            self.refusals.append(ProtocolError(f"the allocator sent something malformed: {error}"))
            return None
        if status == protocol.WRONG_EPOCH and epoch == self.epoch:
            return None  # about something that was sent before the last HELLO
        if status == protocol.GAP and not (payload and type(payload[0]) is int):
            self.refusals.append(ProtocolError("the allocator sent a GAP without a number"))
            return None
        if known:
            if known in self._waiting:
                self._waiting[known] = message
            return message if known == request_id else None
        if status == protocol.GAP:
            self.posted.rewind(payload[0])
        elif status in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
            self._attached = False
        else:
            self.refusals.append(protocol.error_from([status, *payload]))
        return None

    def _attach_again(self, deadline: float) -> None:
        """Say HELLO again, as the same session; what was lost on the way is sent again."""
        if self._ended:
            raise self._unavailable(self._ended)
        self._attached = False
        self._lease.disconnect()
        session = self._say_hello(deadline, resume=self.number)
        self.posted.rewind(session["applied"])
        self._attached = True

    def _say_hello(self, deadline: float, **more: int) -> dict[str, Any]:
        request_id = self._new_request()
        fields = {**self._hello, **more, "lease": self._lease.name}
        reply = None
        while reply is None:
            self._connect_lease()
            self._send(self._pack((protocol.HELLO, 0, request_id, 0, 0, 0, fields)))
            reply = self._receive(request_id, deadline)
            if reply is None and self._table is None and self.refusals:
                raise self.refusals.pop(0)  # nothing but HELLO was sent: it could not be read, its id neither
        # An allocator that was still starting had no ear for it yet.
        self._connect_lease()
        if reply[2] != protocol.OK:
            error = protocol.error_from(reply[2:])
            if more and reply[2] == protocol.REFUSED:
                self._ended = str(error)
                self._tell_end()
            raise error
        self.epoch = reply[1]
        session: dict[str, Any] = reply[3]
        return session

    def _connect_lease(self) -> None:
        """Have its end noticed at once; without the connection the allocator's sweep has to do."""
        if not self._lease.connected:
            with contextlib.suppress(AllocatorUnavailable):
                self._lease.connect()

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout

    def _unavailable(self, reason: str) -> AllocatorUnavailable:
        return AllocatorUnavailable(f"the allocator of {self.directory.path} is not available: {reason}")


def _session_map(reply: list[Any]) -> dict[str, Any]:
    """What HELLO was answered with; an allocator that leaves something out is none that we can talk to."""
    session = reply[3] if len(reply) > 3 else None
    if not isinstance(session, dict) or not session.keys() >= _SESSION_KEYS:
        raise ProtocolError("the allocator answered HELLO with something else than a session")
    return session


def _checked(reply: list[Any]) -> list[Any]:
    if reply[2] > protocol.NONE:
        raise protocol.error_from(reply[2:])
    return reply


def ask_status(directory: RuntimeDir, timeout: float) -> dict[str, Any]:
    """The allocator's ``status --json``; needs no session. Raises :class:`AllocatorUnavailable`."""
    return _ask(directory, timeout, protocol.STATUS)


def evict(directory: RuntimeDir, timeout: float, session: int, *, force: bool) -> dict[str, Any]:
    """End another process's session: ``{"slots": how many came free, "alive": whether it lives}``.

    Refused for a living one unless ``force``: :class:`MambaPoolError`. Raises :class:`AllocatorUnavailable` when
    nobody answers.
    """
    return _ask(directory, timeout, protocol.EVICT, session, force)


def _ask(directory: RuntimeDir, timeout: float, op: int, *arguments: Any) -> dict[str, Any]:
    dealer = _new_socket(directory)
    dealer.rcvtimeo = int(timeout * 1000)
    try:
        dealer.send(protocol.pack((op, 0, 1, 0, 0, 0, *arguments)))
        reply = protocol.unpack(dealer.recv(), protocol.MAX_OVERHEAD_BYTES, protocol.MAX_STATUS_ITEMS)
    except zmq.Again:
        raise AllocatorUnavailable(
            f"the allocator of {directory.path} did not answer within {timeout:g} s: is it running?"
        ) from None
    finally:
        dealer.close(linger=0)
    if reply[2] == protocol.REFUSED:
        raise MambaPoolError(reply[3])  # it is available, and says no
    if len(reply) < 4 or reply[2] != protocol.OK or not isinstance(reply[3], dict):
        raise protocol.error_from(reply[2:])
    return reply[3]


def _new_socket(directory: RuntimeDir) -> zmq.Socket[bytes]:
    check_socket_path(directory.allocator_socket)
    dealer: zmq.Socket[bytes] = _context().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = _LOOK_MS
    dealer.sndhwm = HIGH_WATER_MARK
    dealer.rcvhwm = HIGH_WATER_MARK
    dealer.reconnect_ivl = 20
    dealer.reconnect_ivl_max = 100
    dealer.connect(directory.endpoint)
    return dealer
