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
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from zmq.backend import Socket as BackendSocket

from mambapool.client.posted import Posted, PostedQueue
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError, ProtocolError
from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path
from mambapool.pool.slot_table import SlotTableReader

#: Messages that wait for an allocator that does not read; beyond, posted ones stay in their queue.
HIGH_WATER_MARK = 10_000

_NOBLOCK = int(zmq.NOBLOCK)

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

    Not usable after a fork: see :mod:`mambapool.client.worker`, which looks.
    """

    def __init__(self, directory: RuntimeDir, timeout: float, hello: dict[str, Any]) -> None:
        """Connect and attach; ``hello`` is the map of HELLO, ``timeout`` in seconds bounds every wait."""
        self.directory = directory
        self.timeout = timeout
        #: Messages sent so far, requests and posted ones.
        self.messages = 0
        self.epoch = 0
        self.posted = PostedQueue(0)
        #: Refusals of posted messages that no call has raised yet.
        self.refusals: list[MambaPoolError] = []
        self._hello = hello
        self._pack = protocol.packer()  # used by whoever has the lock
        self._lock = threading.Lock()
        self._last_request = 0
        #: False once the allocator says that it does not know this connection.
        self._attached = True
        self._closed = False
        self._socket = _new_socket(directory, timeout)
        try:
            #: What the allocator told of the session and its pool.
            self.session = self._say_hello(self._deadline())
        except BaseException:
            self.abandon()
            raise
        self.number: int = self.session["session"]
        self.posted = PostedQueue(self.session["applied"])

    def call(self, op: int, *arguments: Any, frees: Posted | None = None) -> list[Any]:
        """Send a request and wait for its reply: ``[id, epoch, status, …]``, status OK or NONE.

        Other statuses raise. ``frees`` travels inside the request, as the posted message that it is. Raises
        :class:`AllocatorUnavailable` after ``timeout`` seconds, waiting for other threads' calls included;
        what the request was granted meanwhile is given back by a CANCEL.
        """
        deadline = self._deadline()
        if not self._lock.acquire(timeout=self.timeout):
            raise self._unavailable(f"another thread waited for it for {self.timeout:g} s")
        try:
            reply = self._call(op, arguments, frees, deadline)
        finally:
            self._lock.release()
            self.flush()
        if reply[2] > protocol.NONE:
            raise protocol.error_from(reply[2:])
        return reply

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

    def settle(self, table: SlotTableReader, row: int) -> npt.NDArray[np.int64]:
        """Wait until the allocator has applied what was posted; returns the free list of that moment."""
        deadline = self._deadline()
        while True:
            self.flush()
            applied, free = table.applied_and_free_slots(row)
            self.posted.forget_applied(applied)
            if not self.posted:
                return free
            if time.monotonic() > deadline:
                raise self._unavailable(f"posted messages were not applied within {self.timeout:g} s")
            time.sleep(0.0002)

    def tick(self) -> None:
        """For the background thread: send what is left, and see what the allocator refused."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while not self._closed:
                self._take(BackendSocket.recv(self._socket, _NOBLOCK), 0)
        except zmq.Again:
            if not self._attached:
                with contextlib.suppress(MambaPoolError):
                    self._attach_again(self._deadline())
        finally:
            self._lock.release()
            self.flush()

    def detach(self, timeout: float) -> None:
        """End the session and close; returns after ``timeout`` seconds at the latest, answered or not."""
        if not self._lock.acquire(timeout=timeout):
            return
        try:
            # Nobody there to leave: what is held there ends with the daemon, or with the lease.
            with contextlib.suppress(MambaPoolError):
                self._call(protocol.DETACH, (), None, time.monotonic() + timeout)
        finally:
            self.abandon()
            self._lock.release()

    def abandon(self) -> None:
        """Close the socket without a word."""
        self._closed = True
        self._socket.close(linger=0)

    def _call(self, op: int, arguments: tuple[Any, ...], frees: Posted | None, deadline: float) -> list[Any]:
        if self._closed:
            raise self._unavailable("this client was closed")
        if not self._attached:
            self._attach_again(deadline)
        request_id = self._last_request = self._last_request + 1
        number = self.posted.last if frees is None else frees.number
        # What was posted before goes before; what the request carries goes inside it.
        before = number if frees is None else number - 1
        try:
            while True:
                self._send_posted(before)
                # One request is open at a time, so that it is the oldest.
                header = (op, self.number, request_id, self.epoch, number, request_id)
                if not self._send(self._pack((*header, *arguments))):
                    raise self._unavailable("it does not read")
                if frees is not None and self.posted.sent == before:
                    self.posted.sent = number
                reply = self._receive(request_id, deadline)
                status = reply[2]
                if status == protocol.GAP:
                    self.posted.rewind(reply[3])
                elif status in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
                    if op == protocol.DETACH:
                        return reply
                    self._attach_again(deadline)
                else:
                    return reply
        except AllocatorUnavailable:
            if op in (protocol.ALLOC, protocol.BEGIN):
                self.posted.append(protocol.CANCEL, request_id, 0)
            raise

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
        return True

    def _receive(self, request_id: int, deadline: float) -> list[Any]:
        """The reply to that request; notices on the way are kept, late answers dropped."""
        adjusted = False
        try:
            while True:
                left = deadline - time.monotonic()
                # Setting the option costs a microsecond, and its usual value fits the usual call.
                if left < 0.9 * self.timeout:
                    adjusted = True
                    self._socket.rcvtimeo = max(int(left * 1000), 0)
                reply = self._take(BackendSocket.recv(self._socket), request_id)
                if reply is not None:
                    return reply
        except zmq.Again:
            raise self._unavailable(f"no answer within {self.timeout:g} s") from None
        finally:
            if adjusted:
                self._socket.rcvtimeo = int(self.timeout * 1000)

    def _take(self, body: bytes, request_id: int) -> list[Any] | None:
        """The message if it answers that request. A notice is noted, anything else is dropped."""
        try:
            message = protocol.unpack(body, len(body))
            known, epoch, status, *payload = message
            if not (type(known) is type(epoch) is type(status) is int):
                raise ProtocolError("request id, epoch and status are numbers")
        except (ProtocolError, ValueError) as error:
            self.refusals.append(ProtocolError(f"the allocator sent something malformed: {error}"))
            return None
        if known:
            return message if known == request_id else None
        if status == protocol.GAP and payload and type(payload[0]) is int:
            self.posted.rewind(payload[0])
        elif status in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
            self._attached = False
        else:
            self.refusals.append(protocol.error_from([status, *payload]))
        return None

    def _attach_again(self, deadline: float) -> None:
        """Say HELLO over a new connection, as the same session; what was lost on the way is sent again."""
        self._attached = False
        session = self._say_hello(deadline, resume=self.number)
        self.posted.rewind(session["applied"])
        self._attached = True

    def _say_hello(self, deadline: float, **more: int) -> dict[str, Any]:
        request_id = self._last_request = self._last_request + 1
        self._send(self._pack((protocol.HELLO, 0, request_id, 0, 0, 0, {**self._hello, **more})))
        reply = self._receive(request_id, deadline)
        if reply[2] != protocol.OK:
            raise protocol.error_from(reply[2:])
        self.epoch = reply[1]
        session: dict[str, Any] = reply[3]
        return session

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout

    def _unavailable(self, reason: str) -> AllocatorUnavailable:
        return AllocatorUnavailable(f"the allocator of {self.directory.path} is not available: {reason}")


