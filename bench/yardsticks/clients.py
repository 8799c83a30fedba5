"""The clients' ends of the yardsticks."""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.backend import Socket

TIMEOUT_MS = 10_000


def dealer(endpoint: str) -> zmq.Socket[bytes]:
    """A DEALER that gives up after ten seconds."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = TIMEOUT_MS
    socket.set_hwm(0)
    socket.connect(endpoint)
    return socket


def echo_call(endpoint: str, request_bytes: int) -> Callable[[], object]:
    """One round trip to an echo; as fast as it can be written."""
    socket = dealer(endpoint)
    request = bytes(request_bytes)
    send, receive = Socket.send, Socket.recv

    def call() -> bytes:
        send(socket, request)
        return receive(socket)

    return call
