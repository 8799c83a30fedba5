"""Requests of one session that tasks of an event loop wait for; the transport stays the same.

The loop's thread sends and receives itself: it watches the socket's descriptor. (A thread that waits for the loop
would cost two wake-ups per call.) What can take long is left to the process' background thread: it finds the
allocator after a restart, and says that we live while the loop is busy.
Both use the connection under the transport's lock, which the loop only ever tries: it never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mambapool.client.connection import REPEAT_S
from mambapool.client.posted import Posted
from mambapool.client.transport import Transport
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError

#: So many requests are on their way at once; the others wait here. The allocator keeps 1,024 replies for a session.
MAX_OPEN = 256

#: While tasks wait, deadlines, restarts and what has to be asked again are looked after so often.
LOOK_S = 0.02


@dataclass(eq=False, slots=True)
class Pending:
    """A request that a task waits for. Its future's result is the reply, or None: it is out of time."""

    op: int
    arguments: tuple[Any, ...]
    frees: Posted | None
    future: asyncio.Future[list[Any] | None]
    deadline: float
    request_id: int = 0  # 0: not sent yet
    repeat_at: float = 0.0


class LoopCalls:
    """The calls of one session in one event loop. Every method is for a task of that loop."""

    def __init__(
        self, transport: Transport, loop: asyncio.AbstractEventLoop, check_usable: Callable[[], None]
    ) -> None:
        """``check_usable`` raises why the session cannot be used any more."""
        self._check_usable = check_usable
        self._transport = transport
        self._connection = transport.connection
        self._loop = loop
        self._thread = threading.get_ident()
        #: Requests that were sent, by their ids, and those that were not, in their order.
        self._open: dict[int, Pending] = {}
        self._unsent: deque[Pending] = deque()
        #: Some of those that were sent have to be looked at: are they to be sent again?
        self._again = False
        self._attachments = self._connection.attachments
        self._timer: asyncio.TimerHandle | None = None
        self._closed: MambaPoolError | None = None
        self._connection.on_arrival = self._arrived
        transport.on_used = self._used
        loop.add_reader(self._connection.dealer.fileno(), self._receive)

    def __repr__(self) -> str:
        return f"LoopCalls(open={len(self._open)}, unsent={len(self._unsent)})"

    @property
    def timeout(self) -> float:
        """Seconds that bound every wait for an answer."""
        return self._transport.timeout

    def unavailable(self, reason: str) -> AllocatorUnavailable:
        return self._connection.unavailable(reason)

    def check_loop(self) -> None:
        """Every call is for the loop that the session was made in."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:  # in a forked child, which runs on in its parent's loop, there is none
            running = None
        if running is not self._loop:
            self._check_usable()
            raise RuntimeError(
                "this client belongs to another event loop: await connect_async in each, or hand the call over "
                "(asyncio.run_coroutine_threadsafe)"
            )

    async def settle(self) -> npt.NDArray[np.int64]:
        """As :meth:`Transport.settle`."""
        deadline = time.monotonic() + self.timeout
        while (free := self._transport.settled(deadline)) is None:
            await asyncio.sleep(0.0005)
        return free

    def cancel(self, reply: list[Any]) -> None:
        """Give back what an answered request was granted."""
        self._transport.post(protocol.CANCEL, reply[0], 0)

    async def call(
        self, op: int, *arguments: Any, frees: Posted | None = None, deadline: float | None = None
    ) -> list[Any]:
        """As :meth:`Transport.call`; the loop's other tasks go on. Cancelled, it gives back what it was granted."""
        timeout = self._transport.timeout
        pending = self.start(op, *arguments, frees=frees, deadline=deadline or time.monotonic() + timeout)
        try:
            reply = await pending.future
            if reply is None:
                raise self._connection.unavailable(f"no answer within {timeout:g} s")
        except BaseException:
            self._give_up(pending)
            raise
        self._finish(pending)
        return self._connection.checked(op, reply)

    async def call_and_wait(
        self, op: int, *arguments: Any, frees: Posted | None = None, wait: float
    ) -> list[Any] | None:
        """As :meth:`Transport.call_and_wait`, of a request that a CANCEL takes back."""
        pending = self.start(op, *arguments, frees=frees, deadline=time.monotonic() + wait)
        try:
            reply = await pending.future
        except BaseException:
            self._give_up(pending)
            raise
        if reply is not None:
            self._finish(pending)
            return self._connection.checked(op, reply)
        # None is an answer only of an allocator that answers: wait until it has the CANCEL.
        if (number := self._give_up(pending)) is not None:
            deadline = time.monotonic() + self._transport.timeout
            while not self._transport.is_applied(number, deadline):
                await asyncio.sleep(0.001)
        return None

    def start(self, op: int, *arguments: Any, frees: Posted | None = None, deadline: float = math.inf) -> Pending:
        """Send a request; its future is the caller's to wait for, and :meth:`finish` to be called then."""
        if self._closed is not None:
            raise type(self._closed)(*self._closed.args)
        pending = Pending(op, arguments, frees, self._loop.create_future(), deadline)
        self._unsent.append(pending)
        self._send()
        self._look_within(min(LOOK_S, deadline - time.monotonic()))
        return pending

    def ask_again(self, pending: Pending, *arguments: Any) -> None:
        """Send it again, now, with other arguments, under its old id."""
        pending.arguments = arguments
        self._ask_again(pending)
        self._send()

    def _ask_again(self, pending: Pending) -> None:
        pending.repeat_at = 0.0
        self._again = True

    def finish(self, pending: Pending) -> list[Any]:
        """The reply that has come for it: the allocator may forget it. Raises it if it is no grant."""
        reply = pending.future.result()
        assert reply is not None
        self._finish(pending)
        return self._connection.checked(pending.op, reply)

    def close(self, reason: MambaPoolError) -> None:
        """Whoever waits is told the reason. The connection is left to others."""
        self._closed = reason
        self._transport.on_used = self._connection.on_arrival = None
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._connection.dealer.fileno())
        self._fail_all(reason)

    def _finish(self, pending: Pending) -> None:
        self._open.pop(pending.request_id, None)
        self._connection.close_request(pending.request_id)
        if self._unsent:
            # Not before the caller had its look at the reply: a CANCEL of it goes first, while it is known.
            self._loop.call_soon(self._send)

    def _give_up(self, pending: Pending) -> int | None:
        """Nobody takes the answer any more; the number of the CANCEL that says so, if it was asked at all."""
        if not pending.request_id:
            with contextlib.suppress(ValueError):
                self._unsent.remove(pending)
            self._transport.flush()  # what it would have carried
            return None
        number = None
        if pending.op in protocol.CANCELLED_OPS and self._closed is None:
            number = self._transport.posted.append(protocol.CANCEL, pending.request_id, 0).number
        self._finish(pending)
        self._transport.flush()
        return number

    def _send(self) -> None:
        """Send what was not sent, and what has to be sent again, if the connection is free and attached."""
        transport, connection = self._transport, self._connection
        transport.wanted = True
        if not transport.lock.acquire(blocking=False):
            return  # who has it tells us, by on_used
        try:
            transport.wanted = False
            if transport.closed or transport.forked or not connection.is_known:
                return
            now = time.monotonic()
            if self._again or self._attachments != connection.attachments:
                self._send_again(now)
            while self._unsent and len(self._open) < MAX_OPEN:
                pending = self._unsent.popleft()
                pending.request_id = connection.new_request()
                self._open[pending.request_id] = pending
                connection.waiting[pending.request_id] = None
                self._transmit(pending, now)
            connection.drain_ready()
        finally:
            transport.lock.release()
        # What was posted meanwhile, by another thread, is sent afterwards: as Transport does.
        if transport.posted.sent != transport.posted.last:
            transport.flush()

    def _send_again(self, now: float) -> None:
        self._again = False
        attached_anew = self._attachments != self._connection.attachments
        self._attachments = self._connection.attachments
        for pending in self._open.values():
            if (attached_anew or now >= pending.repeat_at) and not pending.future.done():
                self._transmit(pending, now)

    def _transmit(self, pending: Pending, now: float) -> None:
        sent = self._connection.transmit(pending.request_id, pending.op, pending.arguments, pending.frees)
        pending.repeat_at = now + (REPEAT_S if sent else LOOK_S)

    def _receive(self) -> None:
        """The socket's descriptor is readable, or may have been."""
        transport = self._transport
        transport.wanted = True
        if not transport.lock.acquire(blocking=False):
            return
        try:
            transport.wanted = False
            if not (transport.closed or transport.forked):
                self._connection.drain_ready()
        finally:
            transport.lock.release()
        if transport.posted.sent != transport.posted.last:
            transport.flush()

    def _used(self) -> None:
        """From any thread, which has just let go of the connection: a sign on the descriptor may be gone."""
        if threading.get_ident() == self._thread:
            self._receive()
        else:
            self._in_loop(self._send)

    def _arrived(self, request_id: int, message: list[Any]) -> None:
        """From any thread, which has the lock: something came for a request of ours."""
        if message[2] == protocol.GAP:
            self._connection.posted.rewind(message[3])
        elif message[2] in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
            self._connection.attached = False
        if threading.get_ident() == self._thread:
            self._resolve(request_id, message)
        else:
            self._in_loop(self._resolve, request_id, message)

    def _in_loop(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(function, *arguments)

    def _resolve(self, request_id: int, message: list[Any]) -> None:
        pending = self._open.get(request_id)
        if pending is None or pending.future.done():
            return
        if message[2] in (protocol.GAP, protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
            # Not answered, but to be asked again: at once, or when the session is attached again.
            self._ask_again(pending)
            self._loop.call_soon(self._send)
        else:
            pending.future.set_result(message)

    def _look_within(self, seconds: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """While tasks wait: is anything out of time, has the session ended, is there something to be sent again?"""
        self._timer = None
        self._connection.tell_end()
        if (reason := self._connection.end()) is not None:
            self._fail_all(reason)
        now = time.monotonic()
        next_look = now + LOOK_S
        for pending in (*self._open.values(), *self._unsent):
            if pending.future.done():
                continue
            if now >= pending.deadline:
                pending.future.set_result(None)
            else:
                next_look = min(next_look, pending.deadline)
        self._again = True
        self._send()
        if self._open or self._unsent:
            self._look_within(next_look - now)

    def _fail_all(self, reason: MambaPoolError) -> None:
        for pending in (*self._open.values(), *self._unsent):
            if not pending.future.done():
                pending.future.set_exception(type(reason)(*reason.args))
                pending.future.exception()  # perhaps nobody waits: that is no fault of the loop's
