"""What one session has sent, what has come for it, and how it is attached again after a restart of the allocator.

Knows of no threads and, but for HELLO, of no waiting: whoever uses it has the lock of its
:class:`~mambapool.client.transport.Transport`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from mambapool.client.dealer import Dealer
from mambapool.client.lease import Lease
from mambapool.client.posted import Posted, PostedQueue
from mambapool.client.replies import check_form, parse_reply, session_of
from mambapool.pool import protocol
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError, PoolLost, ProtocolError
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import H_LOST, SlotTableReader

#: A request that was not answered is sent again so often: an allocator that was restarted may know nothing of it.
REPEAT_S = 0.5

#: While an older request is open, the allocator is told of so many at once whose replies have arrived.
CLOSE_AT_ONCE = 128

#: What every call of a closed client raises, as :class:`ClientClosed`.
CLOSED = "this client was closed: connect again"

LOST = "the memory of this pool is gone, its keeper died: connect again when it is back"


class Connection:
    """One session, attached from construction on. Not usable after a fork."""

    def __init__(self, directory: RuntimeDir, timeout: float, hello: dict[str, Any], deadline: float) -> None:
        self.directory = directory
        self.timeout = timeout
        #: Messages sent so far, requests and posted ones, PING not.
        self.messages = 0
        self.epoch = 0
        self.posted = PostedQueue(0)
        #: Refusals of posted messages that no call has raised yet.
        self.refusals: list[MambaPoolError] = []
        #: Requests that wait for their turn, and what has come for them meanwhile.
        self.waiting: dict[int, list[Any] | None] = {}
        #: Called with what has come for one of them.
        self.on_arrival: Callable[[int, list[Any]], None] | None = None
        #: False once the allocator says that it does not know this connection.
        self.attached = True
        #: How often HELLO was answered.
        self.attachments = 0
        #: Why the session is gone for good.
        self.ended: str | None = None
        #: Called once, with the reason, when the pool's memory is lost or the allocator ended the session.
        self.on_end: Callable[[MambaPoolError], None] | None = None
        self.pack = protocol.packer()
        #: Id of the last request.
        self.last_request = 0
        self._hello = hello
        self._closed_requests: list[int] = []
        self._table: SlotTableReader | None = None
        self.dealer = Dealer(directory)
        try:
            self.lease = Lease(directory)
        except BaseException:
            self.dealer.close()
            raise
        try:
            #: What the allocator told of the session and its pool.
            self.session = self._say_hello(deadline)
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

    @property
    def is_known(self) -> bool:
        """Whether the allocator that serves now has heard of this connection."""
        return self.attached and self.table.epoch == self.epoch

    def new_request(self) -> int:
        self.last_request += 1
        return self.last_request

    def close_request(self, request_id: int) -> None:
        """Nobody waits for its reply any more: the allocator may forget it.

        It hears so from the header of the next request, unless an older one is open.
        """
        self.waiting.pop(request_id, None)
        if not self.waiting:
            self._closed_requests.clear()
            return
        self._closed_requests.append(request_id)
        if len(self._closed_requests) >= CLOSE_AT_ONCE:
            self.posted.append(protocol.CLOSE, self._closed_requests, 0)
            self._closed_requests = []

    def transmit(self, request_id: int, op: int, arguments: tuple[Any, ...], frees: Posted | None) -> bool:
        """Send a request, and before it what was posted before; False if the pipe did not take it."""
        number = self.posted.last if frees is None else frees.number
        # What was posted before goes before; what the request carries goes inside it.
        before = number if frees is None else number - 1
        self.send_posted(before)
        oldest = min(request_id, *self.waiting) if self.waiting else request_id
        header = (op, self.number, request_id, self.epoch, number, oldest)
        sent = self._send(self.pack((*header, *arguments)))
        if sent and frees is not None and self.posted.sent == before:
            self.posted.sent = number
        return sent

    def send_posted(self, up_to: int) -> bool:
        """Send posted messages up to that number; False if the pipe did not take all."""
        if self.posted.sent >= up_to:
            return True
        for message in self.posted.unsent():
            if message.number > up_to:
                break
            header = (message.op, self.number, 0, self.epoch, message.number, 0)
            if not self._send(self.pack((*header, message.argument))):
                return False
            self.posted.sent = message.number
        return True

    def ping(self) -> None:
        """Say that we live."""
        header = (protocol.PING, self.number, 0, self.epoch, self.posted.sent, 0)
        if self._send(self.pack(header)):
            self.messages -= 1  # not one that a call costs

    def receive(self, request_id: int, deadline: float) -> list[Any] | None:
        """Wait for the reply to that request; None when it is time to ask again; raises after the deadline."""
        repeat_at = time.monotonic() + REPEAT_S
        while True:
            # Returns after a moment: the clock and the table are looked at in between.
            body = self.dealer.receive()
            if body is None:
                now = time.monotonic()
                if now >= deadline:
                    raise self.unavailable(f"no answer within {self.timeout:g} s")
                if now >= repeat_at or (self._table is not None and self._table.epoch != self.epoch):
                    return None
            elif (reply := self.take(body, request_id)) is not None:
                return reply

    def drain(self) -> None:
        """Take what has come, without waiting."""
        while (body := self.dealer.receive_now()) is not None:
            self.take(body, 0)

    def drain_ready(self) -> None:
        """The same, for a socket on which most often one message has come."""
        while self.dealer.has_message():
            body = self.dealer.receive_now()
            if body is not None:
                self.take(body, 0)

    def attach_again(self, deadline: float) -> None:
        """Say HELLO again, as the same session; what was lost on the way is sent again."""
        if self.ended:
            raise self.unavailable(self.ended)
        self.attached = False
        self.lease.disconnect()
        session = self._say_hello(deadline, resume=self.number)
        self.posted.rewind(session["applied"])
        self.attached = True

    def checked(self, op: int, reply: list[Any]) -> list[Any]:
        """The reply, if OK or NONE; others are raised. One that makes no sense is given back, as far as that goes."""
        try:
            check_form(op, reply, self.session["slots"])
        except ProtocolError:
            if op in protocol.CANCELLED_OPS:
                self.posted.append(protocol.CANCEL, reply[0], 0)
            raise
        if reply[2] > protocol.NONE:
            raise protocol.error_from(reply[2:])
        return reply

    def end(self) -> MambaPoolError | None:
        """Why no call shall hand out a slot any more, one without a message either."""
        if self.table.items[H_LOST]:
            return PoolLost(LOST)
        if self.table.session_number(self.session["row"]) != self.number:
            self.ended = self.ended or (
                f"session {self.number} was ended by the allocator, by `mambapool evict` for one; connect again"
            )
        return self.unavailable(self.ended) if self.ended else None

    def tell_end(self) -> None:
        """Call :attr:`on_end` if the session has ended, once."""
        if self.on_end is not None and (reason := self.end()) is not None:
            on_end, self.on_end = self.on_end, None
            on_end(reason)

    def abandon(self) -> None:
        """Close the socket and the lease without a word."""
        self.lease.close()
        self.dealer.close()

    def unavailable(self, reason: str) -> AllocatorUnavailable:
        return AllocatorUnavailable(f"the allocator of {self.directory.path} is not available: {reason}")

    def _send(self, body: bytes) -> bool:
        if not self.dealer.send(body):
            return False
        self.messages += 1
        return True

    def take(self, body: bytes, request_id: int) -> list[Any] | None:
        """The message if it answers that request. What others wait for and notices are noted, the rest dropped."""
        try:
            message = parse_reply(body)
        except ProtocolError as error:
            self.refusals.append(ProtocolError(f"the allocator sent something malformed: {error}"))
            return None
        known, epoch, status, *payload = message
        if status == protocol.WRONG_EPOCH and epoch == self.epoch:
            return None  # about something that was sent before the last HELLO
        if known:
            if known in self.waiting:
                self.waiting[known] = message
                if self.on_arrival is not None:
                    self.on_arrival(known, message)
            return message if known == request_id else None
        if status == protocol.GAP:
            self.posted.rewind(payload[0])
        elif status in (protocol.UNKNOWN_SESSION, protocol.WRONG_EPOCH):
            self.attached = False
        else:
            self.refusals.append(protocol.error_from([status, *payload]))
        return None

    def _say_hello(self, deadline: float, **more: int) -> dict[str, Any]:
        request_id = self.new_request()
        fields = {**self._hello, **more, "lease": self.lease.name}
        reply = None
        while reply is None:
            self._connect_lease()
            self._send(self.pack((protocol.HELLO, 0, request_id, 0, 0, 0, fields)))
            reply = self.receive(request_id, deadline)
            if reply is None and self._table is None and self.refusals:
                raise self.refusals.pop(0)  # nothing but HELLO was sent: it could not be read, its id neither
        # An allocator that was still starting had no ear for it yet.
        self._connect_lease()
        if reply[2] != protocol.OK:
            error = protocol.error_from(reply[2:])
            if more and reply[2] == protocol.REFUSED:
                self.ended = str(error)
                self.tell_end()
            raise error
        session = session_of(reply)
        self.epoch = reply[1]
        self.attachments += 1
        return session

    def _connect_lease(self) -> None:
        """Have its end noticed at once; without the connection the allocator's sweep has to do."""
        if not self.lease.connected:
            with contextlib.suppress(AllocatorUnavailable):
                self.lease.connect()