def ask_status(directory: RuntimeDir, timeout: float) -> dict[str, Any]:
    """The allocator's ``status --json``; needs no session. Raises :class:`AllocatorUnavailable`."""
    dealer = _new_socket(directory, timeout)
    try:
        dealer.send(protocol.pack((protocol.STATUS, 0, 1, 0, 0, 0)))
        reply = protocol.unpack(dealer.recv(), protocol.MAX_OVERHEAD_BYTES)
    except zmq.Again:
        raise AllocatorUnavailable(
            f"the allocator of {directory.path} did not answer within {timeout:g} s: is it running?"
        ) from None
    finally:
        dealer.close(linger=0)
    if reply[2] != protocol.OK:
        raise protocol.error_from(reply[2:])
    status: dict[str, Any] = reply[3]
    return status


def _new_socket(directory: RuntimeDir, timeout: float) -> zmq.Socket[bytes]:
    check_socket_path(directory.allocator_socket)
    dealer: zmq.Socket[bytes] = _context().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvtimeo = int(timeout * 1000)
    dealer.sndhwm = HIGH_WATER_MARK
    dealer.rcvhwm = HIGH_WATER_MARK
    dealer.reconnect_ivl = 20
    dealer.reconnect_ivl_max = 500
    dealer.connect(directory.endpoint)
    return dealer
