"""A session's socket. The only file of the client that knows zmq."""

from __future__ import annotations

import os
import threading
from typing import Any

import zmq
from zmq.backend import Socket as BackendSocket

from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path

#: Messages that wait for an allocator that does not read; beyond, posted ones stay in their queue.
HIGH_WATER_MARK = 10_000

#: How long a receive waits, unless told otherwise: its caller then looks whether the allocator is another one by now.
LOOK_MS = 20

# As plain ints: the enum's members cost a microsecond each time.
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}
_context_lock = threading.Lock()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's one context. A forked child makes its own: its parent's has no threads there."""
    with _context_lock:
        pid = os.getpid()
        if pid not in _contexts:
            _contexts[pid] = zmq.Context()
        return _contexts[pid]


class Dealer:
    """Connected to the allocator of a directory, now or whenever there is one. For one thread at a time."""

    def __init__(self, directory: RuntimeDir, wait_ms: int = LOOK_MS) -> None:
        check_socket_path(directory.allocator_socket)
        self._socket: zmq.Socket[bytes] = _context().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = wait_ms
        self._socket.sndhwm = HIGH_WATER_MARK
        self._socket.rcvhwm = HIGH_WATER_MARK
        self._socket.reconnect_ivl = 20
        self._socket.reconnect_ivl_max = 100
        self._socket.connect(directory.endpoint)

    def send(self, body: bytes) -> bool:
        """Without waiting; False when the pipe is full."""
        try:
            BackendSocket.send(self._socket, body, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def exchange(self, body: bytes) -> bytes | None:
        """:meth:`send`, then :meth:`receive`, in one step; None when the pipe is full, too."""
        try:
            BackendSocket.send(self._socket, body, _NOBLOCK)
            return BackendSocket.recv(self._socket)
        except zmq.Again:
            return None

    def receive(self) -> bytes | None:
        """The next message, or None when none came for a moment."""
        try:
            return BackendSocket.recv(self._socket)
        except zmq.Again:
            return None

    def receive_now(self) -> bytes | None:
        """The next message if it is there."""
        try:
            return BackendSocket.recv(self._socket, _NOBLOCK)
        except zmq.Again:
            return None

    def has_message(self) -> bool:
        """Whether :meth:`receive_now` would find something; a third of its cost when not."""
        events: Any = BackendSocket.get(self._socket, _EVENTS)
        return bool(events & _POLLIN)

    def fileno(self) -> int:
        """Readable when something may have come since :meth:`has_message` said no.

        Every use of the socket may take that sign away (zmq_getsockopt(3), ZMQ_FD): ask :meth:`has_message` after
        each, and do not wait before it says no.
        """
        fd: int = self._socket.fileno()
        return fd

    def close(self) -> None:
        self._socket.close(linger=0)
