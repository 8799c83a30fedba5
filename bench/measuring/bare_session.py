"""A session that sends and receives by itself, with nothing around it: what the daemon alone costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import zmq
from yardsticks.clients import dealer
from zmq.backend import Socket

from mambapool.client.lease import Lease
from mambapool.pool import protocol
from mambapool.pool.runtime_dir import RuntimeDir


class BareSession:
    """Attached, with a lease, like any client. Not thread-safe, checks nothing, survives no restart."""

    def __init__(self, directory: Path, pool: str = "default") -> None:
        runtime = RuntimeDir(directory)
        self._lease = Lease(runtime)
        self._lease.connect()
        self.socket: zmq.Socket[bytes] = dealer(runtime.endpoint)
        self._pack = protocol.packer()
        #: Number of the last request, and of the last posted message.
        self.request = 1
        self.posted = 0
        hello = {
            "versions": [protocol.OLDEST_VERSION, protocol.NEWEST_VERSION],
            "lease": self._lease.name,
            "pool": pool,
            "name": f"bench-{os.getpid()}",
            "pid": os.getpid(),
            "rank": 0,
            "guarantee": 0,
        }
        self.socket.send(protocol.pack((protocol.HELLO, 0, 1, 0, 0, 0, hello)))
        _, self.epoch, status, session = self._reply()
        assert status == protocol.OK, session
        self.number: int = session["session"]

    def swap(self, count: int, frees: int | bytes | None) -> Any:
        """``alloc(count)`` that gives ``frees`` back: the ids as they came."""
        self.send_swap(count, frees)
        return self.receive_ids()

    def swapping(self, count: int) -> Callable[[], object]:
        """A call that allocates so many and gives back those of the call before."""
        held: Any = None

        def call() -> None:
            nonlocal held
            held = self.swap(count, held)

        return call

    def send_swap(self, count: int, frees: int | bytes | None) -> None:
        """Without waiting."""
        Socket.send(self.socket, self.packed_swap(count, frees))

    def packed_swap(self, count: int, frees: int | bytes | None, *, open_requests: int = 1) -> bytes:
        """The next request; when it is sent, so many, it included, are not answered yet."""
        self.request += 1
        self.posted += frees is not None
        oldest = max(self.request + 1 - open_requests, 1)
        header = (protocol.ALLOC, self.number, self.request, self.epoch, self.posted, oldest)
        body: bytes = self._pack((*header, count, frees, False))
        return body

    def receive_ids(self) -> Any:
        reply = self._reply()
        assert reply[2] == protocol.OK, reply
        return reply[3]

    def close(self) -> None:
        self._lease.close()
        self.socket.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _reply(self) -> list[Any]:
        body = Socket.recv(self.socket)
        return protocol.unpack(body, len(body))
