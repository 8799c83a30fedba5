"""The clients' ends of the yardsticks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgpack
import zmq
import zmq.asyncio
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


def naive_call(endpoint: str, count: int) -> Callable[[], object]:
    """Allocates from the naive daemon and frees what it had before, in one message, as one would write it first."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    held: list[int] = []
    number = 0

    def call() -> None:
        nonlocal held, number
        number += 1
        socket.send_multipart([msgpack.packb({"op": "alloc", "id": number, "n": count, "free": held})])
        if not socket.poll(TIMEOUT_MS):
            raise TimeoutError("the naive daemon did not answer")
        reply = msgpack.unpackb(socket.recv_multipart()[0])
        assert reply["ok"]
        assert reply["id"] == number
        held = reply["slots"]

    return call


class AsyncioEchoClient:
    """Round trips on zmq.asyncio, timed inside one coroutine: the event loop is started once per block."""

    def __init__(self, endpoint: str, request_bytes: int) -> None:
        self._request = bytes(request_bytes)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._connect(endpoint))

    def block(self, calls: int) -> list[int]:
        return self._loop.run_until_complete(self._round_trips(calls))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._loop.close()

    async def _connect(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context(zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)

    async def _round_trips(self, calls: int) -> list[int]:
        times = []
        for _ in range(calls):
            began = time.perf_counter_ns()
            await self._socket.send(self._request)
            await self._socket.recv()
            times.append(time.perf_counter_ns() - began)
        return times
